"""Winograd convolution: transform tiles, multiply position by position, transform back.

Three orders. `channels`: a worker takes a block of tiles through all steps, one block of output
channels after the other. `positions`: the same, one position after the other. `shared`: all
threads work on one large block of tiles, so that the weights pass through the caches once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..between.epilogue import activate, finish, pool
from ..between.masks import passes, place
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.microkernel import multiply
from ..emit.threads import (
    BATCH,
    BIAS,
    CHUNK,
    FOUND,
    MASK,
    RESIDUAL,
    SCRATCH,
    WEIGHT,
    X,
    Y,
    emit_entry,
    emit_region,
)
from ..emit.tiling import emit_zero
from .transforms import transform
from .winograd_geometry import Geometry

TILES_A_TASK = 4  # transforms of the shared order: enough work for a turn of the counter


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """The module of a Winograd convolution."""
    return Winograd(Geometry(p, s, isa.lanes), isa).module()


class Winograd:
    """The generator; subclasses change how V lies and how it is multiplied."""

    tiles = False  # whether products run on the matrix unit

    def __init__(self, geometry: Geometry, isa: Isa) -> None:
        self.g, self.p, self.s, self.isa = geometry, geometry.p, geometry.s, isa

    def module(self) -> Module:
        self.m = Module(self.isa)
        self.inside, self.border = self._input(border=False), self._input(border=True)
        ends = self.g.ends
        self.products = {end: self._product(end) for end in ends}
        self.outputs = {(h, w, end): self._output(h, w, end)
                        for h in _sizes(self.p.conv_h, self.s.tile_h)
                        for w in _sizes(self.p.conv_w, self.s.tile_w) for end in ends}
        if self.s.order == "shared":
            self._shared()
        else:
            self._fused()
        return self.m

    # the steps of one tile

    def _input(self, border: bool) -> Function:
        """One tile of all channels into V; a border tile comes as a table of addresses."""
        g, p, lanes = self.g, self.p, self.g.lanes
        name = "input_border" if border else "input_inside"
        with self.m.function(name, x="pointer", v="pointer") as f:
            def channels(c: Index, count: int) -> None:
                def load(i: int, j: int) -> Vector:
                    if border:
                        return (f.x.load_pointer(i * g.across.n + j) + c).load(count=count)
                    return (f.x + c).load((i * p.w + j) * p.c, count=count)

                def store(i: int, j: int, value: Vector) -> None:
                    self._store_v(f, c, (i * g.across.n + j) * g.v_position, value)

                transform(f, g.down.BT, g.across.BT, load, store)

            whole = p.c // lanes * lanes
            with f.loop(whole, step=lanes) as c:
                channels(c.i, lanes)
            if p.c > whole:
                channels(f.index(whole), p.c - whole)
            self._fill_up(f)
        return f

    def _store_v(self, f: Function, c: Index, at: int, value: Vector) -> None:
        """A vector of channels of the tile at f.v, at one position."""
        (f.v + c * self.g.block).store(value, at)

    def _fill_up(self, f: Function) -> None:
        """Zeros where the depth goes beyond the last vector of channels."""

    def _v_of_tile(self, tile: Index) -> Index:
        """Where a tile begins in V."""
        return tile * self.g.lanes

    def _product(self, end: bool) -> Function:
        """A group of tiles times one panel of weights, the next panel fetched meanwhile."""
        g = self.g
        vectors = g.vectors(end)
        rows = [i * g.lanes for i in range(self.s.rows)]
        with self.m.function("product_end" if end else "product", v="pointer", u="pointer",
                             m="pointer", ahead="pointer") as f:
            acc = multiply(f, f.v, f.u, rows, vectors, g.walk(vectors), self.s.unroll,
                           (f.ahead, g.lines_ahead))
            for i, row in enumerate(acc):
                for j, value in enumerate(row):
                    f.m.store(value, (i * vectors + j) * g.lanes)
        return f

    def _output(self, height: int, width: int, end: bool) -> Function:
        """One tile of one block of channels out of M; `height` x `width` of it are inside."""
        g, lanes = self.g, self.g.lanes
        channels = g.channels(end)
        kinds: Any = {"mask": "pointer"} if self.p.epilogue.mask else {}
        with self.m.function(f"output_{height}x{width}{'_end' if end else ''}", frame="pointer",
                             m="pointer", bias="pointer", residual="pointer", y="pointer",
                             **kinds) as f:
            whole = channels // lanes * lanes
            with f.loop(whole, step=lanes, carry=[f.vector(0.0)]) as k:
                k.values = [self._output_vector(f, k.i, height, width, lanes, k.values[0])]
            total = k.values[0]
            if channels > whole:
                total = self._output_vector(f, f.index(whole), height, width, channels - whole,
                                            total)
            with f.when((total - total).is_nan().any()):  # also where it is infinite
                f.frame.store_index(FOUND, 1)
        return f

    def _output_vector(self, f: Function, k: Index, height: int, width: int, count: int,
                       total: Vector) -> Vector:
        """Writes the tile; returns the total with its values added, to see that they are finite."""
        g, p = self.g, self.p
        found: dict[tuple[int, int], Vector] = {}

        def load(i: int, j: int) -> Vector:
            return (f.m + k).load((i * g.across.n + j) * g.m_position)

        def keep(i: int, j: int, value: Vector) -> None:
            nonlocal total
            if i >= height or j >= width:
                return
            total = total + value
            if p.epilogue.pool == 2:
                found[i, j] = value
                self._pool_when_complete(f, found, i, j, k, count)
                return
            at = (i * p.conv_w + j) * p.k
            value = finish(f, value, p, (f.bias, k), (f.residual + k, at), count)
            self._mark(f, k, {(i, j): value}, value)
            self._write(f, value, k, at, count)

        transform(f, g.down.AT, g.across.AT, load, keep)
        if p.epilogue.pool == 2:
            self._mark_the_rest(f, k, height, width)
        return total

    def _mark(self, f: Function, k: Index, window: dict[tuple[int, int], Vector],
              value: Vector) -> None:
        """The bits of a window with this result, where a mask is asked for."""
        p = self.p
        if p.epilogue.mask:
            found = passes(f, list(window.values()), value, p.epilogue)
            for (i, j), bits in zip(window, found, strict=True):
                place(f.mask, k, p.k, i * p.conv_w + j).store_bits(bits)

    def _mark_the_rest(self, f: Function, k: Index, height: int, width: int) -> None:
        """Windows that are not whole pass nothing."""
        if not self.p.epilogue.mask:
            return
        zero = f.vector(0.0)
        for i in range(height):
            for j in range(width):
                if i >= height // 2 * 2 or j >= width // 2 * 2:
                    at = place(f.mask, k, self.p.k, i * self.p.conv_w + j)
                    at.store_bits(zero.above(zero))

    def _pool_when_complete(self, f: Function, found: dict[tuple[int, int], Vector], i: int,
                            j: int, k: Index, count: int) -> None:
        """Pool a window as soon as its four values are there; they are never written."""
        p, top, left = self.p, i // 2 * 2, j // 2 * 2
        window = [(top + a, left + b) for a in (0, 1) for b in (0, 1)]
        if not all(place in found for place in window):
            return
        values = [found[place] for place in window]
        if p.epilogue.residual:
            values = [value + (f.residual + k).load((a * p.conv_w + b) * p.k, count=count)
                      for value, (a, b) in zip(values, window, strict=True)]
        value = pool(values)  # adding the bias and cutting at zero keep the order
        if p.epilogue.bias:
            value = value + (f.bias + k).load(count=count)
        value = activate(f, value, p.epilogue)
        self._mark(f, k, dict(zip(window, values, strict=True)), value)
        self._write(f, value, k, (top // 2 * p.out_w + left // 2) * p.k, count)

    def _write(self, f: Function, value: Vector, k: Index, at: int, count: int) -> None:
        streaming = self.s.streaming and count == self.g.lanes
        (f.y + k).store(value, at, count=count, streaming=streaming)

    # tiles by number

    def _place(self, tile: Index) -> tuple[Index, Index, Index]:
        """Image, row and column of a tile."""
        image, rest = tile // self.g.tiles, tile % self.g.tiles
        return image, rest // self.g.tile_cols, rest % self.g.tile_cols

    def _transform_tile(self, f: Function, tile: Index, v: Pointer, zeros: Pointer,
                        table: Pointer) -> None:
        g, p = self.g, self.p
        image, row, col = self._place(tile)
        top, left = row * self.s.tile_h - p.padding[0], col * self.s.tile_w - p.padding[2]
        x = f.frame.load_pointer(X) + ((image * p.h + top) * p.w + left) * p.c
        n_h, n_w = g.down.n, g.across.n
        fits = ((top >= 0) & (top < p.h - n_h + 1)) & ((left >= 0) & (left < p.w - n_w + 1))
        with f.either(fits) as (inside, border):
            with inside:
                f.call(self.inside, x, v)
            with border:
                cols = [(left + j >= 0) & (left + j < p.w) for j in range(n_w)]
                for i in range(n_h):
                    in_row = (top + i >= 0) & (top + i < p.h)
                    for j in range(n_w):
                        here = x + (i * p.w + j) * p.c
                        table.store_pointer(i * n_w + j, (in_row & cols[j]).select(here, zeros))
                f.call(self.border, table, v)

    def _finish_tile(self, f: Function, tile: Index, m: Pointer, k: Index, end: bool) -> None:
        p, s = self.p, self.s
        image, row, col = self._place(tile)
        top, left = row * s.tile_h, col * s.tile_w
        full = ((image * p.conv_h + top) * p.conv_w + left) * p.k + k
        at = full
        if p.epilogue.pool == 2:
            top, left = row * (s.tile_h // 2), col * (s.tile_w // 2)
            at = ((image * p.out_h + top) * p.out_w + left) * p.k + k
        args: tuple[Any, ...] = (f.frame, m, f.frame.load_pointer(BIAS) + k,
                                 f.frame.load_pointer(RESIDUAL) + full,
                                 f.frame.load_pointer(Y) + at)
        if p.epilogue.mask:
            pixel = (image * p.conv_h + row * s.tile_h) * p.conv_w + col * s.tile_w
            args += (place(f.frame.load_pointer(MASK), k, p.k, pixel),)
        self._by_size(f, row.equals(self.g.tile_rows - 1), col.equals(self.g.tile_cols - 1), end,
                      args)

    def _by_size(self, f: Function, last_row: Any, last_col: Any, end: bool,
                 args: tuple[Any, ...]) -> None:
        """Call the output that writes as much of the tile as is inside."""
        rows = _sizes(self.p.conv_h, self.s.tile_h)
        cols = _sizes(self.p.conv_w, self.s.tile_w)
        with _whole_or_rest(f, last_row, rows) as row_cases:
            for height, in_rows in row_cases:
                with in_rows, _whole_or_rest(f, last_col, cols) as col_cases:
                    for width, in_cols in col_cases:
                        with in_cols:
                            f.call(self.outputs[height, width, end], *args)

    # blocks of tiles

    def _total(self, f: Function) -> Index:
        return f.frame.load_index(BATCH) * self.g.tiles

    def _transform_tiles(self, f: Function, scratch: Pointer, first: Index, start: Index | int,
                         stop: Index) -> None:
        """Tiles start..stop of the block that begins at tile `first`."""
        table = f.words(self.g.positions)
        zeros = scratch + (self.g.scratch_floats - self.g.depth)
        emit_zero(f, zeros, f.index(self.g.depth))
        with f.loop(stop, start=start) as t:
            self._transform_tile(f, first + t.i, scratch + self._v_of_tile(t.i), zeros, table)

    def _multiply(self, f: Function, scratch: Pointer, u: Pointer, m: Pointer, position: Index,
                  groups: Index, end: bool) -> None:
        """All tiles of a block at one position with one panel."""
        g = self.g
        width = g.vectors(end) * g.lanes
        v, share = scratch + position * g.v_position, g.c_vectors * g.lines_ahead * 16
        with f.loop(groups) as group:
            f.call(self.products[end], v + group.i * (self.s.rows * g.lanes), u,
                   m + group.i * (self.s.rows * width), u + g.panel + group.i * share)

    def _each_block_of_k(self, f: Function, first: Index | int, last: Index, body: Any) -> None:
        """body(block, end) for the blocks first..last of output channels."""
        whole = self.g.k_blocks - self.g.has_tail
        if whole:
            with f.loop(last.minimum(whole), start=first) as block:
                body(block.i, False)
        if self.g.has_tail:
            with f.when(last.equals(self.g.k_blocks)):
                body(f.index(whole), True)

    def _groups(self, count: Index) -> Index:
        return (count + (self.s.rows - 1)) // self.s.rows

    def _fused(self) -> None:
        """A task takes a block of tiles from input to output."""
        g = self.g
        with self.m.function("body", frame="pointer", task="index", worker="index") as f:
            scratch = f.frame.load_pointer(SCRATCH) + f.worker * g.scratch_floats
            first = f.task * g.block
            count = (self._total(f) - first).minimum(g.block)
            self._transform_tiles(f, scratch, first, 0, count)
            steps = self._by_channels if self.s.order == "channels" else self._by_positions
            steps(f, scratch, first, count)
        emit_entry(self.m, [emit_region(
            self.m, "convolve",
            lambda f, frame: (self._total(f) + (g.block - 1)) // g.block, f, self.tiles)])

    def _by_channels(self, f: Function, scratch: Pointer, first: Index, count: Index) -> None:
        g, m = self.g, scratch + self.g.v_floats
        weight, groups = f.frame.load_pointer(WEIGHT), self._groups(count)

        def one_block(block: Index, end: bool) -> None:
            width = g.vectors(end) * g.lanes
            panel = g.panel_floats(width)
            u = weight + block * (g.positions * g.panel)
            with f.loop(g.positions) as position:
                self._multiply(f, scratch, u + position.i * panel, m + position.i * g.m_position,
                               position.i, groups, end)
            with f.loop(count) as t:
                self._finish_tile(f, first + t.i, m + t.i * width, block * g.block_k, end)

        self._each_block_of_k(f, 0, f.index(g.k_blocks), one_block)

    def _by_positions(self, f: Function, scratch: Pointer, first: Index, count: Index) -> None:
        groups, blocks = self._groups(count), f.index(self.g.k_blocks)
        with f.loop(self.g.positions) as position:
            self._one_position(f, scratch, position.i, groups, 0, blocks)
        with f.loop(count) as t:
            self._finish_all_channels(f, scratch, first, t.i)

    def _one_position(self, f: Function, scratch: Pointer, position: Index, groups: Index,
                      first_block: Index | int, last_block: Index) -> None:
        g = self.g
        u = f.frame.load_pointer(WEIGHT) + position * g.panel_floats(g.k_vectors * g.lanes)
        m = scratch + g.v_floats + position * g.m_position

        def one_block(block: Index, end: bool) -> None:
            self._multiply(f, scratch, u + block * g.panel, m + block * (g.block * g.block_k),
                           position, groups, end)

        self._each_block_of_k(f, first_block, last_block, one_block)

    def _finish_all_channels(self, f: Function, scratch: Pointer, first: Index, t: Index) -> None:
        g = self.g

        def one_block(block: Index, end: bool) -> None:
            width = g.vectors(end) * g.lanes
            m = scratch + g.v_floats + block * (g.block * g.block_k) + t * width
            self._finish_tile(f, first + t, m, block * g.block_k, end)

        self._each_block_of_k(f, 0, f.index(g.k_blocks), one_block)

    def _shared(self) -> None:
        """Every step of a large block of tiles is a parallel region."""
        g, parts = self.g, self.s.k_parts

        def chunk(f: Function) -> tuple[Pointer, Index, Index]:
            first = f.frame.load_index(CHUNK) * g.block
            count = (self._total(f) - first).minimum(g.block)
            return f.frame.load_pointer(SCRATCH), first, count

        def handfuls(f: Function, frame: Pointer) -> Index:
            return (chunk(f)[2] + (TILES_A_TASK - 1)) // TILES_A_TASK

        kinds: Any = {"frame": "pointer", "task": "index", "worker": "index"}
        with self.m.function("transform", **kinds) as f1:
            scratch, first, count = chunk(f1)
            start = f1.task * TILES_A_TASK
            self._transform_tiles(f1, scratch, first, start, (start + TILES_A_TASK).minimum(count))
        with self.m.function("multiply", **kinds) as f2:
            scratch, _, count = chunk(f2)
            position, part = f2.task // parts, f2.task % parts
            self._one_position(f2, scratch, position, self._groups(count),
                               part * g.k_blocks // parts, (part + 1) * g.k_blocks // parts)
        with self.m.function("finish", **kinds) as f3:
            scratch, first, count = chunk(f3)
            start = f3.task * TILES_A_TASK
            with f3.loop((start + TILES_A_TASK).minimum(count), start=start) as t:
                self._finish_all_channels(f3, scratch, first, t.i)
        regions = [emit_region(self.m, "transforms", handfuls, f1),
                   emit_region(self.m, "products", lambda f, frame: g.positions * parts, f2,
                               self.tiles),
                   emit_region(self.m, "outputs", handfuls, f3)]
        emit_entry(self.m, regions,
                   chunks=lambda f, frame: (self._total(f) + (g.block - 1)) // g.block)


def _sizes(total: int, tile: int) -> tuple[int, ...]:
    """How much of a tile can lie inside: all of it, or what the last one has."""
    rest = total % tile
    return (tile,) if rest == 0 else (rest,) if total < tile else (tile, rest)


@contextmanager
def _whole_or_rest(f: Function, last: Any, sizes: tuple[int, ...]) -> Iterator[Any]:
    """Pairs of a size and the emitted branch in which it holds."""
    if len(sizes) == 1:
        yield [(sizes[0], nullcontext())]
        return
    with f.either(last) as (yes, no):
        yield [(sizes[1], yes), (sizes[0], no)]

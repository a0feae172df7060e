"""Winograd convolution: transform tiles, multiply position by position, transform back.

Four orders. `channels`: a worker takes a block of tiles through all steps, one block of output
channels after the other. `positions`: the same, one position after the other. `shared`: all
threads work on one large block of tiles, so that the weights pass through the caches once.
`filters` is that of `winograd_filters`.
"""

from __future__ import annotations

from typing import Any

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.microkernel import multiply
from ..emit.sizes import InCode
from ..emit.threads import BATCH, CHUNK, SCRATCH, WEIGHT, X, emit_entry, emit_region
from ..emit.tiling import emit_zero
from .transforms import transform
from .winograd_geometry import FILTERS, SIZES, Geometry
from .winograd_output import Output
from .winograd_tiles import (
    Place,
    all_tiles,
    each_tile,
    first_col,
    first_row,
    image_of,
    place_of,
)

WORD = 8  # bytes of an address
TASK_OF: Any = {"frame": "pointer", "task": "index", "worker": "index"}
TILES_A_TASK = 4  # transforms of the shared order: enough work for a turn of the counter


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """The module of a Winograd convolution."""
    from .winograd_filters import Filters

    kind = Filters if s.order == FILTERS else Winograd
    return kind(Geometry(p, s, isa.lanes), isa).module()


class Winograd:
    """The generator; subclasses change how V lies and how it is multiplied."""

    tiles = False  # whether products run on the matrix unit

    def __init__(self, geometry: Geometry, isa: Isa) -> None:
        self.g, self.p, self.s, self.isa = geometry, geometry.p, geometry.s, isa

    def module(self) -> Module:
        self.m = Module(self.isa)
        self.inside, self.border = self._input(border=False), self._input(border=True)
        self._products()
        self.output = Output(self.m, self.g)
        self._regions()
        return self.m

    def _products(self) -> None:
        self.products = {end: self._product(end) for end in self.g.ends}

    def _regions(self) -> None:
        if self.s.order == "shared":
            self._shared()
        else:
            self._fused()

    def _sizes(self, f: Function) -> InCode:
        """The geometry, with what image sizes decide from the frame."""
        return InCode(f, self.g, SIZES)

    # the steps of one tile

    def _input(self, border: bool) -> Function:
        """One tile of all channels into V; a border tile comes as a table of addresses."""
        g, p, lanes, (down, across) = self.g, self.p, self.g.lanes, self.p.dilation
        name = "input_border" if border else "input_inside"
        with self.m.function(name, frame="pointer", x=g.image, v="pointer") as f:
            z = self._sizes(f)
            step = g.x_step(z)
            pitch = z.w * step
            rows = [f.x + pitch * (i * down) for i in range(0 if border else g.down.n)]

            def channels(c: Index, count: int) -> None:
                to, here = self._v_of_channels(f, c), [row + c for row in rows]

                def load(i: int, j: int) -> Vector:
                    if border:
                        place = f.x.load_pointer(i * g.across.n + j, g.image)
                        return (place + c).load(count=count)
                    return (here[i] + step * (j * across)).load(count=count)

                def store(i: int, j: int, value: Vector) -> None:
                    self._store_v(to, (i * g.across.n + j) * g.v_position, value)

                transform(f, g.down.BT, g.across.BT, load, store)

            whole = p.c // lanes * lanes
            with f.loop(whole, step=lanes) as c:
                channels(c.i, lanes)
            if p.c > whole:
                channels(f.index(whole), p.c - whole)
            self._fill_up(f)
        return f

    def _v_of_channels(self, f: Function, c: Index) -> Pointer:
        """Where the vector of channels c.. of the tile at f.v begins."""
        return f.v + c * self.g.block

    def _store_v(self, to: Pointer, at: int, value: Vector) -> None:
        """A vector of channels, at one position."""
        to.store(value, at)

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

    def _transform_tile(self, f: Function, z: InCode, tile: Place, v: Pointer, zeros: Pointer,
                        table: Pointer) -> None:
        c, n_h, n_w, h, w = self.g.x_step(z), self.g.down.n, self.g.across.n, z.h, z.w
        down, across = self.p.dilation
        span_h, span_w = (n_h - 1) * down + 1, (n_w - 1) * across + 1
        top, left = first_row(z, tile) - z.top, first_col(z, tile) - z.left
        images = f.frame.load_pointer(X, self.g.image)
        x = images + ((image_of(z, tile) * h + top) * w + left) * c
        fits = ((top >= 0) & (top < h - span_h + 1)) & ((left >= 0) & (left < w - span_w + 1))
        with f.either(fits) as (inside, border):
            with inside:
                f.call(self.inside, f.frame, x, v)
            with border:
                places = range(0, n_w * across, across)
                cols = [(left + j >= 0) & (left + j < w) for j in places]
                with f.loop(n_h) as i:
                    y = i.i * down
                    in_row, row = (top + y >= 0) & (top + y < h), x + y * w * c
                    to = table.bytes(i.i * (n_w * WORD))
                    for j, (place, in_col) in enumerate(zip(places, cols, strict=True)):
                        to.store_pointer(j, (in_row & in_col).select(row + place * c, zeros))
                f.call(self.border, f.frame, table, v)

    # blocks of tiles

    def _total(self, f: Function) -> Index:
        return all_tiles(self._sizes(f), f.frame.load_index(BATCH))

    def _transform_tiles(self, f: Function, scratch: Pointer, first: Place, stop: Index,
                         start: Index | int = 0) -> None:
        """Tiles start..stop of a block; `first` is where the first of them lies."""
        table = f.words(self.g.positions)
        zeros = scratch + (self.g.scratch_floats - self.g.depth)
        emit_zero(f, zeros, f.index(self.g.depth))
        z = self._sizes(f)
        with each_tile(f, z, first, stop, start) as (t, tile):
            self._transform_tile(f, z, tile, scratch + self._v_of_tile(t), zeros, table)

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
            start = f.task * g.block
            count = (self._total(f) - start).minimum(g.block)
            first = place_of(self._sizes(f), start)
            self._transform_tiles(f, scratch, first, count)
            steps = self._by_channels if self.s.order == "channels" else self._by_positions
            steps(f, scratch, first, count)
        emit_entry(self.m, [emit_region(
            self.m, "convolve",
            lambda f, frame: (self._total(f) + (g.block - 1)) // g.block, f, self.tiles)])

    def _by_channels(self, f: Function, scratch: Pointer, first: Place, count: Index) -> None:
        g, m, z = self.g, scratch + self.g.v_floats, self._sizes(f)
        weight, groups = f.frame.load_pointer(WEIGHT), self._groups(count)

        def one_block(block: Index, end: bool) -> None:
            width = g.vectors(end) * g.lanes
            panel = g.panel_floats(width)
            u = weight + block * (g.positions * g.panel)
            with f.loop(g.positions) as position:
                self._multiply(f, scratch, u + position.i * panel, m + position.i * g.m_position,
                               position.i, groups, end)
            with each_tile(f, z, first, count) as (t, tile):
                self.output.emit(f, z, tile, m + t * width, block * g.block_k, end)

        self._each_block_of_k(f, 0, f.index(g.k_blocks), one_block)

    def _by_positions(self, f: Function, scratch: Pointer, first: Place, count: Index) -> None:
        groups, blocks = self._groups(count), f.index(self.g.k_blocks)
        with f.loop(self.g.positions) as position:
            self._one_position(f, scratch, position.i, groups, 0, blocks)
        self._finish_tiles(f, scratch, first, count)

    def _one_position(self, f: Function, scratch: Pointer, position: Index, groups: Index,
                      first_block: Index | int, last_block: Index) -> None:
        g = self.g
        u = f.frame.load_pointer(WEIGHT) + position * g.panel_floats(g.k_vectors * g.lanes)
        m = scratch + g.v_floats + position * g.m_position

        def one_block(block: Index, end: bool) -> None:
            self._multiply(f, scratch, u + block * g.panel, m + block * (g.block * g.block_k),
                           position, groups, end)

        self._each_block_of_k(f, first_block, last_block, one_block)

    def _finish_tiles(self, f: Function, scratch: Pointer, first: Place, stop: Index,
                      start: Index | int = 0) -> None:
        """All channels of tiles start..stop of a block; `first` is where the first of them lies."""
        g, z = self.g, self._sizes(f)
        with each_tile(f, z, first, stop, start) as (t, tile):
            def one_block(block: Index, end: bool) -> None:
                at = block * (g.block * g.block_k) + t * (g.vectors(end) * g.lanes)
                self.output.emit(f, z, tile, scratch + g.v_floats + at, block * g.block_k, end)

            self._each_block_of_k(f, 0, f.index(g.k_blocks), one_block)

    def _shared(self) -> None:
        """Every step of a large block of tiles is a parallel region."""
        g, parts = self.g, self.s.k_parts
        with self.m.function("transform", **TASK_OF) as f1:
            self._on_handful(f1, self._transform_tiles)
        with self.m.function("multiply", **TASK_OF) as f2:
            scratch, _, count = self._chunk(f2)
            position, part = f2.task // parts, f2.task % parts
            self._one_position(f2, scratch, position, self._groups(count),
                               part * g.k_blocks // parts, (part + 1) * g.k_blocks // parts)
        with self.m.function("finish", **TASK_OF) as f3:
            self._on_handful(f3, self._finish_tiles)
        regions = [emit_region(self.m, "transforms", self._handfuls, f1),
                   emit_region(self.m, "products", lambda f, frame: g.positions * parts, f2,
                               self.tiles),
                   emit_region(self.m, "outputs", self._handfuls, f3)]
        emit_entry(self.m, regions, chunks=self._chunks)

    # chunks: the tiles that all threads work on

    def _chunks(self, f: Function, frame: Pointer) -> Index:
        return (self._total(f) + (self.g.block - 1)) // self.g.block

    def _chunk(self, f: Function) -> tuple[Pointer, Index, Index]:
        """Scratch, and the first of its tiles and how many."""
        first = f.frame.load_index(CHUNK) * self.g.block
        count = (self._total(f) - first).minimum(self.g.block)
        return f.frame.load_pointer(SCRATCH), first, count

    def _handfuls(self, f: Function, frame: Pointer) -> Index:
        return (self._chunk(f)[2] + (TILES_A_TASK - 1)) // TILES_A_TASK

    def _on_handful(self, f: Function, step: Any) -> None:
        scratch, first, count = self._chunk(f)
        start = f.task * TILES_A_TASK
        step(f, scratch, place_of(self._sizes(f), first + start),
             (start + TILES_A_TASK).minimum(count), start)


"""Gradients of weights in the Winograd domain: U = sum over tiles of M^T V, then G^T U G.

V are tiles of the input, M tiles of the gradient, both transformed; input channels lie in the
lanes. Sums run over `tiles` tiles in registers, then over such blocks in memory, which keeps
the rounding of long sums small. Two orders. `parts`: every task takes a part of the tiles and
sums it on its own. `shared`: all threads work on one chunk of tiles, a position each.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from ...core.isa import Isa
from ...core.problem import Problem
from ...core.schedule import Schedule
from ..winograd_math import Matrix, Transform, matrices
from .emit import Function, Index, Module, Pointer, Vector
from .geometry import Sizes
from .microkernel import Walk, multiply
from .threads import BATCH, CHUNK, SCRATCH, WEIGHT, X, Y, emit_entry, emit_region
from .tiling import ceil_div, emit_zero
from .transforms import transform
from .transpose import interleave
from .windows import WindowReader, Windows

APART = 16  # floats between positions, so that they do not meet in the same cache sets
TILES_A_TASK = 4
KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}


class Geometry(Sizes):
    """Every size of the gradient of a weight."""

    @cached_property
    def down(self) -> Transform:
        return matrices(self.s.tile_h, self.p.r)

    @cached_property
    def across(self) -> Transform:
        return matrices(self.s.tile_w, self.p.s)

    @cached_property
    def positions(self) -> int:
        return self.down.n * self.across.n

    @cached_property
    def tile_cols(self) -> int:
        return ceil_div(self.p.conv_w, self.s.tile_w)

    @cached_property
    def tiles(self) -> int:
        """Tiles of one image."""
        return ceil_div(self.p.conv_h, self.s.tile_h) * self.tile_cols

    @cached_property
    def width(self) -> int:
        """Input channels of a register tile."""
        return self.s.vectors * self.lanes

    @cached_property
    def c_blocks(self) -> int:
        return ceil_div(self.p.c, self.width)

    @cached_property
    def c_padded(self) -> int:
        return self.c_blocks * self.width

    @cached_property
    def k_padded(self) -> int:
        return ceil_div(self.p.k, self.lanes) * self.lanes

    @cached_property
    def chunk(self) -> int:
        """Tiles that lie in V and M at a time."""
        return self.s.tiles * self.s.blocks

    @cached_property
    def v_position(self) -> int:
        """Floats from one position of V to the next."""
        return self.c_padded * self.chunk + APART

    @cached_property
    def m_position(self) -> int:
        return self.k_padded * self.chunk + APART

    @cached_property
    def u_position(self) -> int:
        return self.c_padded * self.k_padded

    @cached_property
    def u_floats(self) -> int:
        return self.positions * self.u_position

    @cached_property
    def tiles_floats(self) -> int:
        """V, M and a pixel of zeros."""
        return self.positions * (self.v_position + self.m_position) + max(self.c_padded,
                                                                          self.k_padded)

    @cached_property
    def part_floats(self) -> int:
        """Scratch of one part."""
        return self.u_floats + self.tiles_floats

    def scratch_bytes(self, threads: int) -> int:
        return 4 * self.part_floats * self.s.parts

    def v_at(self, tile: Index, c: Index) -> Index:
        """Where V[tile][c] of one position lies: [block][block of C][tile][lane of the block]."""
        return self._panel(tile, c, self.c_padded, self.width)

    def m_at(self, tile: Index, k: Index) -> Index:
        """Where M[tile][k] of one position lies: [block][vector of K][tile][lane]."""
        return self._panel(tile, k, self.k_padded, self.lanes)

    def _panel(self, tile: Index, channel: Index, channels: int, width: int) -> Index:
        t = self.s.tiles
        return (tile // t * (t * channels) + tile % t * width
                + channel // width * (t * width) + channel % width)


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """The module of a weight's gradient."""
    return _Gradient(Geometry(p, s, isa.lanes), isa).module()


def _transposed(matrix: Matrix) -> Matrix:
    return tuple(zip(*matrix, strict=True))


class _Gradient:
    def __init__(self, geometry: Geometry, isa: Isa) -> None:
        self.g, self.p, self.s, self.isa = geometry, geometry.p, geometry.s, isa

    def module(self) -> Module:
        self.m, g, p, s = Module(self.isa), self.g, self.p, self.s
        step, start = (s.tile_h, s.tile_w), (p.padding[0], p.padding[2])
        self.inputs = WindowReader(
            self.m, "input", Windows(p.h, p.w, p.c, g.down.n, g.across.n, step, start),
            (g.down.BT, g.across.BT), lambda c: g.v_at(c.f.index(0), c), g.v_position)
        self.gradients = WindowReader(
            self.m, "gradient", Windows(p.conv_h, p.conv_w, p.k, *step, step, (0, 0)),
            (_transposed(g.down.AT), _transposed(g.across.AT)),
            lambda k: g.m_at(k.f.index(0), k), g.m_position)
        self.products = {first: self._product(first) for first in (True, False)}
        finish = self._finish()
        if s.order == "shared":
            self._shared(finish)
        else:
            self._parts(finish)
        return self.m

    # the steps

    def _product(self, first: bool) -> Function:
        """A block of tiles: rows of K against a block of C, added to what is in U."""
        g, s = self.g, self.s
        walk = Walk(((s.tiles, g.lanes, g.width),))
        with self.m.function("product_first" if first else "product", mm="pointer", v="pointer",
                             u="pointer") as f:
            acc = multiply(f, f.mm, f.v, range(s.rows), s.vectors, walk, s.unroll)
            for i, row in enumerate(acc):
                for j, value in enumerate(row):
                    at = i * g.width + j * g.lanes
                    f.u.store(value if first else f.u.load(at) + value, at)
        return f

    def _read_tiles(self, f: Function, scratch: Pointer, first: Index, start: Index | int,
                    stop: Index) -> None:
        """Tiles start..stop of the chunk that begins at tile `first`."""
        g = self.g
        zeros = scratch + (g.tiles_floats - max(g.c_padded, g.k_padded))
        emit_zero(f, zeros, f.index(max(g.c_padded, g.k_padded)))
        table, mm = f.words(g.positions), scratch + g.positions * g.v_position
        x, grad = f.frame.load_pointer(X), f.frame.load_pointer(WEIGHT)
        with f.loop(stop, start=start) as t:
            image, rest = (first + t.i) // g.tiles, (first + t.i) % g.tiles
            place = image, rest // g.tile_cols, rest % g.tile_cols
            nothing = f.index(0)
            self.inputs.read(f, x, place, scratch + g.v_at(t.i, nothing), zeros, table)
            self.gradients.read(f, grad, place, mm + g.m_at(t.i, nothing), zeros, table)

    def _clear(self, f: Function, scratch: Pointer, position: Index, count: Index,
               stop: Index) -> None:
        """Tiles count..stop of one position: what no tile was read into, and lanes beyond C, K."""
        g = self.g
        mm = scratch + g.positions * g.v_position
        with f.loop(stop, start=count) as t:
            for to, at, channels, width in (
                    (scratch + position * g.v_position, g.v_at, g.c_padded, g.width),
                    (mm + position * g.m_position, g.m_at, g.k_padded, g.lanes)):
                with f.loop(channels, step=width) as c:
                    emit_zero(f, to + at(t.i, c.i), f.index(width))

    def _clear_lanes(self, f: Function, scratch: Pointer, position: Index, stop: Index) -> None:
        """Vectors of V that hold no channel at all; partly filled ones are stored whole."""
        g = self.g
        first = ceil_div(self.p.c, g.lanes) * g.lanes
        if first == g.c_padded:
            return
        with f.loop(stop) as t, f.loop(g.c_padded, start=first, step=g.lanes) as c:
            (scratch + position * g.v_position).store(f.vector(0.0), g.v_at(t.i, c.i))

    def _multiply(self, f: Function, scratch: Pointer, u: Pointer, position: Index, count: Index,
                  first: Any) -> None:
        """All blocks of a chunk at one position; `first` tells whether U is still to be filled."""
        g, s = self.g, self.s
        blocks = ((count + (s.tiles - 1)) // s.tiles).maximum(1)
        self._clear(f, scratch, position, count, blocks * s.tiles)
        self._clear_lanes(f, scratch, position, count)
        v = scratch + position * g.v_position
        mm = scratch + (g.positions * g.v_position + position * g.m_position)
        u = u + position * g.u_position

        def one(block: Index, product: Function) -> None:
            with f.loop(g.c_blocks) as c, f.loop(g.k_padded // s.rows) as k:
                row = k.i * s.rows
                f.call(product, mm + (block * (s.tiles * g.k_padded) + g.m_at(f.index(0), row)),
                       v + (block * (s.tiles * g.c_padded) + c.i * (s.tiles * g.width)),
                       u + (c.i * (g.k_padded * g.width) + row * g.width))

        with f.either(first) as (fill, add):
            with fill:
                one(f.index(0), self.products[True])
            with add:
                one(f.index(0), self.products[False])
        with f.loop(blocks, start=1) as block:
            one(block.i, self.products[False])

    def _finish(self) -> Function:
        """dW of one output channel: the sums of all parts, transformed back."""
        g, p = self.g, self.p
        with self.m.function("finish", **KINDS) as f:
            u = f.frame.load_pointer(SCRATCH) + f.task * g.width
            to = f.frame.load_pointer(Y) + f.task * (p.c * p.r * p.s)
            whole = p.c // g.lanes * g.lanes
            with f.loop(whole, step=g.lanes) as c:
                self._finish_vector(f, u, to, c.i, g.lanes)
            if p.c > whole:
                self._finish_vector(f, u, to, f.index(whole), p.c - whole)
        return f

    def _finish_vector(self, f: Function, u: Pointer, to: Pointer, c: Index, count: int) -> None:
        g, p, taps = self.g, self.p, self.p.r * self.p.s
        at = u + (c // g.width * (g.k_padded * g.width) + c % g.width)
        found: dict[int, Vector] = {}

        def load(i: int, j: int) -> Vector:
            here = at + (i * g.across.n + j) * g.u_position
            total = here.load()
            for part in range(1, self.s.parts):
                total = total + here.load(part * g.part_floats)
            return total

        def keep(i: int, j: int, value: Vector) -> None:
            found[i * p.s + j] = value

        transform(f, _transposed(g.down.G), _transposed(g.across.G), load, keep)
        for i, value in enumerate(interleave([found[tap] for tap in range(taps)])):
            left = count * taps - i * g.lanes
            if left > 0:
                (to + c * taps).store(value, i * g.lanes, count=min(left, g.lanes))

    # the orders

    def _total(self, f: Function) -> Index:
        return f.frame.load_index(BATCH) * self.g.tiles

    def _parts(self, finish: Function) -> None:
        """A task takes its part of the tiles, a chunk at a time."""
        g, s = self.g, self.s
        with self.m.function("body", **KINDS) as f:
            u = f.frame.load_pointer(SCRATCH) + f.task * g.part_floats
            scratch, total = u + g.u_floats, self._total(f)
            start, stop = f.task * total // s.parts, (f.task + 1) * total // s.parts
            # one chunk also where there is nothing to sum: U must be filled
            chunks = ((stop - start + (g.chunk - 1)) // g.chunk).maximum(1)
            with f.loop(chunks) as chunk:
                first = start + chunk.i * g.chunk
                count = (stop - first).minimum(g.chunk)
                self._read_tiles(f, scratch, first, 0, count)
                with f.loop(g.positions) as position:
                    self._multiply(f, scratch, u, position.i, count, chunk.i.equals(0))
        emit_entry(self.m, [emit_region(self.m, "sum", lambda f, frame: s.parts, f),
                            emit_region(self.m, "results", lambda f, frame: self.p.k, finish)])

    def _shared(self, finish: Function) -> None:
        """Reading and multiplying are parallel regions, for one chunk after the other."""
        g = self.g

        def chunk(f: Function) -> tuple[Pointer, Index, Index]:
            first = f.frame.load_index(CHUNK) * g.chunk
            count = (self._total(f) - first).minimum(g.chunk)
            return f.frame.load_pointer(SCRATCH) + g.u_floats, first, count

        def chunks(f: Function, frame: Pointer) -> Index:
            return ((self._total(f) + (g.chunk - 1)) // g.chunk).maximum(1)

        def handfuls(f: Function, frame: Pointer) -> Index:
            return (chunk(f)[2] + (TILES_A_TASK - 1)) // TILES_A_TASK

        def at_the_end(f: Function, frame: Pointer) -> Index:
            last = frame.load_index(CHUNK).equals(chunks(f, frame) - 1)
            return last.select(f.index(self.p.k), f.index(0))

        with self.m.function("read", **KINDS) as f1:
            scratch, first, count = chunk(f1)
            start = f1.task * TILES_A_TASK
            self._read_tiles(f1, scratch, first, start, (start + TILES_A_TASK).minimum(count))
        with self.m.function("multiply", **KINDS) as f2:
            scratch, _, count = chunk(f2)
            self._multiply(f2, scratch, f2.frame.load_pointer(SCRATCH), f2.task, count,
                           f2.frame.load_index(CHUNK).equals(0))
        emit_entry(self.m, [emit_region(self.m, "tiles", handfuls, f1),
                            emit_region(self.m, "products", lambda f, frame: g.positions, f2),
                            emit_region(self.m, "results", at_the_end, finish)], chunks=chunks)

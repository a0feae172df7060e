"""Sums of outer products: U[position] = sum over items of M[item]^T V[item].

What every gradient of a weight comes down to; items are pixels, or tiles of them. Sums run over
`tiles` items in registers, then over such blocks in memory: short sums round less. Four orders.
`parts`: a task takes a part of the items and sums it on its own, so that the order of summation
does not depend on who runs it. `bands`: the same for a band of the positions, whose sums and
items stay near; items are read once for each band. `shared`: all threads work on one chunk of
items, a position each. `squares`: all items are read first, then a task makes some of the results
from beginning to end (squares.py).
"""

from __future__ import annotations

from typing import Any

from ....core.cached import cached
from ....core.isa import Isa
from ..emit import Function, Index, Module, Pointer
from ..emit.elements import FLOAT32
from ..emit.microkernel import Walk, multiply
from ..emit.threads import BATCH, CHUNK, SCRATCH, emit_entry, emit_region
from ..emit.tiling import ceil_div, emit_zero
from .geometry import Sizes
from .squares import ITEMS_A_TASK, KINDS, emit_squares

APART = 16  # floats between positions, so that they do not meet in the same cache sets


class OuterGeometry(Sizes):
    """Sizes of the panels; the first five are for a subclass to say."""

    @cached
    def positions(self) -> int:
        raise NotImplementedError

    @cached
    def items(self) -> int:
        """Of one image."""
        raise NotImplementedError

    @cached
    def columns(self) -> int:
        """Of V, in the lanes."""
        raise NotImplementedError

    @cached
    def rows(self) -> int:
        """Of M."""
        raise NotImplementedError

    @cached
    def own_floats(self) -> int:
        """Scratch for reading an item."""
        raise NotImplementedError

    @cached
    def bands(self) -> int:
        """Groups of neighbouring positions, each read on its own."""
        return 1

    @cached
    def width(self) -> int:
        """Columns of a register tile."""
        return int(self.s.vectors) * self.lanes

    @cached
    def c_blocks(self) -> int:
        return ceil_div(self.columns, self.width)

    @cached
    def c_padded(self) -> int:
        return self.c_blocks * self.width

    @cached
    def k_padded(self) -> int:
        return ceil_div(self.rows, self.lanes) * self.lanes

    @cached
    def chunk(self) -> int:
        """Items that lie in V and M at a time."""
        return int(self.s.tiles * self.s.blocks)

    @cached
    def v_position(self) -> int:
        """Floats from one position of V to the next."""
        return self.c_padded * self.chunk + APART

    @cached
    def m_position(self) -> int:
        return self.k_padded * self.chunk + APART

    @cached
    def u_position(self) -> int:
        return self.c_padded * self.k_padded

    @cached
    def together(self) -> int:
        """Positions of a band."""
        return self.positions // self.bands

    @cached
    def m_start(self) -> int:
        """Where M begins behind V."""
        return self.together * self.v_position

    @cached
    def own_start(self) -> int:
        return self.m_start + self.together * self.m_position

    @cached
    def panel_floats(self) -> int:
        """V, M and what reading needs."""
        return self.own_start + self.own_floats

    @cached
    def u_floats(self) -> int:
        return self.positions * self.u_position

    @cached
    def square_k(self) -> int:
        """Rows of a square of U."""
        return int(self.s.square) * self.lanes

    @cached
    def square_c(self) -> int:
        """Its columns, in whole register tiles."""
        return ceil_div(self.square_k, self.width) * self.width

    @cached
    def square_position(self) -> int:
        """Floats from one position of a square to the next."""
        return self.square_k * self.square_c

    @cached
    def part_floats(self) -> int:
        """Scratch of one part: U, and V and M behind it where they are not a worker's."""
        if self.s.order == "squares":
            return self.panel_floats
        return self.u_floats + (0 if self.s.order == "bands" else self.panel_floats)

    @cached
    def worker_floats(self) -> int:
        """Scratch of one worker, behind that of all parts."""
        if self.s.order == "squares":
            return self.positions * self.square_position
        return self.panel_floats if self.s.order == "bands" else 0

    def scratch_bytes(self, threads: int) -> int:
        return FLOAT32.bytes * (self.part_floats * int(self.s.parts) + self.worker_floats * threads)

    def v_at(self, item: Index, c: Index | int) -> Index:
        """Where V[item][c] of one position lies: [block][block of C][item][lane of the block]."""
        return self._panel(item, c, self.c_padded, self.width)

    def m_at(self, item: Index, k: Index | int) -> Index:
        """Where M[item][k] of one position lies: [block][vector of K][item][lane]."""
        return self._panel(item, k, self.k_padded, self.lanes)

    def u_at(self, c: Index, k: Index) -> Index:
        """Where U[k][c] of one position lies: [block of C][k][lane of the block]."""
        return (c // self.width * (self.k_padded * self.width) + c % self.width
                + k * self.width)

    def _panel(self, item: Index, channel: Index | int, channels: int, width: int) -> Index:
        t = int(self.s.tiles)
        return (item // t * (t * channels) + item % t * width
                + channel // width * (t * width) + channel % width)


class OuterSums:
    """The module of such a sum; a subclass reads items and writes what comes out."""

    tiles = False  # whether products run on the matrix unit

    def __init__(self, geometry: Any, isa: Isa) -> None:
        self.g, self.p, self.s, self.isa = geometry, geometry.p, geometry.s, isa
        self.m = Module(isa)

    def read(self, f: Function, scratch: Pointer, first: Index, start: Index | int,
             stop: Index, band: int = 0) -> None:
        """Emit: items start..stop of the chunk that begins at item `first` into V and M."""
        raise NotImplementedError

    def finish(self) -> Function:
        """What is done with U at the end; a task for each row of the result."""
        raise NotImplementedError

    def finish_square(self, f: Function, u: Pointer, k: Index, c: Index) -> None:
        """Emit: the same with a square of U, whose first row and column are k and c."""
        raise NotImplementedError

    def module(self) -> Module:
        self.products = {first: self._product(first) for first in (True, False)}
        {"parts": self._parts, "bands": self._bands, "shared": self._shared,
         "squares": lambda: emit_squares(self)}[self.s.order]()
        return self.m

    def _product(self, first: bool) -> Function:
        """A block of items: rows of M against a block of columns, added to what is in U."""
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

    def clear(self, f: Function, scratch: Pointer, position: Index, count: Index,
              stop: Index) -> None:
        """Items count..stop of one position, which nothing was read into."""
        g = self.g
        with f.loop(stop, start=count) as t:
            for to, at, channels, width in (
                    (scratch + position * g.v_position, g.v_at, g.c_padded, g.width),
                    (scratch + (position * g.m_position + g.m_start), g.m_at, g.k_padded,
                     g.lanes)):
                with f.loop(channels, step=width) as c:
                    emit_zero(f, to + at(t.i, c.i), f.index(width))

    def clear_lanes(self, f: Function, scratch: Pointer, position: Index, stop: Index,
                    start: Index | int = 0) -> None:
        """Vectors of V that hold no column at all; partly filled ones are stored whole."""
        g = self.g
        first = ceil_div(g.columns, g.lanes) * g.lanes
        if first == g.c_padded:
            return
        with f.loop(stop, start=start) as t, f.loop(g.c_padded, start=first, step=g.lanes) as c:
            (scratch + position * g.v_position).store(f.vector(0.0), g.v_at(t.i, c.i))

    def _multiply(self, f: Function, scratch: Pointer, u: Pointer, position: Index, count: Index,
                  first: Any) -> None:
        """All blocks of a chunk at one position; `first` tells whether U is still to be filled."""
        g, s = self.g, self.s
        blocks = ((count + (s.tiles - 1)) // s.tiles).maximum(1)
        self.clear(f, scratch, position, count, blocks * s.tiles)
        self.clear_lanes(f, scratch, position, count)
        v, mm = scratch + position * g.v_position, scratch + (position * g.m_position + g.m_start)
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

    def total(self, f: Function) -> Index:
        return f.frame.load_index(BATCH) * self.g.items

    def _parts(self) -> None:
        """A task takes its part of the items, a chunk at a time."""
        g, s, finish = self.g, self.s, self.finish()
        with self.m.function("body", **KINDS) as f:
            u = f.frame.load_pointer(SCRATCH) + f.task * g.part_floats
            scratch, total = u + g.u_floats, self.total(f)
            start, stop = f.task * total // s.parts, (f.task + 1) * total // s.parts
            self._sum(f, scratch, u, start, stop)
        emit_entry(self.m, [emit_region(self.m, "sum", lambda f, frame: s.parts, f, self.tiles),
                            emit_region(self.m, "results", lambda f, frame: self.p.k, finish)])

    def _sum(self, f: Function, scratch: Pointer, u: Pointer, start: Index, stop: Index,
             band: int = 0) -> None:
        """Items start..stop at the positions of a band."""
        g = self.g
        # one chunk also where there is nothing to sum: U must be filled
        chunks = ((stop - start + (g.chunk - 1)) // g.chunk).maximum(1)
        with f.loop(chunks) as chunk:
            first = start + chunk.i * g.chunk
            count = (stop - first).minimum(g.chunk)
            self.read(f, scratch, first, 0, count, band)
            with f.loop(g.together) as position:
                self._multiply(f, scratch, u, position.i, count, chunk.i.equals(0))

    def _bands(self) -> None:
        """A task takes a part of the items and a band of the positions."""
        g, s, finish = self.g, self.s, self.finish()
        with self.m.function("body", **KINDS) as f:
            part, total = f.task // g.bands, self.total(f)
            u = f.frame.load_pointer(SCRATCH) + part * g.part_floats
            scratch = f.frame.load_pointer(SCRATCH) + (f.worker * g.worker_floats
                                                       + g.part_floats * s.parts)
            start, stop = part * total // s.parts, (part + 1) * total // s.parts
            for band in range(g.bands):
                with f.when((f.task % g.bands).equals(band)):
                    here = u + band * g.together * g.u_position
                    self._sum(f, scratch, here, start, stop, band)
        tasks = g.bands * s.parts
        emit_entry(self.m, [emit_region(self.m, "sum", lambda f, frame: tasks, f, self.tiles),
                            emit_region(self.m, "results", lambda f, frame: self.p.k, finish)])

    def _shared(self) -> None:
        """Reading and multiplying are parallel regions, for one chunk after the other."""
        g, finish = self.g, self.finish()

        def chunk(f: Function) -> tuple[Pointer, Index, Index]:
            first = f.frame.load_index(CHUNK) * g.chunk
            count = (self.total(f) - first).minimum(g.chunk)
            return f.frame.load_pointer(SCRATCH) + g.u_floats, first, count

        def chunks(f: Function, frame: Pointer) -> Index:
            return ((self.total(f) + (g.chunk - 1)) // g.chunk).maximum(1)

        def handfuls(f: Function, frame: Pointer) -> Index:
            return (chunk(f)[2] + (ITEMS_A_TASK - 1)) // ITEMS_A_TASK

        def at_the_end(f: Function, frame: Pointer) -> Index:
            last = frame.load_index(CHUNK).equals(chunks(f, frame) - 1)
            return last.select(f.index(self.p.k), f.index(0))

        with self.m.function("read", **KINDS) as f1:
            scratch, first, count = chunk(f1)
            start = f1.task * ITEMS_A_TASK
            self.read(f1, scratch, first, start, (start + ITEMS_A_TASK).minimum(count))
        with self.m.function("multiply", **KINDS) as f2:
            scratch, _, count = chunk(f2)
            self._multiply(f2, scratch, f2.frame.load_pointer(SCRATCH), f2.task, count,
                           f2.frame.load_index(CHUNK).equals(0))
        emit_entry(self.m, [emit_region(self.m, "tiles", handfuls, f1),
                            emit_region(self.m, "products", lambda f, frame: g.positions, f2,
                                        self.tiles),
                            emit_region(self.m, "results", at_the_end, finish)], chunks=chunks)

"""Implicit GEMM on the matrix unit: rows of tiles are pixels, bfloat16 parts of floats.

A task packs some rows of the input, split into parts, as [32 channels][phase][part][pixel]: a
line of memory each. Pixels that a stride keeps apart are neighbours in a phase, so that sixteen
outputs in a row read sixteen lines in a row at every tap. With few channels, a line holds all
that a row of the filter sees, and there is one tap a row. Outputs run through all columns of the
packed rows; those of columns that do not exist are computed and not stored. Of 1x1 filters that
skip nothing, all pixels of all images are rows of one pixel.
"""

from __future__ import annotations

from typing import Any

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ...matrix import DEPTH, SIDE
from ..between.epilogue import finish, pool
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.amx import TILE, Side, multiply
from ..emit.elements import FLOAT32
from ..emit.microkernel import LINE, Walk
from ..emit.parts import split
from ..emit.threads import BATCH, BIAS, RESIDUAL, SCRATCH, WEIGHT, X, Y, emit_entry, emit_region
from ..emit.tiling import ceil_div, emit_copy, emit_zero
from .direct_geometry import Geometry
from .passes import Kind

AHEAD = 1024  # floats of the input that are asked for before they are packed
SOON = 4096  # and of weights before they are multiplied, where each is used once


def make(p: Problem, s: Schedule, isa: Isa, products: int) -> Module:
    """The module of a direct convolution on the matrix unit."""
    return _Direct(Geometry(p, s, isa.lanes, products), isa).module()


class _Direct:
    def __init__(self, geometry: Geometry, isa: Isa) -> None:
        self.g, self.p, self.s, self.isa = geometry, geometry.p, geometry.s, isa

    def module(self) -> Module:
        self.m = Module(self.isa)
        self.convert, self.clear = self._convert(), self._clear()
        self.pack = self._pack()
        self.products = {end: self._product(end) for end in self.g.ends}
        write = self._write if self.p.epilogue.pool == 1 else self._pool
        self.writes = {end: write(end) for end in self.g.ends}
        body = self._body()
        emit_entry(self.m, [emit_region(
            self.m, "multiply", lambda f, frame: self.g.tasks(frame.load_index(BATCH)), body,
            tiles=True)])
        return self.m

    # packing

    def _convert(self) -> Function:
        """Pixels of the input, `step` floats apart, into the lines of a phase."""
        g, c = self.g, self.g.values
        with self.m.function("convert", x="pointer", to="pointer", count="index") as f:
            step = self.p.stride[1] * self.p.c
            with f.loop(f.count) as pixel:
                x, to = f.x + pixel.i * step, f.to + pixel.i * LINE
                with f.loop(c // DEPTH) as chunk:
                    self._convert_chunk(f, x + chunk.i * DEPTH, to + chunk.i * g.chunk_floats,
                                        DEPTH)
                if c % DEPTH:
                    whole = c // DEPTH
                    self._convert_chunk(f, x + whole * DEPTH, to + whole * g.chunk_floats,
                                        c % DEPTH)
        return f

    def _convert_chunk(self, f: Function, x: Pointer, to: Pointer, channels: int) -> None:
        lanes = self.g.lanes
        for half in range(DEPTH // lanes):
            count = max(0, min(lanes, channels - half * lanes))
            value = x.load(half * lanes, count=count) if count else f.vector(0.0)
            x.prefetch(half * lanes + AHEAD, level=1)
            for part, bits in enumerate(split(f, value, self.g.parts)):
                to.store(bits, part * self.g.plane + half * lanes // 2)

    def _clear(self) -> Function:
        """Zeros in all parts of some pixels of a phase."""
        g = self.g
        with (self.m.function("clear", to="pointer", count="index") as f,
              f.loop(g.chunks) as chunk, f.loop(f.count) as pixel):
            to = f.to + chunk.i * g.chunk_floats + pixel.i * LINE
            for part in range(g.parts):
                to.store(f.vector(0.0), part * g.plane)
        return f

    def _pack(self) -> Function:
        """All phases of the input rows under `rows` output rows; the first is row `top`."""
        g, p = self.g, self.p
        with self.m.function("pack", x="pointer", to="pointer", top="index", rows="index") as f:
            if g.joined:
                f.call(self.convert, f.x + f.top * p.c, f.to, f.rows)
                return f
            row_of = self._pack_taps if g.joins_taps else self._pack_pixels
            for number, (down, across) in enumerate(g.phases):
                with f.loop(f.rows + g.below) as row:
                    y = f.top + row.i * p.stride[0] + down
                    to = f.to + number * g.parts * g.plane + row.i * (g.pitch * LINE)
                    with f.either((y >= 0) & (y < p.h)) as (inside, outside):
                        with inside:
                            row_of(f, f.x + y * (p.w * p.c), to, across - p.padding[2])
                        with outside:
                            f.call(self.clear, to, g.pitch)
        return f

    def _pack_pixels(self, f: Function, x: Pointer, to: Pointer, first: int) -> None:
        """A row of a phase whose first pixel is in column `first`."""
        g, p = self.g, self.p
        start = min(g.pitch, max(0, ceil_div(-first, p.stride[1])))
        stop = min(g.pitch, max(start, ceil_div(p.w - first, p.stride[1])))
        if start:
            f.call(self.clear, to, start)
        f.call(self.convert, x + (first + start * p.stride[1]) * p.c, to + start * LINE,
               stop - start)
        if stop < g.pitch:
            f.call(self.clear, to + stop * LINE, g.pitch - stop)

    def _pack_taps(self, f: Function, x: Pointer, to: Pointer, first: int) -> None:
        """A row of what rows of taps see, from a copy of the input's row that has padding."""
        g, p = self.g, self.p
        columns = (p.conv_w - 1) * p.stride[1] + p.s
        start, stop = min(-first, columns), min(p.w - first, columns)
        row = f.to + g.sums_start
        emit_zero(f, row, f.index(start * p.c))
        emit_copy(f, row + start * p.c, x, (stop - start) * p.c)
        emit_zero(f, row + stop * p.c, f.index((columns - stop) * p.c))
        f.call(self.convert, row, to, g.pitch)

    # multiplying

    def _product(self, end: bool) -> dict[Kind, Function]:
        """For each kind of pass: a group of pixels times so many chunks of a panel."""
        return {kind: self._one_pass(end, *kind) for kind in self.g.passes.kinds}

    def _one_pass(self, end: bool, first: bool, length: int) -> Function:
        g, columns, taps = self.g, self.g.vectors(end), len(self.g.taps)
        rows = range(g.group // SIDE)
        left = Side(tuple(i * SIDE * LINE for i in rows), g.plane,
                    passing=taps == 1 and g.groups > 1)
        right = Side(tuple(j * TILE for j in range(columns)), columns * TILE,
                     passing=g.groups == 1)
        out = Side(tuple(i * SIDE * columns * SIDE for i in rows), SIDE,
                   FLOAT32.bytes * columns * SIDE)
        step = g.parts * columns * TILE
        walk = Walk(((length, g.chunk_floats, taps * step),))
        name = f"product_{'first' if first else 'next'}{length}{'_end' if end else ''}"
        with self.m.function(name, a="pointer", b="pointer", c="pointer", ahead="pointer") as f:
            multiply(f, f.a, f.b, f.c, left, right, out, walk, self.g.products, first,
                     (f.ahead, g.lines_ahead), [(at, tap * step) for at, tap in g.starts])
        return f

    def _write(self, end: bool) -> Function:
        """The sums of pixels `first`.. of the packed rows, as far as they are outputs."""
        g, p = self.g, self.p
        width = g.vectors(end) * g.lanes
        kinds: Any = {"c": "pointer", "bias": "pointer", "residual": "pointer", "y": "pointer",
                      "first": "index", "count": "index"}
        name = "write_end" if end else "write"
        with self.m.function(name, **kinds) as f, f.loop(f.count) as i:
            pixel, c = f.first + i.i, f.c + i.i * width
            if g.pitch == p.conv_w:
                self._write_pixel(f, c, pixel * p.k, end)
            else:
                row, col = pixel // g.pitch, pixel % g.pitch
                with f.when(col < p.conv_w):
                    self._write_pixel(f, c, (row * p.conv_w + col) * p.k, end)
        return f

    def _write_pixel(self, f: Function, c: Pointer, at: Index, end: bool) -> None:
        g, lanes = self.g, self.g.lanes
        residual, y = f.residual + at, f.y + at
        for j in range(g.vectors(end)):
            k = j * lanes
            count = min(lanes, g.channels(end) - k)
            value = finish(f, c.load(k), self.p, (f.bias, k), (residual, k), count)
            y.store(value, k, count=count, streaming=self.s.streaming and count == lanes)

    def _pool(self, end: bool) -> Function:
        """The sums of `rows` rows of outputs, of each window the largest."""
        g, p, size = self.g, self.p, self.p.epilogue.pool
        width = g.vectors(end) * g.lanes
        kinds: Any = {"c": "pointer", "bias": "pointer", "residual": "pointer", "y": "pointer",
                      "rows": "index"}
        name = "pool_end" if end else "pool"
        with (self.m.function(name, **kinds) as f, f.loop(f.rows // size) as row,
              f.loop(p.out_w) as col):
            y = f.y + (row.i * p.out_w + col.i) * p.k
            c = f.c + (row.i * g.pitch + col.i) * (size * width)
            residual = f.residual + (row.i * p.conv_w + col.i) * (size * p.k)
            for k in range(0, width, g.lanes):
                count = min(g.lanes, g.channels(end) - k)
                value = self._largest(f, c, residual, k, width, count)
                y.store(value, k, count=count, streaming=self.s.streaming and count == g.lanes)
        return f

    def _largest(self, f: Function, c: Pointer, residual: Pointer, k: int, width: int,
                 count: int) -> Vector:
        """Of a window; a bias and an activation keep the order, what is added to each does not."""
        g, p = self.g, self.p
        window = [(i, j) for i in range(p.epilogue.pool) for j in range(p.epilogue.pool)]
        sums = [c.load((i * g.pitch + j) * width + k) for i, j in window]

        def finished(value: Vector, i: int, j: int) -> Vector:
            at = (i * p.conv_w + j) * p.k + k
            return finish(f, value, p, (f.bias, k), (residual, at), count)

        if p.epilogue.residual:
            return pool([finished(value, *at) for value, at in zip(sums, window, strict=True)])
        return finished(pool(sums), 0, 0)

    # one task

    def _body(self) -> Function:
        g, p, s = self.g, self.p, self.s
        with self.m.function("body", frame="pointer", task="index", worker="index") as f:
            part, rest = f.task % s.k_parts, f.task // s.k_parts
            image, height = rest // g.row_blocks, f.index(p.conv_h)
            if g.joined:
                image, height = f.index(0), f.frame.load_index(BATCH) * p.conv_h
            top = (rest - image * g.row_blocks) * s.block_rows
            rows = (height - top).minimum(s.block_rows)
            a = f.frame.load_pointer(SCRATCH) + f.worker * g.pack_floats
            x = f.frame.load_pointer(X) + image * (p.h * p.w * p.c)
            f.call(self.pack, x, a, top * p.stride[0] - p.padding[0], rows)
            at = ((image * p.conv_h + top) * p.conv_w * p.k,
                  (image * p.out_h + top // p.epilogue.pool) * p.out_w * p.k)
            first, last = part * g.k_blocks // s.k_parts, (part + 1) * g.k_blocks // s.k_parts
            whole = g.k_blocks - int(g.has_tail)
            if whole:
                with f.loop(last.minimum(whole), start=first) as block:
                    self._block(f, a, at, block.i, rows, end=False)
            if g.has_tail:
                with f.when(last.equals(g.k_blocks)):
                    self._block(f, a, at, f.index(whole), rows, end=True)
        return f

    def _block(self, f: Function, a: Pointer, at: tuple[Index, Index], block: Index, rows: Index,
               end: bool) -> None:
        """All pixels of a task against one block of output channels.

        `at` are the task's first output and the first that is left of them when they are pooled.
        """
        g = self.g
        k, sums, pixels = block * g.block_k, a + g.sums_start, rows * g.pitch
        weight = f.frame.load_pointer(WEIGHT) + block * g.panel_floats(g.block_k)
        width = g.vectors(end) * g.lanes
        chunk = g.panel_floats(width) // g.chunks
        operands = [f.frame.load_pointer(base) + start for base, start in
                    ((BIAS, k), (RESIDUAL, at[0] + k), (Y, at[1] + k))]
        fetched = len(g.taps) * g.lines_ahead * LINE  # by one group in one chunk
        for one in g.passes.each(f):
            here, b = a + one.start * g.chunk_floats, weight + one.start * chunk
            ahead = b + (SOON if g.groups == 1 else one.length * chunk)
            with f.loop(pixels, step=g.group) as pixel:
                c = sums + pixel.i * width if g.wait else sums
                f.call(self.products[end][one.kind], here + pixel.i * LINE, b, c,
                       ahead + pixel.i // g.group * (one.length * fetched))
                if one.last and self.p.epilogue.pool == 1:
                    f.call(self.writes[end], c, *operands, pixel.i,
                           (pixels - pixel.i).minimum(g.group))
        if self.p.epilogue.pool > 1:
            f.call(self.writes[end], sums, *operands, rows)

"""Implicit GEMM on the matrix unit: rows of tiles are pixels, bfloat16 parts of floats.

A task packs some rows of the input, split into parts, as [channels of a step][phase][part][pixel]:
a line each. Pixels that a stride keeps apart are neighbours in a phase, so that outputs in a row
read lines in a row at every tap. With few channels, a line holds all that a row of the filter
sees, and there is one tap a row. Outputs run through all columns of the packed rows; those of
columns that do not exist are computed and not stored. Of 1x1 filters that skip nothing, all pixels
of all images are rows of one pixel. The matrix unit says how many channels a step has. Images that
are bfloat16 in memory are packed as they are; those of 1x1 filters are read where they lie, if
they have whole steps of channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..between.epilogue import finish, pool
from ..emit import F32, Function, Index, Module, Pointer, Vector
from ..emit.elements import BF16, FLOAT32
from ..emit.microkernel import LINE, Step, Walk
from ..emit.parts import split
from ..emit.sizes import InCode
from ..emit.threads import BATCH, BIAS, RESIDUAL, SCRATCH, WEIGHT, X, Y, emit_entry, emit_region
from ..emit.tiling import emit_copy, emit_zero
from ..emit.unit import Rows, Side
from ..emit.units import multiply
from .direct_geometry import OF_COLUMNS, SIZES, Geometry
from .passes import Kind

AHEAD = 1024  # floats of the input that are asked for before they are packed
SOON = 4096  # and of weights before they are multiplied, where each is used once


def make(p: Problem, s: Schedule, isa: Isa, products: int) -> Module:
    """The module of a direct convolution on the matrix unit."""
    assert isa.matrix is not None
    return _Direct(Geometry(p, s, isa.lanes, products, isa.matrix), isa).module()


class Operand(NamedTuple):
    """What a task multiplies: its first row, where sums go, and the latest row a group may begin
    at, so that it ends with the images; a group that begins earlier sums some rows again."""

    a: Pointer
    sums: Pointer
    latest: Index | None = None


class _Direct:
    def __init__(self, geometry: Geometry, isa: Isa) -> None:
        self.g, self.p, self.s, self.isa = geometry, geometry.p, geometry.s, isa
        self.unit = geometry.unit
        # what is packed: floats, which are split, or bfloat16s as they are in memory
        self.held = BF16.kind if geometry.image is BF16 else F32

    def module(self) -> Module:
        self.m = Module(self.isa)
        if not self.g.in_place:
            self.convert, self.clear = self._convert(), self._clear()
            self.pack = self._pack()
        self.products = {end: self._product(end) for end in self.g.ends}
        write = self._write if self.p.epilogue.pool == 1 else self._pool
        self.writes = {end: write(end) for end in self.g.ends}
        body = self._body()
        emit_entry(self.m, [emit_region(self.m, "multiply", self._tasks, body, tiles=True)])
        return self.m

    def _sizes(self, f: Function) -> InCode:
        """The geometry, with what image sizes decide from the frame."""
        known = OF_COLUMNS if self.g.joined else ()
        return InCode(f, self.g, ["" if name in known else name for name in SIZES])

    def _tasks(self, f: Function, frame: Pointer) -> Index:
        z = self._sizes(f)
        tasks: Index = self.g.tasks(frame.load_index(BATCH), z.conv_h, z.row_blocks)
        return tasks

    # packing

    def _convert(self) -> Function:
        """Pixels of the input, `step` floats apart, into the lines of a phase."""
        c, depth = self.g.values, self.unit.depth
        with self.m.function("convert", frame="pointer", x=self.g.image, to="pointer",
                             count="index") as f:
            z = self._sizes(f)
            step = (self.p.c if self.g.joins_taps else self.g.x_step(z)) * self.p.stride[1]
            chunk_floats, plane = z.chunk_floats, z.plane
            with f.loop(f.count) as pixel:
                x, to = f.x + pixel.i * step, f.to + pixel.i * self.unit.line
                with f.loop(c // depth) as chunk:
                    self._convert_chunk(f, x + chunk.i * depth, to + chunk.i * chunk_floats,
                                        depth, plane)
                if c % depth:
                    whole = c // depth
                    self._convert_chunk(f, x + whole * depth, to + chunk_floats * whole,
                                        c % depth, plane)
        return f

    def _convert_chunk(self, f: Function, x: Pointer, to: Pointer, channels: int,
                       plane: Step) -> None:
        lanes = self.g.lanes
        for half in range(self.unit.depth // lanes):
            count = max(0, min(lanes, channels - half * lanes))
            value = (x.load(half * lanes, count=count, work=self.held) if count
                     else f.vector(0.0))
            if self.unit.fetches:
                x.prefetch(half * lanes + AHEAD, level=1)
            for part, bits in enumerate(split(f, value, self.g.parts)):
                (to + plane * part).store(bits, half * lanes // 2)

    def _clear(self) -> Function:
        """Zeros in all parts of some pixels of a phase."""
        g = self.g
        with self.m.function("clear", frame="pointer", to="pointer", count="index") as f:
            z = self._sizes(f)
            chunk_floats, plane = z.chunk_floats, z.plane
            with f.loop(g.chunks) as chunk, f.loop(f.count) as pixel:
                to = f.to + chunk.i * chunk_floats + pixel.i * self.unit.line
                for part in range(g.parts):
                    to.store(f.vector(0.0, self.unit.line), plane * part)
        return f

    def _pack(self) -> Function:
        """All phases of the input rows under `rows` output rows; the first is row `top`."""
        g = self.g
        phase = None if g.joined else self._pack_phase()
        with self.m.function("pack", frame="pointer", x=g.image, to="pointer", top="index",
                             rows="index") as f:
            if phase is None:
                f.call(self.convert, f.frame, f.x + f.top * g.x_step(self._sizes(f)), f.to, f.rows)
                return f
            plane = self._sizes(f).plane
            for number, (down, across) in enumerate(g.phases):
                f.call(phase, f.frame, f.x, f.to, f.to + plane * (number * g.parts), f.top + down,
                       across, f.rows + g.below)
        return f

    def _pack_phase(self) -> Function:
        """`rows` rows of a phase whose first pixel is in row `top`, `across` with its padding."""
        p, row_of = self.p, self._pack_taps if self.g.joins_taps else self._pack_pixels
        kinds: Any = {"frame": "pointer", "x": self.g.image, "scratch": "pointer", "to": "pointer",
                      "top": "index", "across": "index", "rows": "index"}
        with self.m.function("pack_phase", **kinds) as f:
            z = self._sizes(f)
            h, row_floats, pitch = z.h, z.w * self.g.x_step(z), z.pitch
            with f.loop(f.rows) as row:
                y, to = f.top + row.i * p.stride[0], f.to + row.i * pitch * self.unit.line
                with f.either((y >= 0) & (y < h)) as (inside, outside):
                    with inside:
                        row_of(f, z, f.x + y * row_floats, to)
                    with outside:
                        f.call(self.clear, f.frame, to, pitch)
        return f

    def _pack_pixels(self, f: Function, z: InCode, x: Pointer, to: Pointer) -> None:
        """A row between its padding."""
        c, step, pitch, line = self.g.x_step(z), self.p.stride[1], z.pitch, self.unit.line
        start = f.index(0)
        if self.p.is_padded:
            start = (((z.left - f.across).maximum(0) + (step - 1)) // step).minimum(pitch)
            f.call(self.clear, f.frame, to, start)
        stop = ((z.left + z.w - f.across).maximum(0) + (step - 1)) // step
        stop = stop.minimum(pitch).maximum(start)
        f.call(self.convert, f.frame, x + (start * step + f.across - z.left) * c, to + start * line,
               stop - start)
        f.call(self.clear, f.frame, to + stop * line, pitch - stop)

    def _pack_taps(self, f: Function, z: InCode, x: Pointer, to: Pointer) -> None:
        """A row of what rows of taps see, from a copy of the input's row that has padding."""
        p = self.p
        columns = (z.conv_w - 1) * p.stride[1] + p.s
        start = z.left.maximum(0).minimum(columns)  # a phase may leave pixels out: below 0
        stop = (z.left + z.w).minimum(columns).maximum(start)
        row = (f.scratch + z.sums_start).of(self.g.image)
        emit_zero(f, row, start * p.c)
        self._copy_pixels(f, z, row + start * p.c, x + (start - z.left) * self.g.x_step(z),
                          stop - start)
        emit_zero(f, row + stop * p.c, (columns - stop) * p.c)
        f.call(self.convert, f.frame, row, to, z.pitch)

    def _copy_pixels(self, f: Function, z: InCode, to: Pointer, x: Pointer, count: Index) -> None:
        c = self.p.c
        if not self.p.pitch:
            emit_copy(f, to, x, count * c)
            return
        with f.loop(count) as i:
            emit_copy(f, to + i.i * c, x + i.i * self.g.x_step(z), c)

    # multiplying

    def _product(self, end: bool) -> dict[Kind, Function]:
        """For each kind of pass: a group of pixels times so many chunks of a panel."""
        return {kind: self._one_pass(end, *kind) for kind in self.g.passes.kinds}

    def _one_pass(self, end: bool, first: bool, length: int) -> Function:
        g, unit, columns, taps = self.g, self.unit, self.g.vectors(end), len(self.g.taps)
        tiles, width = range(g.group // unit.rows), columns * unit.columns
        right = Side(tuple(j * unit.tile for j in range(columns)), columns * unit.tile,
                     passing=g.once)
        out = Side(tuple(i * unit.rows * width for i in tiles), unit.columns,
                   FLOAT32.bytes * width)
        step = g.parts * columns * unit.tile
        name = f"product_{'first' if first else 'next'}{length}{'_end' if end else ''}"
        with self.m.function(name, frame="pointer", a="pointer", b="pointer", c="pointer",
                             ahead="pointer") as f:
            z = self._sizes(f)
            plane, lines = z.plane, z.lines_ahead if g.fetches else 0
            left = Side(tuple(i * unit.rows * g.pixel_floats for i in tiles), plane,
                        FLOAT32.bytes * g.pixel_floats, passing=taps == 1 and not g.once)
            starts = [(at, tap * step) for at, tap in g.starts(plane)]
            rows = [Rows((at, tap * step), (count, down, over * step))
                    for (at, tap), (count, down, over) in g.rows_of_taps(z.pitch, plane)]
            multiply(f, f.a, f.b, f.c, left, right, out,
                     Walk(((length, z.chunk_floats, taps * step),)), g.products, first,
                     (f.ahead, lines), starts, rows)
        return f

    def _write(self, end: bool) -> Function:
        """The sums of pixels `first`.. of the packed rows, as far as they are outputs."""
        g, p = self.g, self.p
        width = g.vectors(end) * g.lanes
        kinds: Any = {"frame": "pointer", "c": "pointer", "bias": "pointer",
                      "residual": g.image, "y": g.image, "first": "index", "count": "index"}
        with self.m.function("write_end" if end else "write", **kinds) as f:
            if not g.beside and p.grid is None:
                with f.loop(f.count) as i:
                    self._write_pixel(f, f.c + i.i * width, (f.first + i.i) * p.k, end)
                return f
            z, stop = self._sizes(f), f.first + f.count
            pitch, conv_w = z.pitch, z.conv_w
            with f.loop((stop - 1) // pitch + 1, start=f.first // pitch) as row:
                left = row.i * pitch
                with f.loop((left + conv_w).minimum(stop), start=left.maximum(f.first)) as pixel:
                    at = ((pixel.i - row.i * g.beside) * p.k if p.grid is None
                          else g.y_rows(z, row.i) + (pixel.i - left) * z.y_pixel)
                    self._write_pixel(f, f.c + (pixel.i - f.first) * width, at, end)
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
        kinds: Any = {"frame": "pointer", "c": "pointer", "bias": "pointer",
                      "residual": g.image, "y": g.image, "rows": "index"}
        with self.m.function("pool_end" if end else "pool", **kinds) as f:
            z = self._sizes(f)
            pitch, conv_w, out_w = z.pitch, z.conv_w, z.out_w
            with f.loop(f.rows // size) as row, f.loop(out_w) as col:
                y = f.y + (row.i * out_w + col.i) * p.k
                c = f.c + (row.i * pitch + col.i) * (size * width)
                residual = f.residual + (row.i * conv_w + col.i) * (size * p.k)
                for k in range(0, width, g.lanes):
                    count = min(g.lanes, g.channels(end) - k)
                    window = [(c + pitch * (i * width) + (j * width + k),
                               residual + conv_w * (i * p.k) + j * p.k)
                              for i in range(size) for j in range(size)]
                    y.store(self._largest(f, window, k, count), k, count=count,
                            streaming=self.s.streaming and count == g.lanes)
        return f

    def _largest(self, f: Function, window: list[tuple[Pointer, Pointer]], k: int,
                 count: int) -> Vector:
        """Of sums beside residuals; a bias and an activation keep the order, residuals do not."""
        def finished(value: Vector, residual: Pointer) -> Vector:
            return finish(f, value, self.p, (f.bias, k), (residual, k), count)

        if self.p.epilogue.residual:
            return pool([finished(c.load(), residual) for c, residual in window])
        return finished(pool([c.load() for c, _ in window]), window[0][1])

    # one task

    def _body(self) -> Function:
        g, p, s = self.g, self.p, self.s
        with self.m.function("body", frame="pointer", task="index", worker="index") as f:
            z = self._sizes(f)
            part, rest = f.task % s.k_parts, f.task // s.k_parts
            if g.joined:
                image, height, top = f.index(0), f.frame.load_index(BATCH) * z.conv_h, rest
            else:
                image, height, top = rest // z.row_blocks, z.conv_h, rest % z.row_blocks
            top = top * s.block_rows
            rows = (height - top).minimum(s.block_rows)
            scratch = f.frame.load_pointer(SCRATCH) + f.worker * z.pack_floats
            x = f.frame.load_pointer(X, g.image) + image * (z.h * z.w * g.x_step(z))
            if g.in_place:
                operand = self._where_they_lie(f, x, scratch, top, rows, height)
            else:
                operand = Operand(scratch, scratch + z.sums_start)
                f.call(self.pack, f.frame, x, scratch, top * p.stride[0] - z.top, rows)
            first = g.y_at(z, image, top, 0)
            at = (first, first if p.epilogue.pool == 1 else
                  (image * z.out_h + top // p.epilogue.pool) * z.out_w * p.k)
            first, last = part * g.k_blocks // s.k_parts, (part + 1) * g.k_blocks // s.k_parts
            whole = g.k_blocks - int(g.has_tail)
            if whole:
                with f.loop(last.minimum(whole), start=first) as block:
                    self._block(f, operand, at, block.i, rows, end=False)
            if g.has_tail:
                with f.when(last.equals(g.k_blocks)):
                    self._block(f, operand, at, f.index(whole), rows, end=True)
        return f

    def _where_they_lie(self, f: Function, x: Pointer, scratch: Pointer, top: Index, rows: Index,
                        height: Index) -> Operand:
        """Pixels of a task; a copy of them, if all images have fewer than a multiply takes."""
        g, here = self.g, x + top * self.p.c
        latest = height - g.group
        few = latest < 0
        with f.either(few) as (copied, fetched):
            with copied:
                emit_copy(f, scratch.of(g.image), here, rows * self.p.c)
            with fetched:  # loads of tiles would ask for lines far apart, a few at a time
                here, line = here.of(FLOAT32), self.unit.line
                with f.loop(rows * self.p.c // 2, step=line) as at:
                    (here + at.i).prefetch(level=2)
        here = here.of(FLOAT32)
        return Operand(few.select(scratch, here), scratch + self._sizes(f).sums_start,
                       few.select(f.index(0), latest - top))

    def _block(self, f: Function, operand: Operand, at: tuple[Index, Index], block: Index,
               rows: Index, end: bool) -> None:
        """All pixels of a task against one block of output channels.

        `at` are the task's first output and the first that is left of them when they are pooled.
        """
        g, z = self.g, self._sizes(f)
        k, sums, pixels = block * g.block_k, operand.sums, rows * z.pitch
        weight = f.frame.load_pointer(WEIGHT) + block * g.panel_floats(g.block_k)
        width = g.vectors(end) * g.lanes
        chunk = g.panel_floats(width) // g.chunks
        operands = [f.frame.load_pointer(base, kind) + start for base, kind, start in
                    ((BIAS, FLOAT32, k), (RESIDUAL, g.image, at[0] + k), (Y, g.image, at[1] + k))]
        fetched = z.lines_ahead * (len(g.taps) * LINE)  # by one group in one chunk
        for one in g.passes.each(f):
            here, b = operand.a + one.start * z.chunk_floats, weight + one.start * chunk
            ahead = b + self._distance(f, one.length * chunk)
            with f.loop(pixels, step=g.group) as pixel:
                c = sums + pixel.i * width if g.wait else sums
                if g.in_place and not self.s.streaming:
                    y = operands[-1] + pixel.i * self.p.k
                    for i in range(g.group):  # stores would wait for lines that lie far apart
                        (y + i * self.p.k).prefetch(level=1)
                start = pixel.i if operand.latest is None else pixel.i.minimum(operand.latest)
                f.call(self.products[end][one.kind], f.frame, here + start * g.pixel_floats, b, c,
                       ahead + pixel.i // g.group * (fetched * one.length))
                if one.last and self.p.epilogue.pool == 1:
                    own = c if operand.latest is None else c + (pixel.i - start) * width
                    f.call(self.writes[end], f.frame, own, *operands, pixel.i,
                           (pixels - pixel.i).minimum(g.group))
        if self.p.epilogue.pool > 1:
            f.call(self.writes[end], f.frame, sums, *operands, rows)

    def _distance(self, f: Function, panel: int) -> Index:
        """How far ahead weights are asked for: a whole panel, unless each is used once."""
        if self.g.joined:
            return f.index(SOON if self.g.once else panel)
        return (self._sizes(f).groups < 2).select(f.index(SOON), f.index(panel))

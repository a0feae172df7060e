"""What filters share: a task packs a padded rectangle of an image and goes through it in tiles.

The code knows the kernel's size and the types; sizes of images, strides and borders come in a
table of words. Packed rows are as `Filter.work` and stand an odd number of cache lines apart, so
that neighbours do not fight for the same sets of a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ....core.cached import cached
from ....core.filter import Filter
from ....core.isa import Isa
from ....core.schedule import Schedule
from ..emit import ELEMENTS, Element, Function, Index, Module, Pointer, Vector
from ..emit.threads import BATCH, BIAS, RESIDUAL, SCRATCH, WEIGHT, X, Y, emit_entry, emit_region
from ..emit.tiling import Partition, ceil_div

# words of the table; all strides are bytes, a row and its parts count elements
(HEIGHT, ROW, PLANES, X_IMAGE, X_PLANE, X_COLUMN, X_CHANNEL, Y_IMAGE, Y_PLANE, Y_ROW, BAND, BANDS,
 STRIP, STRIPS, LEFT, ROWS, EDGES, WORKER_BYTES) = range(18)
TABLE = BIAS  # its place in the frame; the constant of the border stands where a residual would
VALUE = RESIDUAL
NOWHERE = -(1 << 62)  # in tables of byte offsets: not in the image, the constant
LINE = 64
BAND_ROWS = 64  # at most so many rows a task


@dataclass(frozen=True)
class FilterSizes:
    """Every size a generator needs, and what it needs of scratch."""

    p: Filter
    s: Schedule
    isa_lanes: int  # floats in a vector

    @cached
    def work(self) -> str:
        """The type that is summed in."""
        return self.p.work

    @cached
    def bytes(self) -> int:
        """Of a number as it is summed."""
        return ELEMENTS[self.work].bytes

    @cached
    def lanes(self) -> int:
        return self.isa_lanes * ELEMENTS["f32"].bytes // self.bytes

    @property
    def dtype(self) -> Any:
        return np.float64 if self.work == "f64" else np.float32

    @cached
    def span(self) -> int:
        """Elements that a row of outputs reaches beyond itself."""
        return (self.p.s - 1) * self.p.c

    @cached
    def pitch(self) -> int:
        """Bytes from one packed row to the next."""
        over = self.lanes * self.s.vectors  # the last tile reads on
        lines = ceil_div((self.s.strip + self.span + over) * self.bytes, LINE)
        return (lines | 1) * LINE

    def chunks(self, r: int) -> list[slice]:
        """Rows of a kernel in the parts that `FilterModule.sums` takes at a time."""
        parts = Partition(r, self.s.chunk)
        starts = [i * parts.big - max(0, i - parts.bigs) for i in range(parts.count + 1)]
        return [slice(*ends) for ends in pairwise(starts)]

    def band(self, h: int, target_l2: int, threads: int) -> int:
        """Rows of a task: few enough for the cache and for all threads to have some."""
        rows = self.s.rows
        fit = target_l2 // 2 // self.pitch - self.p.r
        fair = ceil_div(h, 4 * threads)
        return max(1, min(fit, fair, BAND_ROWS) // rows) * rows

    def worker_bytes(self, band: int) -> int:
        """Scratch of a worker: the packed rectangle."""
        return (band + self.p.r - 1) * self.pitch


class FilterModule:
    """Writes the code around `outputs`, which a method has; `tiles` says what comes before."""

    flushes = True  # denormals to zero; where they count, False

    def __init__(self, sizes: Any, isa: Isa) -> None:
        self.g, self.p, self.s, self.isa = sizes, sizes.p, sizes.s, isa
        self.work = ELEMENTS[sizes.work].kind
        self.source: Element = ELEMENTS[self.p.dtype]
        self.target: Element = ELEMENTS[self.p.out]
        self.packed: Element = ELEMENTS[sizes.work]

    def module(self) -> Module:
        self.m = Module(self.isa)
        self.prepare_functions()
        self.pack = self._pack()
        emit_entry(self.m, [emit_region(self.m, "filter", self._tasks, self._body(),
                                        flush=self.flushes)])
        return self.m

    def prepare_functions(self) -> None:
        """Write what `tiles` will call."""
        raise NotImplementedError

    def outputs(self, f: Function, x: Pointer, weight: Pointer, rows: int,
                vectors: int) -> list[Vector]:
        """rows x vectors outputs of packed rows."""
        raise NotImplementedError

    def stored(self, value: Vector) -> Vector:
        """An output as it is written."""
        return self.target.cut_off(value) if self.p.form == "whole" else value

    def put(self, f: Function, y: Pointer, value: Vector, x: Pointer, weight: Pointer,
            count: Index | None = None) -> None:
        """Write an output that was made of what lies at `x`; with `count`, some of its lanes."""
        y.store(self.stored(value), count=count, streaming=self.s.stream and count is None)

    def writers(self) -> None:
        """`fast` and `careful`, which make and write `outputs`."""
        self.careful = self._careful()
        self.fast = self._fast()

    def tiles(self, f: Function, packed: Pointer, y: Pointer, y_row: Index, rows: Index,
              width: Index, free: Pointer) -> None:
        """Filter a packed rectangle into `rows` x `width` outputs, using free scratch."""
        weight, tall = f.frame.load_pointer(WEIGHT), self.s.rows
        whole = rows // tall * tall
        with f.loop(whole, step=tall) as row:
            f.call(self.fast, packed.bytes(row.i * self.g.pitch), weight,
                   y.bytes(row.i * y_row), y_row, width)
        with f.when(whole < rows):
            f.call(self.careful, packed.bytes(whole * self.g.pitch), weight,
                   y.bytes(whole * y_row), y_row, width, rows - whole)

    def _fast(self) -> Function:
        """All rows of a tile, in whole vectors; what is left goes to `careful`."""
        s, g, size = self.s, self.g, self.target.bytes
        step = g.lanes * s.vectors
        with self.m.function("fast", x="pointer", weight="pointer", y="pointer", y_row="index",
                             width="index") as f:
            head = self._before_a_line(f) if s.stream else f.index(0)
            with f.when(f.index(0) < head):
                f.call(self.careful, f.x, f.weight, f.y, f.y_row, head, f.index(s.rows))
            whole = head + (f.width - head) // step * step
            with f.loop(whole, start=head, step=step) as column:
                found = self.outputs(f, f.x.bytes(column.i * g.bytes), f.weight, s.rows,
                                     s.vectors)
                here = f.y.of(self.target) + column.i
                for i, value in enumerate(found):
                    row, v = divmod(i, s.vectors)
                    at = column.i * g.bytes + (row * g.pitch + v * g.lanes * g.bytes)
                    self.put(f, here.bytes(f.y_row * row + v * g.lanes * size), value,
                             f.x.bytes(at), f.weight)
            with f.when(whole < f.width):
                f.call(self.careful, f.x.bytes(whole * g.bytes), f.weight,
                       f.y.bytes(whole * size), f.y_row, f.width - whole, f.index(s.rows))
        return f

    def _before_a_line(self, f: Function) -> Index:
        """Elements of a row before the first that begins a cache line."""
        start = f.y.address()
        return ((LINE - start % LINE) % LINE // self.target.bytes).minimum(f.width)

    def _careful(self) -> Function:
        """One vector at a time, and only the rows and lanes that exist."""
        s, g = self.s, self.g
        with self.m.function("careful", x="pointer", weight="pointer", y="pointer",
                             y_row="index", width="index", rows="index") as f, \
                f.loop(f.width, step=g.lanes) as column:
            found = self.outputs(f, f.x.bytes(column.i * g.bytes), f.weight, s.rows, 1)
            here = f.y.of(self.target) + column.i
            for row, value in enumerate(found):
                with f.when(f.index(row) < f.rows):
                    self.put(f, here.bytes(f.y_row * row), value,
                             f.x.bytes(column.i * g.bytes + row * g.pitch), f.weight,
                             (f.width - column.i).minimum(g.lanes))
        return f

    def _tasks(self, f: Function, frame: Pointer) -> Index:
        table = frame.load_pointer(TABLE)
        return frame.load_index(BATCH) * table.load_index(BANDS) * table.load_index(STRIPS)

    def _body(self) -> Function:
        with self.m.function("body", frame="pointer", task="index", worker="index") as f:
            table, word = f.frame.load_pointer(TABLE), {}
            for name in (HEIGHT, ROW, PLANES, BAND, BANDS, STRIP, STRIPS, Y_ROW):
                word[name] = table.load_index(name)
            strip, rest = f.task % word[STRIPS], f.task // word[STRIPS]
            band, plane = rest % word[BANDS], rest // word[BANDS]
            image, plane = plane // word[PLANES], plane % word[PLANES]
            top, left = band * word[BAND], strip * word[STRIP]
            rows = word[BAND].minimum(word[HEIGHT] - top)
            width = word[STRIP].minimum(word[ROW] - left)
            x = f.frame.load_pointer(X).bytes(
                image * table.load_index(X_IMAGE) + plane * table.load_index(X_PLANE))
            y = f.frame.load_pointer(Y).bytes(
                image * table.load_index(Y_IMAGE) + plane * table.load_index(Y_PLANE)
                + top * word[Y_ROW] + left * self.target.bytes)
            packed = f.frame.load_pointer(SCRATCH).bytes(
                f.worker * table.load_index(WORKER_BYTES))
            f.call(self.pack, f.frame, x, packed, top, rows + (self.p.r - 1), left, width)
            free = packed.bytes((word[BAND] + (self.p.r - 1)) * self.g.pitch)
            self.tiles(f, packed, y, word[Y_ROW], rows, width, free)
        return f

    def _pack(self) -> Function:
        """A rectangle of the image, and of what lies beyond its border, row by row."""
        with self.m.function("pack", frame="pointer", x="pointer", packed="pointer", top="index",
                             rows="index", left="index", width="index") as f:
            table = f.frame.load_pointer(TABLE)
            offsets = table.load_pointer(ROWS)
            constant = f.frame.of(ELEMENTS["f64"]).broadcast(VALUE, self.g.lanes)
            value = self.packed.narrowed(constant)
            with f.loop(f.rows) as row:
                to = f.packed.of(self.packed).bytes(row.i * self.g.pitch)
                offset = offsets.bytes((f.top + row.i) * 8).load_index(0)
                with f.either(offset.equals(NOWHERE)) as (nowhere, inside):
                    with nowhere, f.loop(f.width + self.g.span, step=self.g.lanes) as i:
                        to.store(value, i.i)
                    with inside:
                        self._pack_row(f, f.x.of(self.source).bytes(offset), to, table, value)
        return f

    def _pack_row(self, f: Function, x: Pointer, to: Pointer, table: Pointer,
                  value: Vector) -> None:
        """The pixels of the image in one go, those beyond it one by one."""
        before, row = table.load_index(LEFT), table.load_index(ROW)
        end = f.left + f.width + self.g.span
        first, last = f.left.maximum(before), end.minimum(before + row)
        copy = self._copy_strided if self.p.strided else self._copy
        copy(f, x, to + (first - f.left), first - before, last - first, table)
        self._edge(f, x, to, f.left, first, f.index(0), table, value)
        self._edge(f, x, to, last, end, row, table, value)

    def _copy(self, f: Function, x: Pointer, to: Pointer, first: Index, count: Index,
              table: Pointer) -> None:
        lanes, x = self.g.lanes, x + first
        whole = count // lanes * lanes
        with f.loop(whole, step=lanes) as i:
            to.store(x.load(i.i, lanes, work=self.work), i.i)
        here = x.load(whole, lanes, count=count - whole, work=self.work)
        to.store(here, whole, count=count - whole)

    def _copy_strided(self, f: Function, x: Pointer, to: Pointer, first: Index, count: Index,
                      table: Pointer) -> None:
        column, channel, c = table.load_index(X_COLUMN), table.load_index(X_CHANNEL), self.p.c
        with f.loop(count) as i:
            element = first + i.i
            here = x.bytes(element // c * column + element % c * channel)
            to.store(here.load(lanes=1, work=self.work), i.i)

    def _edge(self, f: Function, x: Pointer, to: Pointer, first: Index, last: Index,
              inside: Index, table: Pointer, value: Vector) -> None:
        """Padded elements first..last; `inside` of those before them are not in the table."""
        edges = table.load_pointer(EDGES)
        with f.loop(last, start=first) as i:
            offset = edges.bytes((i.i - inside) * 8).load_index(0)
            place = to + (i.i - f.left)
            with f.either(offset.equals(NOWHERE)) as (nowhere, there):
                with nowhere:
                    place.store(value.slice(0, 1))
                with there:
                    place.store(x.bytes(offset).load(lanes=1, work=self.work))

    def sums(self, f: Function, x: Pointer, weight: Pointer, rows: int, vectors: int,
             taps: tuple[int, int], planes: int = 1, plane: int = 0) -> list[Vector]:
        """rows x vectors sums over a kernel of `taps`; each vector loaded meets all its rows.

        Weights lie as [plane][chunk of kernel rows][column][row of the chunk].
        """
        r, s = taps
        acc: list[Any] = [f.vector(0.0, self.g.lanes, self.work)] * (rows * vectors)
        state: list[Any] = [x.of(self.packed), weight.of(self.packed), *acc]
        chunks = Partition(r, self.s.chunk)
        with f.loop(planes, carry=state) as each:
            here, weight_, *acc = each.values
            counts = [chunks.bigs, chunks.count - chunks.bigs]
            below = here
            for depth, count in zip((chunks.big, chunks.big - 1), counts):
                if not count:
                    continue
                with f.loop(count, carry=[below, weight_, *acc]) as chunk:
                    start, weight_, *acc = chunk.values
                    with f.loop(s, carry=[start, weight_, *acc]) as column:
                        at, weight_, *acc = column.values
                        acc = self._column(f, at, weight_, acc, rows, vectors, depth)
                        column.values = [at + self.p.c, weight_ + depth, *acc]
                    _, weight_, *acc = column.values
                    chunk.values = [start.bytes(depth * self.g.pitch), weight_, *acc]
                below, weight_, *acc = chunk.values
            each.values = [here.bytes(plane), weight_, *acc]
        return list(each.values[2:])

    def _column(self, f: Function, x: Pointer, weight: Pointer, acc: Sequence[Vector], rows: int,
                vectors: int, depth: int) -> list[Vector]:
        """One column of a chunk of the kernel."""
        g, acc = self.g, list(acc)
        taps = [weight.broadcast(i, g.lanes) for i in range(depth)]
        for y in range(rows + depth - 1):
            for v in range(vectors):
                here = x.bytes(y * g.pitch + v * g.lanes * self.packed.bytes)
                value = here.load(lanes=g.lanes, work=self.work)
                for row in range(max(0, y - depth + 1), min(rows, y + 1)):
                    at = row * vectors + v
                    acc[at] = f.fma(value, taps[y - row], acc[at])
        return acc


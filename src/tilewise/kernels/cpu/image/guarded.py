"""scipy's integers from sums in a narrower type: float32 for bytes, float64 with fused products.

A bound says how far such a sum is from scipy's. Where no integer lies between the two ends that
it allows, both are cut off to the same. Elsewhere the vector is summed again, as scipy does it.
Bytes that are equal under a window, or pairs with equal sums, are the usual reason: their results
come from a table. Of bells, `bells` decides what is left.
Means need no second sum: half a step more than the quotient is never near an integer.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from ....core.cached import cached
from ....core.filter import FUSED, Filter
from ....core.isa import Isa
from ....core.lines import Lines, form_of
from ....core.schedule import Schedule
from ..emit import ELEMENTS, Function, Index, Module, Pointer, Vector
from ..emit.threads import WEIGHT
from ..emit.tiling import ceil_div
from ..emit.values import F64, Bits, Words
from . import bells
from .common import FilterModule, FilterSizes
from .taps import Entry, ordered

UNIT = {"f32": 2.0 ** -24, "f64": 2.0 ** -53}
LARGEST = 2.0 ** 30  # of sums, so that they are integers of 32 bits
ALWAYS = 2.0 ** 20  # a bound that every sum is summed again for
ENTRY = 5  # words: two places, the sign of the second, a weight, the sign in the narrow type
HEAD = bells.WORDS  # a bound, the number of entries, and what `bells` reads
TINY = 1e-30  # weights below it are none in float32: denormals are slow


class Geometry(FilterSizes):
    """Every size of a guarded filter. Its weights come in parts: a window, or two lines."""

    @cached
    def work(self) -> str:
        return self.p.guarded

    @cached
    def is_fused(self) -> bool:
        return self.p.form in FUSED

    @cached
    def is_mean(self) -> bool:
        return self.p.form in ("mean", "means")

    @cached
    def windows(self) -> list[tuple[int, int]]:
        return [(self.p.r, 1), (1, self.p.s)] if self.is_fused else [(self.p.r, self.p.s)]

    def words(self, part: int) -> tuple[int, int]:
        """Of a part: up to its entries, and all."""
        r, s = self.windows[part]
        before = HEAD + ceil_div(r * s * self.bytes, 8)
        return before, before + (0 if self.is_mean else ENTRY * r * s + self.levels // 2)

    @cached
    def levels(self) -> int:
        """Values that a flat window can have, if a table is to have them all."""
        return 256 if self.work == "f32" and not self.is_mean else 0

    def worker_bytes(self, band: int) -> int:
        """The packed rectangle, and a tile that is filtered down."""
        return super().worker_bytes(band) + self.is_fused * int(self.s.rows) * self.pitch

    def pack_weight(self, kernel: Any) -> Any:
        """Parts, one after the other."""
        if not self.is_fused:
            return self._part(0, kernel, self.p.form)
        lines: Lines = kernel
        return np.concatenate([
            self._part(0, lines.down[:, None], form_of(lines.down)),
            self._part(1, lines.across[None], form_of(lines.across))])

    def _part(self, part: int, kernel: Any, form: str) -> Any:
        entries, size = self.words(part)
        found = np.zeros(size, np.int64)
        if self.is_mean:
            kernel = kernel / kernel.size
        weights = np.concatenate([kernel[chunk].T.ravel()
                                  for chunk in self.chunks(kernel.shape[0])])
        bound = 0.5 / kernel.size if self.is_mean else self.bound(weights)
        found[:1].view(self.dtype)[0] = bound
        if bound < ALWAYS:
            found[HEAD:entries].view(self.dtype)[:kernel.size] = np.where(
                abs(weights) < TINY, 0.0, weights)
        if not self.is_mean:
            order = ordered(kernel, form)
            table = [word for entry in order for word in self._entry(*entry)]
            found[1] = len(order)
            found[entries:entries + len(table)] = table
            flat = _flat(order, self.levels)
            found[size - self.levels // 2:].view(np.int32)[:] = flat
            found[bells.FLAT] = (flat == np.arange(self.levels)).all()
            if self.levels and bound < ALWAYS and form == "even" and min(kernel.shape) == 1:
                found[bells.MISSED:HEAD] = bells.missed(flat)
                found[bells.SLACK:].view(self.dtype)[0] = bells.slack(kernel.ravel(), TINY)
        return found

    def _entry(self, places: list[tuple[int, int]], weight: float, sign: float) -> list[int]:
        offsets = [row * self.pitch + column * self.p.c * self.bytes for row, column in places]
        narrow = np.array([sign, 0.0], self.dtype).view(np.int64)[0]
        return [offsets[0], offsets[-1], _bits(sign), _bits(weight), int(narrow)]

    def bound(self, weights: Any) -> float:
        """How far a sum in the narrow type, and the ends around it, may be from scipy's sum.

        Every partial sum is rounded, every product without a fused step, and both ends. Weights
        are as they are summed.
        """
        size = max(abs(bound) for name in (self.p.dtype, self.p.out)
                   for bound in (ELEMENTS[name].low, ELEMENTS[name].high))
        partial = np.cumsum(abs(weights))
        gain, taps = float(partial[-1]), weights.size
        if not gain * size < LARGEST:  # also where it is NaN
            return ALWAYS
        narrowed = abs(weights - weights.astype(self.dtype)).sum() + taps * TINY
        rounded = UNIT[self.work] * (partial.sum() + 2 * gain)
        exact = UNIT["f64"] * (taps + 4) * gain
        return float(1.001 * size * (narrowed + rounded + exact))


def _flat(order: list[Entry], levels: int) -> Any:
    """What a window of equal values sums up to, by value, cut off."""
    value, total = np.arange(float(levels)), np.zeros(levels)
    for _, weight, sign in order:
        total = total + (value + sign * value) * weight
    return np.where(abs(total) < LARGEST, total, 0.0).astype(np.int32)


def _bits(value: float) -> int:
    return int(struct.unpack("q", struct.pack("d", value))[0])


def make(p: Filter, s: Schedule, isa: Isa) -> Module:
    """The module of a guarded filter."""
    g = Geometry(p, s, isa.lanes)
    return (Fused if g.is_fused else _Guarded)(g, isa).module()


class _Guarded(FilterModule):
    """One window."""

    flushes = False
    last = 0  # the part that makes outputs

    def prepare_functions(self) -> None:
        self.again: Any = None if self.g.is_mean else self._unsure("again", self.last)
        self.writers()

    def _unsure(self, name: str, part: int, between: bool = False) -> Function:
        """What is called where a sum may be one of two integers."""
        again = self._again(name, part, between)
        if not bells.step_of(self, part):
            return again
        return bells.Bells(self, part, between).function(f"{name}_of_bells", again)

    def outputs(self, f: Function, x: Pointer, weight: Pointer, rows: int,
                vectors: int) -> list[Any]:
        return self.sums_of(self.last, f, x, weight, rows, vectors)

    def sums_of(self, part: int, f: Function, x: Pointer, weight: Pointer, rows: int,
                vectors: int) -> list[Any]:
        """rows x vectors sums, as `_ends` takes them."""
        return self.sums(f, x, weight.bytes(8 * HEAD), rows, vectors, self.g.windows[part])

    def put(self, f: Function, y: Pointer, value: Vector, x: Pointer, weight: Pointer,
            count: Index | None = None) -> None:
        found, unsure = self._ends(value, weight)
        y.store(self._cut(found), count=count)
        if unsure is not None:
            with f.when(unsure.any()):
                f.call(self.again, x, weight, y, count or f.index(self.g.lanes),
                       unsure.packed())

    def _ends(self, value: Any, part: Pointer) -> tuple[Words, Bits | None]:
        """The integer of a sum, and where it may be another."""
        bound = part.of(self.packed).broadcast(0, self.g.lanes)
        if self.g.is_mean:
            return (value + bound).whole(), None
        low, high = (value - bound).whole(), (value + bound).whole()
        return low, low.differs(high)

    def _cut(self, found: Words) -> Vector:
        """The lowest bits, as many as the output has."""
        return self.target.lowest(found)

    def _again(self, name: str, part: int, between: bool = False) -> Function:
        """A vector in scipy's order, in float64; `between` two lines it is kept as a number."""
        def write(cut: Vector, where: Bits | None = None) -> None:
            value = self.target.widened(cut, self.work) if between else cut
            y = f.y.of(self.packed if between else self.target)
            count, kind = (None, self.work) if between else (f.count, self.target.kind)
            if where is not None:
                value = where.select(value, y.load(lanes=value.lanes, count=count, work=kind))
            y.store(value, count=count)

        with self.m.function(name, x="pointer", weight="pointer", y="pointer", count="index",
                             unsure="index") as f:
            table = f.weight.bytes(8 * self.g.words(part)[0])
            if not self.g.levels:
                write(self.target.cut_off(self._summed(f, table)))
                return f
            value, flat = self._flatness(f, table)
            with f.either((f.unsure.bits(self.g.lanes) & ~flat).any()) as (uneven, even):
                with uneven:
                    write(self.target.cut_off(self._summed(f, table)))
                with even:
                    whole = value.whole()
                    flats = f.weight.bytes(8 * self.g.words(part)[1] - 4 * self.g.levels)
                    with f.either(f.weight.load_index(bells.FLAT).equals(0)) as (other, kept):
                        with other:
                            known = flat.select(whole, whole.same(0))
                            write(self._cut(flats.gather_words(known)), flat)
                        with kept:
                            write(self._cut(whole), flat)
        return f

    def _taps(self, x: Pointer, entry: Pointer, work: Any) -> list[Vector]:
        """The two values of an entry; of a single tap, the same."""
        return [x.of(self.packed).bytes(entry.load_index(i)).load(lanes=self.g.lanes, work=work)
                for i in (0, 1)]

    def _summed(self, f: Function, table: Pointer) -> Vector:
        state = [table, f.vector(0.0, self.g.lanes, F64)]
        with f.loop(f.weight.load_index(1), carry=state) as tap:
            at, total = tap.values
            a, b = self._taps(f.x, at, F64)
            sign, weight = (at.of(ELEMENTS["f64"]).broadcast(i, a.lanes) for i in (2, 3))
            tap.values = [at.bytes(8 * ENTRY), total + (a + sign * b) * weight]
        return tap.values[1]

    def _flatness(self, f: Function, table: Pointer) -> tuple[Vector, Bits]:
        """A value under each window, and where all terms are as if all others equalled it."""
        first = self._taps(f.x, table, self.work)[0]
        with f.loop(f.weight.load_index(1), start=1,
                    carry=[table.bytes(8 * ENTRY), first.equals(first)]) as tap:
            at, flat = tap.values
            a, b = self._taps(f.x, at, self.work)
            sign = at.bytes(8 * (ENTRY - 1)).of(self.packed).broadcast(0, a.lanes)
            same = f.fma(b, sign, a).equals(f.fma(first, sign, first))
            tap.values = [at.bytes(8 * ENTRY), flat & same]
        return first, tap.values[1]


class Fused(_Guarded):
    """A line down, cut off into scratch, then a line across."""

    last = 1

    def prepare_functions(self) -> None:
        super().prepare_functions()
        between = None if self.g.is_mean else self._unsure("between", 0, between=True)
        self.down = self._down(between)

    def _down(self, between: Any) -> Function:
        """A tile's rows, over all columns that the sums across will read."""
        g, s = self.g, self.s
        with self.m.function("down", x="pointer", weight="pointer", y="pointer",
                             width="index") as f, f.loop(f.width, step=g.lanes) as column:
            x, y = (at.bytes(column.i * g.bytes) for at in (f.x, f.y))
            for row, value in enumerate(self.sums_of(0, f, x, f.weight, s.rows, 1)):
                found, unsure = self._ends(value, f.weight)
                here = y.of(self.packed).bytes(row * g.pitch)
                here.store(self.target.widened(self._cut(found), self.work))
                if unsure is not None:
                    with f.when(unsure.any()):
                        f.call(between, x.bytes(row * g.pitch), f.weight, here, f.index(0),
                               unsure.packed())
        return f

    def tiles(self, f: Function, packed: Pointer, y: Pointer, y_row: Index, rows: Index,
              width: Index, free: Pointer) -> None:
        g, tall = self.g, self.s.rows
        down = f.frame.load_pointer(WEIGHT)
        across = down.bytes(8 * g.words(0)[1])
        with f.loop(rows, step=tall) as row:
            f.call(self.down, packed.bytes(row.i * g.pitch), down, free, width + g.span)
            here = y.bytes(row.i * y_row)
            with f.either(rows - row.i >= tall) as (whole, part):
                with whole:
                    f.call(self.fast, free, across, here, y_row, width)
                with part:
                    f.call(self.careful, free, across, here, y_row, width, rows - row.i)

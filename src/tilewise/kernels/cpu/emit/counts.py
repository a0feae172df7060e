"""Histograms in generated code: 16-bit counts side by side, and bytes that say which one."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from .checks import safe
from .pointers import Pointer
from .values import I8, I16, I32, I64, Bits, Index, Value, Vector

BYTES = 2  # of a count


class Counts(Value):
    """16-bit unsigned integers side by side."""

    __slots__ = ()

    @property
    def lanes(self) -> int:
        return int(self.ir.type.count)

    def plus(self, other: Counts) -> Counts:
        return Counts(self.f, self.f.ll.add(self.ir, other.ir))

    def minus(self, other: Counts) -> Counts:
        return Counts(self.f, self.f.ll.sub(self.ir, other.ir))

    def upper_of(self, by: int) -> Counts:
        """The upper halves of products."""
        wide = ir.VectorType(I32, self.lanes)
        ll, factors = self.f.ll, ir.Constant(wide, [by] * self.lanes)
        product = ll.mul(ll.zext(self.ir, wide), factors)
        upper = ll.lshr(product, ir.Constant(wide, [16] * self.lanes))
        return Counts(self.f, ll.trunc(upper, self.ir.type))

    def bytes(self) -> Vector:
        """Their lower halves."""
        return Vector(self.f, self.f.ll.trunc(self.ir, ir.VectorType(I8, self.lanes)))

    def summed_up(self) -> Counts:
        """Every count with all before it."""
        found, apart = self, 1
        while apart < self.lanes:
            found = found.plus(found._moved_up(apart))
            apart *= 2
        return found

    def _moved_up(self, by: int) -> Counts:
        """Lanes that come in are zero."""
        zero = ir.Constant(self.ir.type, [0] * self.lanes)
        mask = ir.Constant(ir.VectorType(I32, self.lanes),
                           [self.lanes - by + i for i in range(self.lanes)])
        return Counts(self.f, self.f.ll.shuffle_vector(zero, self.ir, mask))

    def at_most(self, limit: Index) -> Index:
        """How many of them are."""
        limits = self.f.splat(self.f.ll.trunc(limit.ir, I16), self.lanes)
        return _number(Bits(self.f, self.f.ll.icmp_unsigned("<=", self.ir, limits.ir)))


def _number(bits: Bits) -> Index:
    """Of bits that are set."""
    count = bits.f.intrinsic("llvm.ctpop.i64", I64, [I64])
    return Index(bits.f, bits.f.ll.call(count, [bits.packed().ir]))


def zeros(pointer: Pointer, lanes: int) -> Counts:
    """Such as are stored at a pointer."""
    return Counts(pointer.f, ir.Constant(ir.VectorType(I16, lanes), [0] * lanes))


def _loaded(at: Pointer, kind: Any, bytes_: int, count: int = 1) -> Any:
    return at.f.ll.load(safe(at, bytes_ * count, "loads"), align=bytes_, typ=kind)


def load(pointer: Pointer, lanes: int) -> Counts:
    kind = ir.VectorType(I16, lanes)
    return Counts(pointer.f, _loaded(pointer, kind, BYTES, lanes))


def store(pointer: Pointer, counts: Counts) -> None:
    at = safe(pointer, BYTES * counts.lanes, "stores")
    pointer.f.ll.store(counts.ir, at, align=BYTES)


def load_one(pointer: Pointer, place: Index) -> Index:
    """A count by its place."""
    f, at = pointer.f, pointer.bytes(place * BYTES)
    return Index(f, f.ll.zext(_loaded(at, I16, BYTES), I64))


def add(pointer: Pointer, place: Index, number: Index) -> None:
    """To one of the counts; they may wrap around on the way."""
    f, at = pointer.f, pointer.bytes(place * BYTES)
    sum_ = f.ll.add(_loaded(at, I16, BYTES), f.ll.trunc(number.ir, I16))
    f.ll.store(sum_, safe(at, BYTES, "stores"), align=BYTES)


def load_byte(pointer: Pointer) -> Index:
    f = pointer.f
    return Index(f, f.ll.zext(_loaded(pointer, I8, 1), I64))


def store_byte(pointer: Pointer, value: Index) -> None:
    pointer.f.ll.store(pointer.f.ll.trunc(value.ir, I8), safe(pointer, 1, "stores"), align=1)

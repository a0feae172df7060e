"""Typed values of LLVM's IR: flags, indices, vectors, bits and pointers.

Offsets count elements, sizes are 64-bit, vectors are as wide as the instruction set's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llvmlite import ir

if TYPE_CHECKING:
    from .emit import Function

BOOL, I8, I32, I64 = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64)
F32, F64, PTR, VOID = ir.FloatType(), ir.DoubleType(), ir.PointerType(), ir.VoidType()
FLOAT_ALIGN = 4  # vectors may start at any float


class Value:
    """An SSA value of a function under construction."""

    __slots__ = ("f", "ir")

    def __init__(self, f: Function, value: Any) -> None:
        self.f, self.ir = f, value


class Flag(Value):
    """A condition."""

    __slots__ = ()

    def __and__(self, other: Flag) -> Flag:
        return Flag(self.f, self.f.ll.and_(self.ir, other.ir))

    def select(self, yes: Any, no: Any) -> Any:
        """`yes` where the condition holds, else `no`."""
        return type(yes)(self.f, self.f.ll.select(self.ir, yes.ir, no.ir))


class Index(Value):
    """A 64-bit signed integer."""

    __slots__ = ()

    def _binary(self, op: str, other: Index | int, swap: bool = False) -> Index:
        a, b = self.ir, self.f.index(other).ir
        return Index(self.f, getattr(self.f.ll, op)(*((b, a) if swap else (a, b))))

    def __add__(self, other: Index | int) -> Index:
        return self if isinstance(other, int) and other == 0 else self._binary("add", other)

    __radd__ = __add__

    def __sub__(self, other: Index | int) -> Index:
        return self._binary("sub", other)

    def __rsub__(self, other: int) -> Index:
        return self._binary("sub", other, swap=True)

    def __mul__(self, other: Index | int) -> Index:
        return self if isinstance(other, int) and other == 1 else self._binary("mul", other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Index | int) -> Index:
        """Quotient; both sides must be non-negative."""
        return self if isinstance(other, int) and other == 1 else self._binary("udiv", other)

    def __mod__(self, other: Index | int) -> Index:
        """Remainder; both sides must be non-negative."""
        return self._binary("urem", other)

    def _compare(self, op: str, other: Index | int) -> Flag:
        return Flag(self.f, self.f.ll.icmp_signed(op, self.ir, self.f.index(other).ir))

    def __lt__(self, other: Index | int) -> Flag:
        return self._compare("<", other)

    def __ge__(self, other: Index | int) -> Flag:
        return self._compare(">=", other)

    def equals(self, other: Index | int) -> Flag:
        return self._compare("==", other)

    def minimum(self, other: Index | int) -> Index:
        return (self < other).select(self, self.f.index(other))

    def maximum(self, other: Index | int) -> Index:
        return (self < other).select(self.f.index(other), self)


class Vector(Value):
    """Floats side by side; arithmetic is lane by lane and never reassociated."""

    __slots__ = ()

    @property
    def lanes(self) -> int:
        return int(self.ir.type.count)

    def __add__(self, other: Vector) -> Vector:
        return Vector(self.f, self.f.ll.fadd(self.ir, other.ir))

    def __sub__(self, other: Vector) -> Vector:
        return Vector(self.f, self.f.ll.fsub(self.ir, other.ir))

    def __mul__(self, other: Vector) -> Vector:
        return Vector(self.f, self.f.ll.fmul(self.ir, other.ir))

    def __truediv__(self, other: Vector) -> Vector:
        return Vector(self.f, self.f.ll.fdiv(self.ir, other.ir))

    def __neg__(self) -> Vector:
        return Vector(self.f, self.f.ll.fneg(self.ir))

    def absolute(self) -> Vector:
        return self._by_bits(lambda bits: self.f.ll.and_(bits, self._words(0x7FFF_FFFF)))

    def with_sign_of(self, other: Vector) -> Vector:
        """This, which is not negative, with another's sign."""
        sign = self.f.ll.and_(self.f.ll.bitcast(other.ir, self._word_type()),
                              self._words(0x8000_0000))
        return self._by_bits(lambda bits: self.f.ll.or_(bits, sign))

    def half_power_of_two(self) -> Vector:
        """2 ** (n - 1) for whole numbers n, which the last bits of this hold."""
        return self._by_bits(lambda bits: self.f.ll.add(
            self.f.ll.shl(bits, self._words(23)), self._words(126 << 23)))

    def _by_bits(self, change: Callable[[Any], Any]) -> Vector:
        bits = change(self.f.ll.bitcast(self.ir, self._word_type()))
        return Vector(self.f, self.f.ll.bitcast(bits, self.ir.type))

    def _word_type(self) -> Any:
        return ir.VectorType(I32, self.lanes)

    def _words(self, value: int) -> Any:
        return ir.Constant(self._word_type(), [value] * self.lanes)

    def maximum(self, other: Vector) -> Vector:
        """The larger; where `other` is NaN, NaN."""
        keep = self.f.ll.fcmp_ordered(">", self.ir, other.ir)
        return Vector(self.f, self.f.ll.select(keep, self.ir, other.ir))

    def minimum(self, other: Vector) -> Vector:
        """The smaller; where `other` is NaN, NaN."""
        keep = self.f.ll.fcmp_ordered("<", self.ir, other.ir)
        return Vector(self.f, self.f.ll.select(keep, self.ir, other.ir))

    def maximum_or_nan(self, other: Vector) -> Vector:
        """The larger; where either is NaN, NaN."""
        keep = self.f.ll.fcmp_unordered("ugt", self.ir, other.ir)  # also where self is NaN
        picked = self.f.ll.select(keep, self.ir, other.ir)
        lost = self.f.ll.fcmp_unordered("uno", other.ir, other.ir)
        return Vector(self.f, self.f.ll.select(lost, other.ir, picked))

    def above(self, other: Vector) -> Bits:
        """Where this is larger, and neither is NaN."""
        return Bits(self.f, self.f.ll.fcmp_ordered(">", self.ir, other.ir))

    def above_or_nan(self, other: Vector) -> Bits:
        """Where this is larger, or either is NaN."""
        return Bits(self.f, self.f.ll.fcmp_unordered(">", self.ir, other.ir))

    def is_nan(self) -> Bits:
        return Bits(self.f, self.f.ll.fcmp_unordered("uno", self.ir, self.ir))

    def equals(self, other: Vector) -> Bits:
        return Bits(self.f, self.f.ll.fcmp_ordered("==", self.ir, other.ir))

    def shuffle(self, other: Vector, lanes: Sequence[int]) -> Vector:
        """Lanes picked from the two vectors laid side by side."""
        mask = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return Vector(self.f, self.f.ll.shuffle_vector(self.ir, other.ir, mask))

    def slice(self, start: int, count: int) -> Vector:
        """`count` neighbouring lanes."""
        whole = start == 0 and count == self.lanes
        return self if whole else self.shuffle(self, range(start, start + count))


class Bits(Value):
    """A flag for every lane; in memory, a bit for every lane, in whole bytes."""

    __slots__ = ()

    def __and__(self, other: Bits) -> Bits:
        return Bits(self.f, self.f.ll.and_(self.ir, other.ir))

    def __or__(self, other: Bits) -> Bits:
        return Bits(self.f, self.f.ll.or_(self.ir, other.ir))

    def __invert__(self) -> Bits:
        return Bits(self.f, self.f.ll.not_(self.ir))

    def any(self) -> Flag:
        packed = self.f.ll.bitcast(self.ir, ir.IntType(int(self.ir.type.count)))
        return Flag(self.f, self.f.ll.icmp_unsigned("!=", packed, ir.Constant(packed.type, 0)))

    def select(self, yes: Vector, no: Vector) -> Vector:
        return Vector(self.f, self.f.ll.select(self.ir, yes.ir, no.ir))


def bits_bytes(lanes: int) -> int:
    """Bytes that the flags of one vector take."""
    return max(1, lanes // 8)


class Pointer(Value):
    """An address; offsets count floats."""

    __slots__ = ()

    def __add__(self, offset: Index | int) -> Pointer:
        if isinstance(offset, int) and offset == 0:
            return self
        step = [self.f.index(offset).ir]
        return Pointer(self.f, self.f.ll.gep(self.ir, step, source_etype=F32))

    def bytes(self, offset: Index | int) -> Pointer:
        """Moved by so many bytes."""
        if isinstance(offset, int) and offset == 0:
            return self
        return Pointer(self.f, self.f.ll.gep(self.ir, [self.f.index(offset).ir], source_etype=I8))

    def load(self, offset: Index | int = 0, lanes: int | None = None,
             count: Index | int | None = None) -> Vector:
        """A vector; with `count`, only that many leading lanes, the others zero."""
        f, lanes = self.f, lanes or self.f.isa.lanes
        where, kind = (self + offset).ir, ir.VectorType(F32, lanes)
        if count is None or (isinstance(count, int) and count >= lanes):
            return Vector(f, f.ll.load(where, align=FLOAT_ALIGN, typ=kind))
        mask, masks = f.leading(count, lanes), ir.VectorType(BOOL, lanes)
        load = f.intrinsic(f"llvm.masked.load.v{lanes}f32.p0", kind, [PTR, I32, masks, kind])
        zero = ir.Constant(kind, [0.0] * lanes)
        return Vector(f, f.ll.call(load, [where, ir.Constant(I32, FLOAT_ALIGN), mask, zero]))

    def store(self, value: Vector, offset: Index | int = 0, count: Index | int | None = None,
              streaming: bool = False) -> None:
        """Write a vector; with `count`, only that many leading lanes."""
        f, where, lanes = self.f, (self + offset).ir, value.lanes
        if count is None or (isinstance(count, int) and count >= lanes):
            align = 4 * lanes if streaming else FLOAT_ALIGN  # streaming stores must be aligned
            store = f.ll.store(value.ir, where, align=align)
            if streaming:
                store.set_metadata("nontemporal", f.module.ir.add_metadata([ir.Constant(I32, 1)]))
            return
        mask, masks = f.leading(count, lanes), ir.VectorType(BOOL, lanes)
        store = f.intrinsic(f"llvm.masked.store.v{lanes}f32.p0", VOID,
                            [value.ir.type, PTR, I32, masks])
        f.ll.call(store, [value.ir, where, ir.Constant(I32, FLOAT_ALIGN), mask])

    def store_bits(self, bits: Bits) -> None:
        lanes = int(bits.ir.type.count)
        packed = self.f.ll.bitcast(bits.ir, ir.IntType(lanes))
        whole = self.f.ll.zext(packed, I8) if lanes < 8 else packed
        self.f.ll.store(whole, self.ir, align=1)

    def load_bits(self) -> Bits:
        lanes = self.f.isa.lanes
        whole = self.f.ll.load(self.ir, align=1, typ=ir.IntType(8 * bits_bytes(lanes)))
        packed = self.f.ll.trunc(whole, ir.IntType(lanes)) if lanes < 8 else whole
        return Bits(self.f, self.f.ll.bitcast(packed, ir.VectorType(BOOL, lanes)))

    def load_where(self, bits: Bits) -> Vector:
        """A vector with zeros where a bit is not set; what no bit is set for is not read."""
        f, lanes = self.f, self.f.isa.lanes
        kind, masks = ir.VectorType(F32, lanes), ir.VectorType(BOOL, lanes)
        load = f.intrinsic(f"llvm.masked.load.v{lanes}f32.p0", kind, [PTR, I32, masks, kind])
        zero = ir.Constant(kind, [0.0] * lanes)
        return Vector(f, f.ll.call(load, [self.ir, ir.Constant(I32, FLOAT_ALIGN), bits.ir, zero]))

    def broadcast(self, offset: Index | int = 0, lanes: int | None = None) -> Vector:
        """One float in every lane."""
        scalar = self.f.ll.load((self + offset).ir, align=FLOAT_ALIGN, typ=F32)
        return self.f.splat(scalar, lanes)

    def prefetch(self, offset: Index | int = 0, level: int = 2) -> None:
        """Ask for a cache line to be brought into cache level 1, 2 or 3."""
        fetch = self.f.intrinsic("llvm.prefetch.p0", VOID, [PTR, I32, I32, I32])
        hint = [ir.Constant(I32, value) for value in (0, 4 - level, 1)]
        self.f.ll.call(fetch, [(self + offset).ir, *hint])

    def _word(self, i: int) -> Any:
        return self.f.ll.gep(self.ir, [ir.Constant(I64, i)], source_etype=I64)

    def load_index(self, i: int) -> Index:
        """The i-th 64-bit integer."""
        return Index(self.f, self.f.ll.load(self._word(i), align=8, typ=I64))

    def load_pointer(self, i: int) -> Pointer:
        """The i-th 64-bit address."""
        return Pointer(self.f, self.f.ll.load(self._word(i), align=8, typ=PTR))

    def store_index(self, i: int, value: Index | int) -> None:
        self.f.ll.store(self.f.index(value).ir, self._word(i), align=8)

    def store_pointer(self, i: int, value: Pointer) -> None:
        self.f.ll.store(value.ir, self._word(i), align=8)

    def fetch_add(self, i: int) -> Index:
        """Atomically add one to the i-th integer; returns what it was."""
        one = ir.Constant(I64, 1)
        return Index(self.f, self.f.ll.atomic_rmw("add", self._word(i), one, "monotonic"))

"""Typed values of LLVM's IR in registers: flags, indices, vectors, words and bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llvmlite import ir

if TYPE_CHECKING:
    from .function import Function

BOOL, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
PTR, VOID = ir.PointerType(), ir.VoidType()


class _Bfloat(ir.types.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


BFLOAT = _Bfloat()


class Value:
    """An SSA value of a function under construction."""

    __slots__ = ("f", "ir")

    def __init__(self, f: Function, value: Any) -> None:
        self.f, self.ir = f, value

    def like(self, value: Any) -> Any:
        """Another of this kind."""
        return type(self)(self.f, value)

    def chosen(self, where: Any, value: Any, other: Any) -> Any:
        """What a flag chose between this and another."""
        return self.like(value)


class Flag(Value):
    """A condition."""

    __slots__ = ()

    def __and__(self, other: Flag) -> Flag:
        return Flag(self.f, self.f.ll.and_(self.ir, other.ir))

    def select(self, yes: Any, no: Any) -> Any:
        """`yes` where the condition holds, else `no`."""
        return yes.chosen(self.ir, self.f.ll.select(self.ir, yes.ir, no.ir), no)


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

    def __or__(self, other: Index) -> Index:
        return self._binary("or_", other)

    def _compare(self, op: str, other: Index | int) -> Flag:
        return Flag(self.f, self.f.ll.icmp_signed(op, self.ir, self.f.index(other).ir))

    def __lt__(self, other: Index | int) -> Flag:
        return self._compare("<", other)

    def __ge__(self, other: Index | int) -> Flag:
        return self._compare(">=", other)

    def equals(self, other: Index | int) -> Flag:
        return self._compare("==", other)

    def within(self, end: Index) -> Flag:
        """0 <= this < end, in one comparison."""
        return Flag(self.f, self.f.ll.icmp_unsigned("<", self.ir, end.ir))

    def bits(self, lanes: int) -> Bits:
        """The lowest as flags, one for every lane."""
        whole = self.f.ll.trunc(self.ir, ir.IntType(lanes))
        return Bits(self.f, self.f.ll.bitcast(whole, ir.VectorType(BOOL, lanes)))

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

    def to(self, work: Any) -> Vector:
        """As another kind of floats."""
        kinds = (F16, F32, F64)
        now, then = kinds.index(self.ir.type.element), kinds.index(work)
        if now == then:
            return self
        change = self.f.ll.fpext if then > now else self.f.ll.fptrunc
        return Vector(self.f, change(self.ir, ir.VectorType(work, self.lanes)))

    def same(self, value: float) -> Vector:
        """A constant in every lane of a vector such as this."""
        return Vector(self.f, ir.Constant(self.ir.type, float(value)))

    def words(self) -> Words:
        """The bits of float32."""
        return Words(self.f, self.f.ll.bitcast(self.ir, ir.VectorType(I32, self.lanes)))

    def whole(self) -> Words:
        """What is before the point, as integers."""
        return Words(self.f, self.f.ll.fptosi(self.ir, ir.VectorType(I32, self.lanes)))

    def absolute(self) -> Vector:
        return self.words().masked(0x7FFF_FFFF).floats()

    def with_sign_of(self, other: Vector) -> Vector:
        """This, which is not negative, with another's sign."""
        return self.words().joined(other.words().masked(0x8000_0000)).floats()

    def half_power_of_two(self) -> Vector:
        """2 ** (n - 1) for whole numbers n, which the last bits of this hold."""
        shifted = self.words().shifted(23)
        return shifted.plus(shifted.same(126 << 23)).floats()

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

    def root(self) -> Vector:
        """The square root."""
        kind = self.ir.type
        bits = {F32: 32, F64: 64}[kind.element]
        root = self.f.intrinsic(f"llvm.sqrt.v{self.lanes}f{bits}", kind, [kind])
        return Vector(self.f, self.f.ll.call(root, [self.ir]))

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

    def spread(self, lane: int) -> Vector:
        """One lane in every lane."""
        return self.shuffle(self, [lane] * self.lanes)

    def slice(self, start: int, count: int) -> Vector:
        """`count` neighbouring lanes."""
        whole = start == 0 and count == self.lanes
        return self if whole else self.shuffle(self, range(start, start + count))


class Words(Value):
    """32-bit integers side by side."""

    __slots__ = ()

    @property
    def lanes(self) -> int:
        return int(self.ir.type.count)

    def floats(self) -> Vector:
        """The float32 that have these bits."""
        return Vector(self.f, self.f.ll.bitcast(self.ir, ir.VectorType(F32, self.lanes)))

    def numbers(self) -> Vector:
        """As float32."""
        return Vector(self.f, self.f.ll.sitofp(self.ir, ir.VectorType(F32, self.lanes)))

    def same(self, value: int) -> Words:
        """One in every lane."""
        return Words(self.f, ir.Constant(self.ir.type, value))

    def shifted(self, by: int) -> Words:
        """Upwards, or downwards where `by` is negative."""
        if not by:
            return self
        shift = self.f.ll.shl if by > 0 else self.f.ll.lshr
        return Words(self.f, shift(self.ir, self.same(abs(by)).ir))

    def shifted_by(self, places: Words) -> Words:
        """Downwards, each lane by its own number of places."""
        return Words(self.f, self.f.ll.lshr(self.ir, places.ir))

    def masked(self, bits: int) -> Words:
        return Words(self.f, self.f.ll.and_(self.ir, self.same(bits).ir))

    def joined(self, other: Words) -> Words:
        return Words(self.f, self.f.ll.or_(self.ir, other.ir))

    def unlike(self, other: Words) -> Words:
        """Bits that are set in one of the two."""
        return Words(self.f, self.f.ll.xor(self.ir, other.ir))

    def plus(self, other: Words) -> Words:
        return Words(self.f, self.f.ll.add(self.ir, other.ir))

    def minus(self, other: Words) -> Words:
        return Words(self.f, self.f.ll.sub(self.ir, other.ir))

    def times(self, other: Words) -> Words:
        return Words(self.f, self.f.ll.mul(self.ir, other.ir))

    def unless_nan(self, value: Vector, otherwise: int) -> Words:
        """These, and `otherwise` where a value is NaN."""
        return value.is_nan().select(self.same(otherwise), self)

    def equals(self, other: Words) -> Bits:
        return Bits(self.f, self.f.ll.icmp_unsigned("==", self.ir, other.ir))

    def differs(self, other: Words) -> Bits:
        return Bits(self.f, self.f.ll.icmp_unsigned("!=", self.ir, other.ir))


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

    def select(self, yes: Any, no: Any) -> Any:
        """Vectors or words, lane by lane."""
        return yes.like(self.f.ll.select(self.ir, yes.ir, no.ir))

    def packed(self) -> Index:
        """A bit for every lane, the first lane's is the lowest."""
        whole = self.f.ll.bitcast(self.ir, ir.IntType(int(self.ir.type.count)))
        return Index(self.f, self.f.ll.zext(whole, I64))


def bits_bytes(lanes: int) -> int:
    """Bytes that the flags of one vector take."""
    return max(1, lanes // 8)

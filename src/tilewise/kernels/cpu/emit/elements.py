"""Types of numbers in memory; in registers they are float32 or float64, or as they are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llvmlite import ir

from .values import BFLOAT, F16, F32, F64, I8, I16, I32, Vector, Words

# adding and taking away leaves the nearest integer, ties to even; for less than 2^22 and 2^51
ROUNDERS = {F32: 1.5 * 2.0 ** 23, F64: 1.5 * 2.0 ** 52}
QUIET = 0x7FC0  # a NaN of bfloat16


@dataclass(frozen=True)
class Element:
    """A type in memory; integers have bounds, which stores saturate to."""

    name: str
    kind: Any
    bytes: int
    low: int = 0
    high: int = 0
    moves: bool = False  # stored is only what was loaded: every bit is kept

    @property
    def is_float(self) -> bool:
        return self.low == self.high

    @property
    def suffix(self) -> str:
        """As LLVM writes it in the names of intrinsics."""
        return self.name if self.kind in (F16, F32, F64) else f"i{8 * self.bytes}"

    def widened(self, raw: Vector, work: Any) -> Vector:
        """What was loaded, as float32 or float64, as a wider integer, or as it is."""
        if work == self.kind:
            return raw
        if self.name == "bf16":
            words = raw.f.ll.zext(raw.ir, ir.VectorType(I32, raw.lanes))
            return Words(raw.f, words).shifted(16).floats().to(work)
        if self.is_float:
            return raw.to(work)
        extend = raw.f.ll.sext if self.low < 0 else raw.f.ll.zext
        if isinstance(work, ir.IntType):
            return Vector(raw.f, extend(raw.ir, ir.VectorType(work, raw.lanes)))
        wide = raw.ir if self.kind == I32 else extend(raw.ir, ir.VectorType(I32, raw.lanes))
        return Vector(raw.f, raw.f.ll.sitofp(wide, ir.VectorType(work, raw.lanes)))

    def narrowed(self, value: Vector) -> Vector:
        """As it is stored: rounded to nearest, ties to even, and saturated."""
        if value.ir.type.element == self.kind:
            return value
        if self.name == "bf16":
            return _lower(value.words().shifted(-16)) if self.moves else _as_bfloat16(value.to(F32))
        if self.is_float:
            return value.to(self.kind)
        # NaN becomes the lowest value, as it does in OpenCV
        rounder = value.same(ROUNDERS[value.ir.type.element])
        value = value.maximum(value.same(self.low))
        value = -((-value).maximum(value.same(-self.high)))
        wide = value.f.ll.fptosi((value + rounder - rounder).ir, ir.VectorType(I32, value.lanes))
        kind = ir.VectorType(self.kind, value.lanes)
        return Vector(value.f, wide if self.kind == I32 else value.f.ll.trunc(wide, kind))


    def cut_off(self, value: Vector) -> Vector:
        """As it is stored where C converts: without what follows the point, the lowest bits."""
        if self.is_float:
            return value.to(self.kind)
        return self.lowest(value.whole())

    def lowest(self, words: Words) -> Vector:
        """As many of their lowest bits as this integer has."""
        kind = ir.VectorType(self.kind, words.lanes)
        return Vector(words.f, words.ir if self.kind == I32 else words.f.ll.trunc(words.ir, kind))

    def least(self, a: Vector, b: Vector) -> Vector:
        """The smaller, of numbers as they are in memory."""
        return a.minimum(b) if self.is_float else self._of_integers("min", a, b)

    def largest(self, a: Vector, b: Vector) -> Vector:
        """The larger, of numbers as they are in memory."""
        return a.maximum(b) if self.is_float else self._of_integers("max", a, b)

    def _of_integers(self, what: str, a: Vector, b: Vector) -> Vector:
        kind, sign = a.ir.type, "s" if self.low < 0 else "u"
        pick = a.f.intrinsic(f"llvm.{sign}{what}.v{a.lanes}{self.suffix}", kind, [kind, kind])
        return Vector(a.f, a.f.ll.call(pick, [a.ir, b.ir]))


def converted(value: Vector) -> Vector:
    """The nearest bfloat16s, as integers, by the instruction of a row that has one."""
    f, lanes = value.f, value.lanes
    kind, bits = ir.VectorType(BFLOAT, lanes), ir.VectorType(I16, lanes)
    if "x86_64" not in f.isa.machines:
        return Vector(f, f.ll.bitcast(f.ll.fptrunc(value.ir, kind), bits))
    # LLVM's own conversion would call a function
    convert = f.intrinsic(f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * lanes}", kind, [value.ir.type])
    return Vector(f, f.ll.bitcast(f.ll.call(convert, [value.ir]), bits))


def _as_bfloat16(value: Vector) -> Vector:
    """The upper halves, after adding what rounds them; where a value is NaN, a quiet one."""
    if value.f.isa.reads_bf16 and value.lanes == value.f.isa.lanes:
        return converted(value)
    words = value.words()
    even = words.shifted(-16).masked(1)
    upper = words.plus(even.plus(even.same(0x7FFF))).shifted(-16).unless_nan(value, QUIET)
    return _lower(upper)


def _lower(words: Words) -> Vector:
    """The lower halves of words."""
    return Vector(words.f, words.f.ll.trunc(words.ir, ir.VectorType(I16, words.lanes)))


FLOAT32, BF16 = Element("f32", F32, 4), Element("bf16", I16, 2)
ELEMENTS = {element.name: element for element in (
    Element("u8", I8, 1, 0, 255),
    Element("u16", I16, 2, 0, 65535),
    Element("i16", I16, 2, -32768, 32767),
    Element("i32", I32, 4, -2**31, 2**31 - 1),  # in float64 only
    FLOAT32,
    Element("f16", F16, 2),  # not on x86 without AVX2, where LLVM calls functions for it
    BF16,
    Element("f64", F64, 8),
)}
MOVED = {name: replace(element, moves=True) for name, element in ELEMENTS.items()}

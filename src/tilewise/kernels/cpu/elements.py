"""Vectors of any element type in memory, as float32 or float64 in registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from .emit import BOOL, F32, F64, I8, I32, PTR, VOID, Function, Index, Pointer, Vector

I16 = ir.IntType(16)
# adding and taking away leaves the nearest integer, ties to even; for less than 2^22 and 2^51
ROUNDERS = {F32: 1.5 * 2.0 ** 23, F64: 1.5 * 2.0 ** 52}


@dataclass(frozen=True)
class Element:
    """A type in memory; integers have bounds, which stores saturate to."""

    name: str  # as LLVM writes it in the names of intrinsics
    kind: Any
    bytes: int
    low: int = 0
    high: int = 0

    @property
    def is_float(self) -> bool:
        return self.low == self.high

    def load(self, p: Pointer, lanes: int, work: Any, count: Index | int | None = None) -> Vector:
        """A vector as `work`; with `count`, only that many leading lanes, the others zero."""
        f, kind = p.f, ir.VectorType(self.kind, lanes)
        if count is None:
            raw = f.ll.load(p.ir, align=self.bytes, typ=kind)
        else:
            masks = ir.VectorType(BOOL, lanes)
            load = f.intrinsic(f"llvm.masked.load.v{lanes}{self.name}.p0", kind,
                               [PTR, I32, masks, kind])
            zero = ir.Constant(kind, [0] * lanes)
            raw = f.ll.call(load, [p.ir, ir.Constant(I32, self.bytes), f.leading(count, lanes),
                                   zero])
        return Vector(f, self._widen(f, raw, ir.VectorType(work, lanes), lanes))

    def _widen(self, f: Function, raw: Any, kind: Any, lanes: int) -> Any:
        if self.is_float:
            return raw if raw.type == kind else f.ll.fpext(raw, kind)
        extend = f.ll.sext if self.low < 0 else f.ll.zext
        wide = raw if self.kind == I32 else extend(raw, ir.VectorType(I32, lanes))
        return f.ll.sitofp(wide, kind)

    def store(self, p: Pointer, value: Vector, count: Index | int | None = None,
              streaming: bool = False) -> None:
        """Write a vector, rounded and saturated; with `count`, only the leading lanes."""
        f, lanes = p.f, value.lanes
        raw = self._narrow(f, value)
        if count is None:
            align = self.bytes * lanes if streaming else self.bytes
            store = f.ll.store(raw, p.ir, align=align)
            if streaming:
                store.set_metadata("nontemporal", f.module.ir.add_metadata([ir.Constant(I32, 1)]))
            return
        masks = ir.VectorType(BOOL, lanes)
        call = f.intrinsic(f"llvm.masked.store.v{lanes}{self.name}.p0", VOID,
                           [raw.type, PTR, I32, masks])
        f.ll.call(call, [raw, p.ir, ir.Constant(I32, self.bytes), f.leading(count, lanes)])

    def _narrow(self, f: Function, value: Vector) -> Any:
        kind = ir.VectorType(self.kind, value.lanes)
        if self.is_float:
            return value.ir if value.ir.type == kind else f.ll.fptrunc(value.ir, kind)
        rounder = constant(f, ROUNDERS[value.ir.type.element], value)
        # NaN becomes the lowest value, as it does in OpenCV
        value = value.maximum(constant(f, self.low, value))
        value = -((-value).maximum(constant(f, -self.high, value)))
        whole = value + rounder - rounder
        wide = f.ll.fptosi(whole.ir, ir.VectorType(I32, value.lanes))
        return wide if self.kind == I32 else f.ll.trunc(wide, kind)


ELEMENTS = {
    "u8": Element("i8", I8, 1, 0, 255),
    "u16": Element("i16", I16, 2, 0, 65535),
    "i16": Element("i16", I16, 2, -32768, 32767),
    "i32": Element("i32", I32, 4, -2**31, 2**31 - 1),  # in float64 only
    "f32": Element("f32", F32, 4),
    "f64": Element("f64", F64, 8),
}


def constant(f: Function, value: float, like: Vector) -> Vector:
    """A constant in every lane of a vector such as `like`."""
    return Vector(f, ir.Constant(like.ir.type, [float(value)] * like.lanes))


def zeros(f: Function, work: Any, lanes: int) -> Vector:
    return Vector(f, ir.Constant(ir.VectorType(work, lanes), [0.0] * lanes))


def broadcast(p: Pointer, work: Any, lanes: int) -> Vector:
    """One number in every lane."""
    size = {F32: 4, F64: 8}[work]
    return p.f.splat(p.f.ll.load(p.ir, align=size, typ=work), lanes)

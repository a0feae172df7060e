"""Addresses in generated code; each knows the type of what it points at.

Offsets count elements, sizes are 64-bit, vectors are as wide as the instruction set's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llvmlite import ir

from .checks import (
    Home,
    chosen_home,
    keep_home,
    loaded_home,
    safe,
    safe_lanes,
    safe_places,
)
from .elements import FLOAT32, Element
from .values import (
    BOOL,
    F32,
    F64,
    I8,
    I32,
    I64,
    PTR,
    VOID,
    Bits,
    Index,
    Value,
    Vector,
    Words,
    bits_bytes,
)

if TYPE_CHECKING:
    from .function import Function

# x86's instructions that pick words of a vector by a vector of places
PERMUTES = {8: "llvm.x86.avx2.permd", 16: "llvm.x86.avx512.permvar.si.512"}


class Pointer(Value):
    """An address of elements; in checked code it has a home."""

    __slots__ = ("element", "home")

    def __init__(self, f: Function, value: Any, element: Element = FLOAT32,
                 home: Home | None = None) -> None:
        super().__init__(f, value)
        self.element, self.home = element, home

    def like(self, value: Any) -> Pointer:
        return type(self)(self.f, value, self.element, self.home)

    def chosen(self, where: Any, value: Any, other: Any) -> Pointer:
        return type(self)(self.f, value, self.element, chosen_home(where, self, other))

    def of(self, element: Element) -> Pointer:
        """The same address, of others."""
        return Pointer(self.f, self.ir, element, self.home)

    def address(self) -> Index:
        return Index(self.f, self.f.ll.ptrtoint(self.ir, I64))

    def __add__(self, offset: Index | int) -> Pointer:
        return self._moved(offset, self.element.kind)

    def bytes(self, offset: Index | int) -> Pointer:
        """Moved by so many bytes."""
        return self._moved(offset, I8)

    def _moved(self, offset: Index | int, kind: Any) -> Pointer:
        if isinstance(offset, int) and offset == 0:
            return self
        return self.like(self.f.ll.gep(self.ir, [self.f.index(offset).ir], source_etype=kind))

    def load(self, offset: Index | int = 0, lanes: int | None = None,
             count: Index | int | None = None, work: Any = F32) -> Vector:
        """A vector; with `count`, only that many leading lanes, the others zero."""
        f, lanes = self.f, lanes or self.f.isa.lanes
        at, kind = self + offset, ir.VectorType(self.element.kind, lanes)
        if count is None or (isinstance(count, int) and count >= lanes):
            here = safe(at, lanes * self.element.bytes, "loads")
            raw = f.ll.load(here, align=self.element.bytes, typ=kind)
        else:
            raw = at._masked_load(f.leading(count, lanes), kind)
        return self.element.widened(Vector(f, raw), work)

    def _masked_load(self, mask: Any, kind: Any) -> Any:
        """Lanes that the mask has not are zero, and not read."""
        f, lanes = self.f, kind.count
        load = f.intrinsic(f"llvm.masked.load.v{lanes}{self.element.suffix}.p0", kind,
                           [PTR, I32, ir.VectorType(BOOL, lanes), kind])
        zero = ir.Constant(kind, 0)
        here = safe_lanes(self, mask, self.element.bytes, "loads")
        return f.ll.call(load, [here, ir.Constant(I32, self.element.bytes), mask, zero])

    def store(self, value: Vector, offset: Index | int = 0, count: Index | int | None = None,
              streaming: bool = False) -> None:
        """Write a vector; with `count`, only that many leading lanes."""
        f, at, lanes = self.f, self + offset, value.lanes
        raw, align = self.element.narrowed(value).ir, self.element.bytes
        if count is None or (isinstance(count, int) and count >= lanes):
            # streaming stores must be aligned
            here = safe(at, align * lanes, "stores")
            store = f.ll.store(raw, here, align=align * lanes if streaming else align)
            if streaming:
                store.set_metadata("nontemporal", f.module.ir.add_metadata([ir.Constant(I32, 1)]))
            return
        store = f.intrinsic(f"llvm.masked.store.v{lanes}{self.element.suffix}.p0", VOID,
                            [raw.type, PTR, I32, ir.VectorType(BOOL, lanes)])
        mask = f.leading(count, lanes)
        here = safe_lanes(at, mask, align, "stores")
        f.ll.call(store, [raw, here, ir.Constant(I32, align), mask])

    def store_bits(self, bits: Bits) -> None:
        lanes = int(bits.ir.type.count)
        packed = self.f.ll.bitcast(bits.ir, ir.IntType(lanes))
        whole = self.f.ll.zext(packed, I8) if lanes < 8 else packed
        self.f.ll.store(whole, safe(self, whole.type.width // 8, "stores"), align=1)

    def load_bits(self) -> Bits:
        lanes = self.f.isa.lanes
        here = safe(self, bits_bytes(lanes), "loads")
        whole = self.f.ll.load(here, align=1, typ=ir.IntType(8 * bits_bytes(lanes)))
        packed = self.f.ll.trunc(whole, ir.IntType(lanes)) if lanes < 8 else whole
        return Bits(self.f, self.f.ll.bitcast(packed, ir.VectorType(BOOL, lanes)))

    def load_where(self, bits: Bits) -> Vector:
        """A vector with zeros where a bit is not set; what no bit is set for is not read."""
        kind = ir.VectorType(self.element.kind, self.f.isa.lanes)
        return self.element.widened(Vector(self.f, self._masked_load(bits.ir, kind)), F32)

    def broadcast(self, offset: Index | int = 0, lanes: int | None = None) -> Vector:
        """One float in every lane."""
        element = self.element
        same = self.f.splat((self + offset)._one(), lanes)
        return element.widened(same, F64 if element.kind == F64 else F32)

    def _one(self) -> Any:
        """The element here."""
        return self.f.ll.load(safe(self, self.element.bytes, "loads"), align=self.element.bytes,
                              typ=self.element.kind)

    def gather(self, stride: Index, count: int, lanes: int | None = None) -> Vector:
        """The first `count` lanes from floats that are `stride` apart; the others are zero."""
        lanes, element = lanes or self.f.isa.lanes, self.element
        assert element.kind in (F32, F64), f"{element.name} would need to be widened"
        found = ir.Constant(ir.VectorType(element.kind, lanes), 0.0)
        for lane in range(count):
            one = (self + stride * lane)._one()
            found = self.f.ll.insert_element(found, one, ir.Constant(I32, lane))
        return Vector(self.f, found)

    def gather_at(self, offsets: Sequence[Index]) -> Vector:
        """One float from each of these places."""
        element = self.element
        assert element.kind in (F32, F64), f"{element.name} would need to be widened"
        found = ir.Constant(ir.VectorType(element.kind, len(offsets)), [0.0] * len(offsets))
        for lane, offset in enumerate(offsets):
            one = (self + offset)._one()
            found = self.f.ll.insert_element(found, one, ir.Constant(I32, lane))
        return Vector(self.f, found)

    def gather_words(self, places: Words) -> Words:
        """The 32-bit integers at these places, each counted from here."""
        f, lanes = self.f, places.lanes
        many, kind = ir.VectorType(I64, lanes), ir.VectorType(I32, lanes)
        start = f.splat(self.address().ir, lanes).ir
        offsets = f.ll.shl(f.ll.zext(places.ir, many), ir.Constant(many, [2] * lanes))
        there = safe_places(self, f.ll.add(start, offsets), 4, "loads")
        pointers = f.ll.inttoptr(there, ir.VectorType(PTR, lanes))
        mask = ir.VectorType(BOOL, lanes)
        gather = f.intrinsic(f"llvm.masked.gather.v{lanes}i32.v{lanes}p0", kind,
                             [pointers.type, I32, mask, kind])
        return Words(f, f.ll.call(gather, [pointers, ir.Constant(I32, 4),
                                           ir.Constant(mask, [1] * lanes),
                                           ir.Constant(kind, [0] * lanes)]))

    def words_at(self, places: Words, count: int) -> Words:
        """The same from a table of at most eight, which registers hold; a gather takes longer."""
        f, lanes = self.f, places.lanes
        if lanes not in PERMUTES or "x86_64" not in f.isa.machines:
            found = places.same(0)
            for i in range(count):
                here = self.of(FLOAT32).broadcast(i, lanes).words()
                found = places.equals(places.same(i)).select(here, found)
            return found
        table = f.ll.load(safe(self, 4 * count, "loads"), align=4, typ=ir.VectorType(I32, count))
        spread = ir.Constant(ir.VectorType(I32, lanes), [i % count for i in range(lanes)])
        pick = f.intrinsic(PERMUTES[lanes], places.ir.type, [places.ir.type] * 2)
        return Words(f, f.ll.call(pick, [f.ll.shuffle_vector(table, table, spread), places.ir]))

    def prefetch(self, offset: Index | int = 0, level: int = 2) -> None:
        """Ask for a cache line to be brought into cache level 1, 2 or 3."""
        fetch = self.f.intrinsic("llvm.prefetch.p0", VOID, [PTR, I32, I32, I32])
        hint = [ir.Constant(I32, value) for value in (0, 4 - level, 1)]
        self.f.ll.call(fetch, [(self + offset).ir, *hint])

    def _word(self, i: int) -> Any:
        return self.f.ll.gep(self.ir, [ir.Constant(I64, i)], source_etype=I64)

    def _safe_word(self, i: int, verb: str) -> Any:
        return safe(self.like(self._word(i)), 8, verb)

    def load_index(self, i: int) -> Index:
        """The i-th 64-bit integer."""
        return Index(self.f, self.f.ll.load(self._safe_word(i, "loads"), align=8, typ=I64))

    def load_pointer(self, i: int, element: Element = FLOAT32) -> Pointer:
        """The i-th 64-bit address."""
        value = self.f.ll.load(self._safe_word(i, "loads"), align=8, typ=PTR)
        return Pointer(self.f, value, element, loaded_home(self, i))

    def store_index(self, i: int, value: Index | int) -> None:
        self.f.ll.store(self.f.index(value).ir, self._safe_word(i, "stores"), align=8)

    def store_pointer(self, i: int, value: Pointer) -> None:
        self.f.ll.store(value.ir, self._safe_word(i, "stores"), align=8)
        keep_home(self, i, value)

    def fetch_add(self, i: int) -> Index:
        """Atomically add one to the i-th integer; returns what it was."""
        one = ir.Constant(I64, 1)
        here = self._safe_word(i, "stores")
        return Index(self.f, self.f.ll.atomic_rmw("add", here, one, "monotonic"))

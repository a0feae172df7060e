"""A float32 as a sum of bfloat16 parts: its leading eight bits, the next eight, the last eight.

A product of two such sums is a sum of products of parts. The smallest of them are left out:
three products of two parts keep about 16 bits, six products of three parts all 24.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ....core.isa import AMX, MatrixUnit
from .elements import converted
from .function import Function
from .values import BFLOAT, F32, I32, Vector

I16 = ir.IntType(16)


def split(f: Function, value: Vector, parts: int) -> list[Vector]:
    """The parts of a vector, each of bfloat16 bits in half as many floats; NaN stays NaN.

    Bits of bfloat16 are their only part.
    """
    if value.ir.type.element == I16:
        return [Vector(f, f.ll.bitcast(value.ir, ir.VectorType(F32, value.lanes // 2)))]
    found = []
    for part in range(parts):
        bits = converted(value).ir
        found.append(Vector(f, f.ll.bitcast(bits, ir.VectorType(F32, value.lanes // 2))))
        if part + 1 < parts:
            value = value - _widened(f, bits)
    return found


def _widened(f: Function, bits: Any) -> Vector:
    lanes = bits.type.count
    words = ir.VectorType(I32, lanes)
    high = f.ll.shl(f.ll.zext(bits, words), ir.Constant(words, 16))
    return Vector(f, f.ll.bitcast(high, ir.VectorType(F32, lanes)))


def split_pairs(f: Function, low: Vector, high: Vector, parts: int) -> list[Vector]:
    """The parts of two vectors, side by side in every lane, `low` in the lower halves.

    Of float64, what is left after each part keeps all its bits.
    """
    lanes, kind = low.lanes, low.ir.type
    words, floats = ir.VectorType(I32, lanes), ir.VectorType(F32, lanes)
    zipped = [half * lanes + lane for lane in range(lanes) for half in (0, 1)]
    mask = ir.Constant(ir.VectorType(I32, 2 * lanes), zipped)

    def rest(value: Vector, bits: Any) -> Vector:
        part = f.ll.bitcast(bits, floats)
        return value - Vector(f, part if kind == floats else f.ll.fpext(part, kind))

    found = []
    for part in range(parts):
        bits = _rounded_both(f, *(value.ir if kind == floats else f.ll.fptrunc(value.ir, floats)
                                  for value in (low, high)))
        pairs = f.ll.bitcast(f.ll.shuffle_vector(bits, bits, mask), words)
        found.append(Vector(f, f.ll.bitcast(pairs, floats)))
        if part + 1 < parts:
            low = rest(low, f.ll.shl(pairs, ir.Constant(words, 16)))
            high = rest(high, f.ll.and_(pairs, ir.Constant(words, -1 << 16)))
    return found


def _rounded_both(f: Function, low: Any, high: Any) -> Any:
    """The nearest bfloat16s, as integers, one vector behind the other."""
    lanes, kind = low.type.count, low.type
    if "x86_64" not in f.isa.machines:
        rounded = [converted(Vector(f, value)).ir for value in (low, high)]
        mask = ir.Constant(ir.VectorType(I32, 2 * lanes), list(range(2 * lanes)))
        return f.ll.shuffle_vector(*rounded, mask)
    convert = f.intrinsic(f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * lanes}",
                          ir.VectorType(BFLOAT, 2 * lanes), [kind, kind])
    both = f.ll.call(convert, [high, low])
    return f.ll.bitcast(both, ir.VectorType(I16, 2 * lanes))


def split_tensor(values: Any, parts: int) -> Any:
    """The parts of a tensor, outermost; what is left of a float after each part is exact."""
    import torch  # workers that only compile do without it

    found, rest = [], values
    for _ in range(parts):
        found.append(rest.bfloat16())
        rest = rest - found[-1].to(rest.dtype)
    return torch.stack(found)


def pack_columns(panels: Any, parts: int, unit: MatrixUnit = AMX) -> Any:
    """Panels [..., depth, columns] as tiles [..., step, part, column tile, row, column, values].

    depth and columns are multiples of the unit's; of a row it has some values of each column side
    by side. The result is floats of two bfloat16 each.
    """

    import torch

    *outer, depth, columns = panels.shape
    beside, across = unit.together, unit.columns
    tiles = split_tensor(panels, parts).reshape(
        parts, *outer, depth // unit.depth, unit.depth // beside, beside, columns // across, across)
    n = len(outer)
    order = [*range(1, n + 1), n + 1, 0, n + 4, n + 2, n + 5, n + 3]
    floats = tiles.permute(order).flatten().view(torch.float32)
    return floats.reshape(*outer, parts * depth * columns // 2)

"""Direct convolutions on the matrix unit; 1x1 filters see every pixel as a row of its own."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from ..core.algorithm import accumulation_error, split_error, storing_error
from ..core.cost import matrix_cycles, seconds
from ..core.isa import AMX, MatrixUnit
from ..core.problem import Problem
from ..core.schedule import Schedule, Space
from ..core.target import Target
from ..kernels.matrix import PARTS, joins_taps
from .common import CpuAlgorithm, cpu_f32_forward, streams
from .matrix import MatrixAlgorithm, is_pixelwise

LOW = (1, 2, 4, 7, 8, 14, 16, 28, 56)
BLOCKS = (1, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384)  # where each pixel is a row of its own
ROWS = tuple(sorted({*LOW, *BLOCKS}))
READ, PACK = 2.0, 6.0  # cycles to read a vector, and to split off and store a part of it
WRITE = 6.0  # and to read, finish and store a vector of sums
SIX = 1.1  # what six products should gain before they are planned
LARGE = 4 << 20  # bytes of a linear layer's weight
FAR = 9.0  # bytes a cycle that a core gets from the last cache


class CpuDirectMatrix(MatrixAlgorithm):
    """Packs padded rows of the input as parts, multiplies tiles of pixels and channels."""

    name = "cpu_direct"
    version = 3
    units = ("amx", "bfmmla", "dpbf16")
    by_strides = True
    fuses = CpuAlgorithm.fuses | {"pool2"}

    def kernel(self) -> Any:
        from ..kernels.cpu.matrix import direct

        return direct

    def reject(self, p: Problem, t: Target) -> list[str]:
        plain = p.with_(dtype="f32") if self.reads_bf16(p, t) else p
        reasons = cpu_f32_forward(plain, t, grid=True, pitch=True) + self.no_unit(t)
        if p.groups > 1:
            reasons.append(f"groups is {p.groups}, needs 1")
        if self.products == 6 and p.is_linear and p.weight_bytes >= LARGE:
            reasons.append(f"weight has {p.weight_bytes} bytes, needs fewer than {LARGE}: prepared "
                           "it would have half as many again")
        return reasons

    def reads_bf16(self, p: Problem, t: Target) -> bool:
        """Whether images are bfloat16s that the unit multiplies as they are."""
        return (p.dtype == "bf16" and self.products == 1 and t.device == "cpu"
                and t.row.reads_bf16)

    def error(self, p: Problem, t: Target, s: Schedule) -> float:
        terms = p.c * p.r * p.s
        return (accumulation_error(terms) + split_error(self.products, terms)
                + storing_error(p.dtype))

    def space(self, p: Problem, t: Target) -> Space:
        def legal(s: Any) -> bool:
            return ((s.vectors - 1) * t.lanes < p.k and s.block_rows in _heights(p)
                    and s.k_parts <= math.ceil(p.k / (t.lanes * s.vectors))
                    and not (s.streaming and p.k % t.lanes))

        widths = tuple(range(1, unit_of(t).most_columns + 1))
        return Space(legal, tile_w=pixels(unit_of(t)), vectors=widths, block_rows=ROWS,
                     k_parts=(1, 2, 4, 8), streaming=(False, True))

    def default(self, p: Problem, t: Target) -> Schedule:
        return _default(p, t.with_(threads=1), self.products)

    def prepare(self, p: Problem, t: Target, s: Schedule, weight: Any) -> Any:
        from ..kernels.cpu.prepare import direct_matrix

        return direct_matrix.prepare(*self.weight_of(p, s), t, weight, self.products)

    def prepared_floats(self, p: Problem, t: Target, s: Schedule) -> int:
        from ..kernels.cpu.prepare import direct_matrix

        return direct_matrix.floats(*self.weight_of(p, s), t, self.products)

    def prepare_into(self, p: Problem, t: Target, s: Schedule, weight: Any, whole: Any) -> None:
        from ..kernels.cpu.prepare import direct_matrix

        direct_matrix.prepare_into(*self.weight_of(p, s), t, weight, whole, self.products)

    def weight_of(self, p: Problem, s: Any) -> tuple[Problem, Schedule]:
        return p.weight, Schedule(vectors=s.vectors)

    def cost(self, p: Problem, t: Target, s: Any) -> float:
        return _cost(p, t, s, self.products)

    def _geometry(self, p: Problem, t: Target, s: Schedule) -> Any:
        return self.kernel().Geometry(self.seen_by_kernel(p), s, t.lanes, self.products,
                                      unit_of(t))


def unit_of(t: Target) -> MatrixUnit:
    """Of a target that has one."""
    return t.row.matrix or AMX


def pixels(unit: MatrixUnit) -> tuple[int, int]:
    """That are multiplied together: half of what the unit takes, and all."""
    whole = unit.rows * unit.most_rows
    return whole // 2, whole


def _heights(p: Problem) -> tuple[int, ...]:
    """Rows of a task: of any image, as one code is for all."""
    if is_pixelwise(p):
        return BLOCKS
    return tuple(rows for rows in LOW if rows % p.epilogue.pool == 0)  # windows lie in one task


def _likely_heights(p: Problem, unit: MatrixUnit) -> tuple[int, ...]:
    """Without what more than covers the image, or leaves half of the unit idle."""
    if not is_pixelwise(p):
        return tuple(rows for rows in _heights(p) if rows // 2 < p.conv_h)
    return tuple(rows for rows in BLOCKS if rows >= pixels(unit)[1] or rows >= p.n * p.h * p.w)


def _together(p: Problem, rows: int, unit: MatrixUnit) -> int:
    """Pixels of one multiply: half of what the unit takes, where a task has no more."""
    pitch = 1 if is_pixelwise(p) else p.conv_w + _beside(p, unit)
    return pixels(unit)[rows * pitch > pixels(unit)[0]]


def _beside(p: Problem, unit: MatrixUnit) -> int:
    """Pixels of a packed row beside those of the outputs."""
    return 0 if joins_taps(p, unit.depth) else (p.span_w - 1) // p.stride[1]


@lru_cache(maxsize=4096)
def _default(p: Problem, t: Target, products: int) -> Schedule:
    """The cheapest height of a block by the cost model; the same for every number of threads."""
    unit = unit_of(t)
    vectors = min(unit.most_columns, math.ceil(p.k / t.lanes))
    blocks, wide = math.ceil(p.k / (t.lanes * vectors)), t.with_(threads=4)
    found = [Schedule(tile_w=_together(p, rows, unit), vectors=vectors, block_rows=rows,
                      k_parts=parts, streaming=streams(p, t) and p.k % t.lanes == 0)
             for rows in _likely_heights(p, unit)
             for parts in (1, 2, 4, 8) if parts <= blocks]
    return min(found, key=lambda s: _cost(p, wide, s, products))


def _cost(p: Problem, t: Target, s: Any, products: int) -> float:
    """Packing, multiplying and writing, and the traffic of operands beyond the second cache."""
    if is_pixelwise(p):
        p = p.with_(n=1, h=max(1, p.n) * p.h * p.w, w=1)
    unit = unit_of(t)
    parts, chunks = PARTS[products], math.ceil(p.c / unit.depth)
    pitch, below = p.conv_w + _beside(p, unit), (p.span_h - 1) // p.stride[0]
    taps = 1 if joins_taps(p, unit.depth) else p.s  # of a row
    phases = min(p.stride[0], p.r) * min(p.stride[1], taps)
    row_blocks = math.ceil(p.conv_h / s.block_rows)
    rows = p.conv_h / row_blocks  # of a block, on average
    blocks, k_vectors = p.n * row_blocks, math.ceil(p.k / t.lanes)
    lines = phases * (rows + below) * pitch * chunks
    vectors = math.ceil(p.c * p.s // taps / t.lanes) / chunks  # of a line that are not zeros
    packing = blocks * s.k_parts * lines * (vectors * (READ + PACK * parts)
                                            + (unit.depth / t.lanes - vectors) * parts)
    groups = blocks * math.ceil(rows * pitch / s.tile_w)
    steps = chunks * p.r * taps
    product = (matrix_cycles(s.tile_w // unit.rows, s.vectors, steps, products, t)
               * k_vectors / s.vectors)
    writing = blocks * rows * p.conv_w * k_vectors * WRITE
    near = 4.0 * unit.line * parts * lines
    weights = 2.0 * parts * steps * unit.depth * k_vectors * t.lanes
    # read again and again in the same order, a little too much is soon all too much
    lost = min(1.0, max(0.0, 4 * near / t.l2 - 2))
    far = blocks * (weights + lost * near * k_vectors / s.vectors) / FAR
    cycles = packing + max(groups * product, far) + 0.3 * far + writing
    cycles *= SIX if products == 6 else 1.0
    return seconds(t, cycles, p.image_bytes, blocks * s.k_parts, weights=weights)

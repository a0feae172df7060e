"""Schedules of gradients of weights on the matrix unit, for every algorithm that offers them."""

from __future__ import annotations

import math
from typing import Any

from ..core.cost import matrix_cycles
from ..core.target import Target
from ..kernels.matrix import DEPTH
from .common import MATRIX_PARTS, MATRIX_SIDE

TILES = (32, 64, 96, 128, 192, 256)  # items that are summed in the unit
READ, PACK = 2.0, 2.0  # cycles to read a vector of items, and to split off and store a part of it
TURN = 100.0  # and to turn a tile
SUMS = 140.0  # and to wait for a tile of sums, beyond what any multiply does
# what products should gain before they are planned: when memory is slow they lose more
GAIN = {0: 1.0, 1: 1.5, 3: 1.1, 6: 1.6}


def legal(s: Any) -> bool:
    """Whether products are those of whole tiles."""
    return (s.tiles % DEPTH == 0 and s.rows == MATRIX_SIDE and s.vectors <= 2
            and s.unroll == 1)


def tile(t: Target, columns: int) -> dict[str, Any]:
    """Two by two tiles of the unit; two by one where the columns would not fill them."""
    vectors = math.ceil(columns / t.lanes)
    return {"rows": MATRIX_SIDE, "vectors": 1 if vectors in (1, 3, 5) else 2, "unroll": 1}


def block_cycles(s: Any, c: int, k: int, items: float) -> float:
    """A block of so many items at one position: packed, turned, multiplied."""
    parts, steps = MATRIX_PARTS[s.products], math.ceil(items / DEPTH)
    rows, columns = math.ceil(k / MATRIX_SIDE), c / MATRIX_SIDE
    packed = steps * DEPTH * (rows + columns) * (READ + PACK * parts)
    turned = steps * rows * parts * TURN
    high = min(2, rows)
    one = matrix_cycles(high, s.vectors, steps, s.products) + SUMS * high * s.vectors
    return packed + turned + one * columns / s.vectors * rows / high

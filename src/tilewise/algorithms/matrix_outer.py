"""Sums of outer products on the matrix unit: what both gradients of weights there share."""

from __future__ import annotations

import math
from typing import Any

from ..core.cost import matrix_cycles
from ..core.target import Target
from ..kernels.matrix import DEPTH, PARTS, SIDE

TILES = (32, 64, 96, 128, 192, 256)  # items that are summed in the unit
READ, PACK = 2.0, 2.0  # cycles to read a vector of items, and to split off and store a part of it
TURN = 100.0  # and to turn a tile
SUMS = 140.0  # and to wait for a tile of sums, beyond what any multiply does
# what products should gain before they are planned: when memory is slow they lose more
GAIN = {1: 1.5, 3: 1.1, 6: 1.15}


def width(t: Target, columns: int) -> int:
    """Vectors: two by two tiles of the unit; two by one where the columns would not fill them."""
    return 1 if math.ceil(columns / t.lanes) in (1, 3, 5) else 2


def block_cycles(products: int, s: Any, c: int, k: int, items: float) -> float:
    """A block of so many items at one position: packed, turned, multiplied."""
    parts, steps = PARTS[products], math.ceil(items / DEPTH)
    rows, columns = math.ceil(k / SIDE), c / SIDE
    packed = steps * DEPTH * (rows + columns) * (READ + PACK * parts)
    turned = steps * rows * parts * TURN
    high = min(2, rows)
    one = matrix_cycles(high, s.vectors, steps, products) + SUMS * high * s.vectors
    return packed + turned + one * columns / s.vectors * rows / high

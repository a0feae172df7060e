"""What estimates and kernels both have to know of the matrix unit."""

from __future__ import annotations

from ..core.isa import AMX
from ..core.problem import Problem

DEPTH = AMX.depth  # values along the reduction in one operation of tiles
SIDE = AMX.rows  # rows and columns of the sums of one operation
# (part of a, part of b) of the products that make one of float32, by their number; ordered so
# that one operand stays where it is from one to the next
PAIRS = {1: ((0, 0),), 3: ((0, 1), (0, 0), (1, 0)),
         6: ((0, 2), (0, 1), (1, 1), (1, 0), (0, 0), (2, 0))}
PARTS = {products: 1 + max(a for a, _ in pairs) for products, pairs in PAIRS.items()}


def joins_taps(p: Problem, depth: int = DEPTH) -> bool:
    """Whether a row of the filter, neighbours in memory, is reduced in one operation."""
    return p.s > 1 and p.dilation[1] == 1 and p.c * p.s <= depth

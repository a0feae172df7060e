"""Quotients of 16-bit sums: upper halves of products with reciprocals that are rounded up."""

from __future__ import annotations

WHOLE = 1 << 16
BYTE = 255


def reciprocal(count: int) -> int:
    """Times this, and without the lower 16 bits, a sum is divided."""
    return -(-WHOLE // count)


def is_exact(count: int) -> bool:
    """Whether the quotients of all sums of so many bytes are right, cut off to integers.

    A product is too large by `over` for each that is summed up, and must not reach a whole more.

    >>> [count for count in range(1, 32) if not is_exact(count)]
    [1, 17, 19, 23, 25, 26, 27, 28, 30, 31]
    """
    most = BYTE * count
    over = reciprocal(count) * count - WHOLE
    return count > 1 and most < WHOLE and most * over < WHOLE

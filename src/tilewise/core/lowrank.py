"""Kernels as sums of few products of a column and a row."""

from __future__ import annotations

from typing import Any

import numpy as np

from .lines import Lines

# a kernel has rank q if one of rank q is this close, in the Frobenius norm relative to its own:
# what rounding its entries to the type of the sums changes anyway
TOLERANCE = {"f32": 2.0 ** -23, "f64": 2.0 ** -51}


def rank_of(kernel: Any, work: str) -> int:
    """The rank within TOLERANCE, by singular values; that of a kernel of zeros is 1.

    >>> rank_of(np.outer([1, 2, 1], [1, 0, -1]), "f32")
    1
    """
    if isinstance(kernel, Lines):
        return 1
    if not np.isfinite(kernel).all():
        return int(min(kernel.shape))
    values = np.linalg.svd(scaled(kernel)[0], compute_uv=False)
    left = np.sqrt(np.cumsum(values[::-1] ** 2))[::-1]  # what is lost with this and all after it
    return max(1, int((left > TOLERANCE[work] * left[0]).sum()))


def scaled(kernel: Any) -> tuple[Any, int]:
    """The kernel with its largest entry between 1 and 2, and the power of two that makes it so.

    Squares and long sums of its entries then fit into a float, whatever the kernel's scale.
    """
    exponent = int(np.frexp(np.abs(kernel).max())[1]) - 1
    return np.ldexp(np.asarray(kernel, np.float64), -exponent), exponent


def factors(kernel: Any, rank: int) -> tuple[Any, Any]:
    """Columns (r, rank) and rows (rank, s) whose product is the kernel, within rounding.

    Crosses through the largest entry left, not singular vectors: those of integers stay integers
    more often, and zeros stay zeros.
    """
    if isinstance(kernel, Lines):
        return kernel.down[:, None], kernel.across[None]
    rest = np.array(kernel, np.float64)
    columns, rows = [], []
    for _ in range(rank):
        i, j = np.unravel_index(np.abs(rest).argmax(), rest.shape)
        pivot = rest[i, j] or 1.0
        columns.append(rest[:, j] / pivot)
        rows.append(rest[i].copy())
        rest -= np.outer(columns[-1], rows[-1])
    return np.stack(columns, axis=1), np.stack(rows)

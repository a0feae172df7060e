"""Cutting an axis of any length into pieces of a few sizes that code was written for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

LATENCY = 8  # accumulators below which a piece takes no less time
START = 2  # what a piece costs besides, in the same unit


def piece_sizes(limit: int) -> tuple[int, ...]:
    """The sizes of pieces whose largest is `limit`: a half, a quarter, and one for tiny axes."""
    return tuple(sorted({limit, -(-limit // 2), -(-limit // 4), 1}, reverse=True))


@lru_cache(maxsize=4096)
def counts(length: int, limit: int, vectors: int = 1) -> tuple[int, ...]:
    """How many pieces of each size cover an axis at the least cost, the largest size first.

    Pieces follow each other; one that would go beyond the end is moved back to end there, so that
    none may be longer than the axis. `vectors` are the accumulators of a piece of size one.
    """
    sizes = piece_sizes(limit)
    usable = tuple(size for size in sizes if size <= length)
    whole = max(0, length // usable[0] - 1)  # the end is what can be cut in different ways
    found = list(_covers(usable, vectors)[length - whole * usable[0]])
    found[0] += whole
    return (0,) * (len(sizes) - len(usable)) + tuple(found)


@lru_cache(maxsize=256)
def _covers(sizes: tuple[int, ...], vectors: int) -> list[tuple[int, ...]]:
    """The cheapest covers of all lengths below twice the largest size."""
    best: list[tuple[int, tuple[int, ...]]] = [(0, (0,) * len(sizes))]
    for length in range(1, 2 * sizes[0]):
        options = []
        for i, size in enumerate(sizes):
            cost, used = best[max(0, length - size)]
            more = tuple(count + (j == i) for j, count in enumerate(used))
            options.append((cost + max(size * vectors, LATENCY) + START, more))
        best.append(min(options, key=lambda option: (option[0], option[1][::-1])))
    return [used for _, used in best]


def fitted(length: Any, sizes: Sequence[int], where: Any = None) -> list[Any]:
    """The same for a length that is known only when code runs: quickly found, not the cheapest.

    Of a number, or of a value of generated code; `where(flag, n)` is n if the flag holds, else 0.
    """
    where = where or (lambda enough, n: n if enough else 0)
    rest, found = length, []
    for size in sizes:
        # what more than half a piece would cover is covered by one that is moved back
        count = where(length >= size, (rest + (size - 1 - size // 2)) // size)
        rest = rest - count * size
        rest = where(rest >= 0, rest)
        found.append(count)
    return found

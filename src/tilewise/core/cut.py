"""Cutting an axis of any length into pieces of a few sizes that code was written for."""

from __future__ import annotations

from functools import lru_cache

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
    whole = max(0, length // limit - 1)  # the end is what can be cut in different ways
    found = list(_best(length - whole * limit, sizes, vectors))
    found[0] += whole
    return tuple(found)


def _best(length: int, sizes: tuple[int, ...], vectors: int) -> tuple[int, ...]:
    """The cheapest cover of a length below twice the largest size."""
    usable = [i for i, size in enumerate(sizes) if size <= length]
    none = (0,) * len(sizes)
    best: list[tuple[int, tuple[int, ...]]] = [(0, none)]
    for covered in range(1, length + 1):
        options = []
        for i in usable:
            cost, used = best[max(0, covered - sizes[i])]
            more = tuple(count + (j == i) for j, count in enumerate(used))
            options.append((cost + max(sizes[i] * vectors, LATENCY) + START, more))
        best.append(min(options, key=lambda option: (option[0], option[1][::-1])))
    return best[length][1]

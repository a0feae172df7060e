"""Where values lie that live for a while only: places in one memory, used again and again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

LINE = 256  # bytes that places are multiples of: no two values share a cache line


class Stay(NamedTuple):
    """A value of so many bytes that is used from one step to another, both included."""

    bytes: int
    first: int
    last: int


def placed(stays: Sequence[Stay]) -> tuple[list[int], int]:
    """A place for each such that none overlap while both are used; and the bytes in all.

    The largest first, each as low as it fits.
    """
    places = [0] * len(stays)
    done: list[int] = []
    for i in sorted(range(len(stays)), key=lambda i: -stays[i].bytes):
        taken = sorted((places[j], places[j] + _rounded(stays[j].bytes)) for j in done
                       if stays[j].first <= stays[i].last and stays[i].first <= stays[j].last)
        places[i] = _lowest(taken, _rounded(stays[i].bytes))
        done.append(i)
    return places, max((place + _rounded(stay.bytes) for place, stay in zip(places, stays)),
                       default=0)


def _lowest(taken: Iterable[tuple[int, int]], size: int) -> int:
    at = 0
    for start, end in taken:
        if at + size <= start:
            break
        at = max(at, end)
    return at


def _rounded(size: int) -> int:
    return -(-size // LINE) * LINE

"""Turning vectors of pixels into vectors of channels inside registers."""

from __future__ import annotations

from collections.abc import Callable

from .function import Function
from .values import Vector


def transpose(f: Function, planes: list[Vector]) -> list[Vector]:
    """Planes of pixels to pixels of channels: out, laid end to end, is [pixel][channel].

    The planes are filled up to a power of two. Each stage is a perfect shuffle of the whole,
    which rotates the bits of every element's index by one.
    """
    count = 1 << (len(planes) - 1).bit_length()
    vectors = planes + [f.vector(0.0)] * (count - len(planes))
    for _ in range(count.bit_length() - 1):
        vectors = _perfect_shuffle(vectors)
    return vectors


def _perfect_shuffle(vectors: list[Vector]) -> list[Vector]:
    half, lanes = len(vectors) // 2, vectors[0].lanes
    zipped = [lane for pair in zip(range(lanes), range(lanes, 2 * lanes), strict=True)
              for lane in pair]
    out = []
    for low, high in zip(vectors[:half], vectors[half:], strict=True):
        out += [low.shuffle(high, zipped[:lanes]), low.shuffle(high, zipped[lanes:])]
    return out


def interleave(vectors: list[Vector]) -> list[Vector]:
    """As many vectors that, laid end to end, are [lane][vector]."""
    count = len(vectors)
    return _mixed(vectors, lambda place: divmod(place, count))


def separate(vectors: list[Vector]) -> list[Vector]:
    """What `interleave` makes, taken apart again."""
    count, lanes = len(vectors), vectors[0].lanes

    def source(place: int) -> tuple[int, int]:
        vector, lane = divmod(place, lanes)
        old, at = divmod(lane * count + vector, lanes)
        return at, old

    return _mixed(vectors, source)


def _mixed(vectors: list[Vector], source: Callable[[int], tuple[int, int]]) -> list[Vector]:
    """As many vectors; source(place) is the lane, and the vector, that comes to a place."""
    lanes, out = vectors[0].lanes, []
    for first in range(0, len(vectors) * lanes, lanes):
        wanted = [source(first + i) for i in range(lanes)]
        sources = sorted({vector for _, vector in wanted})
        mixed = vectors[sources[0]]
        mixed = mixed.shuffle(mixed, [lane if vector == sources[0] else 0
                                      for lane, vector in wanted])
        for new in sources[1:]:
            mixed = mixed.shuffle(vectors[new], [lanes + lane if vector == new else i
                                                 for i, (lane, vector) in enumerate(wanted)])
        out.append(mixed)
    return out

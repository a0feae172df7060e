"""Networks of least and largest that find one of many values in order; docs/images.md derives them.

Values are whatever `least` and `largest` take: numbers in a test, vectors in generated code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple


class Pick(NamedTuple):
    """The two operations that networks are made of."""

    least: Callable[[Any, Any], Any]
    largest: Callable[[Any, Any], Any]


NUMBERS = Pick(min, max)


def merged(a: Sequence[Any], b: Sequence[Any], pick: Pick) -> list[Any]:
    """Two sorted lists as one, by Batcher's network.

    >>> merged([1, 4, 6], [2, 3], NUMBERS)
    [1, 2, 3, 4, 6]
    """
    if not a or not b:
        return [*a, *b]
    if len(a) == len(b) == 1:
        return [pick.least(a[0], b[0]), pick.largest(a[0], b[0])]
    first, *high = merged(a[::2], b[::2], pick)
    low = merged(a[1::2], b[1::2], pick)
    paired = [one for x, y in zip(low, high)
              for one in (pick.least(x, y), pick.largest(x, y))]
    both = min(len(low), len(high))
    return [first, *paired, *low[both:], *high[both:]]


def sorted_(values: Sequence[Any], pick: Pick) -> list[Any]:
    """By merging halves."""
    if len(values) < 2:
        return list(values)
    half = len(values) // 2
    return merged(sorted_(values[:half], pick), sorted_(values[half:], pick), pick)


def sorted_windows(values: Sequence[Any], size: int, pick: Pick) -> list[list[Any]]:
    """Every `size` neighbours, sorted; what windows have in common is sorted once.

    >>> sorted_windows([3, 1, 2, 0], 3, NUMBERS)
    [[1, 2, 3], [0, 1, 2]]
    """
    def windows(first: int, count: int, common: list[Any]) -> list[list[Any]]:
        if count == 1:
            return [common]
        half = count // 2
        above = sorted_(values[first + half - 1:first + count - 1], pick)
        below = sorted_(values[first + size:first + size + half], pick)
        return (windows(first, half, merged(above, common, pick))
                + windows(first + half, count - half, merged(common, below, pick)))

    count = len(values) - size + 1
    if count > size:  # the halves have nothing in common
        half = count // 2
        return (sorted_windows(values[:half + size - 1], size, pick)
                + sorted_windows(values[half:], size, pick))
    return windows(0, count, sorted_(values[count - 1:size], pick))


def candidates(length: int, total: int, order: int) -> slice:
    """Of a sorted list among `total` values, those that can be the `order`-th of all.

    >>> candidates(5, 9, 4), candidates(6, 9, 4)
    (slice(0, 5, None), slice(1, 5, None))
    """
    return slice(max(0, length - (total - order)), min(length, order + 1))


def of_grid(columns: Sequence[Sequence[Any]], order: int, pick: Pick) -> Any:
    """The `order`-th of all values of sorted columns that are equally long.

    Sorting across leaves columns sorted. A value is then above all that lie higher and further
    left, and below all that lie lower and further right. Few of them can be the one.

    >>> of_grid([[2, 7, 9], [1, 5, 8], [3, 4, 6]], 4, NUMBERS)
    5
    """
    high, wide = len(columns[0]), len(columns)
    total, kept, dropped = high * wide, [], 0
    for i, line in enumerate(zip(*columns)):
        below = max(0, wide - (total - order) // (high - i))  # more than enough are above these
        kept.append(sorted_(line, pick)[below:(order + 1) // (i + 1)])
        dropped += below
    return selected(kept, order - dropped, pick)


def selected(lists: Sequence[Sequence[Any]], order: int, pick: Pick) -> Any:
    """The `order`-th, from 0, of all values of some sorted lists.

    >>> selected([[2, 7, 9], [1, 5, 8], [3, 4, 6]], 4, NUMBERS)
    5
    """
    rest = [list(one) for one in lists]
    while True:
        for i, one in enumerate(rest):
            kept = candidates(len(one), sum(map(len, rest)), order)
            rest[i], order = one[kept], order - kept.start
        rest = sorted(filter(None, rest), key=len)
        if len(rest) <= 2:
            return _of_two(rest[0], rest[1] if len(rest) > 1 else [], order, pick)
        rest = [merged(rest[0], rest[1], pick), *rest[2:]]


def _of_two(a: list[Any], b: list[Any], order: int, pick: Pick) -> Any:
    """The least of what is larger than `order` values: so many of one list, the rest of the other.
    """
    found = []
    for of_a in range(order + 2):
        of_b = order + 1 - of_a
        if of_a <= len(a) and of_b <= len(b):
            ends = [one[count - 1] for one, count in ((a, of_a), (b, of_b)) if count]
            found.append(reduce(pick.largest, ends))
    return reduce(pick.least, found)

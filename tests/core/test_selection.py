"""Networks of least and largest find the right value: by the zero-one principle, for all inputs."""

from __future__ import annotations

from itertools import product

import pytest

from tilewise.core.selection import (
    NUMBERS,
    Pick,
    candidates,
    merged,
    of_grid,
    selected,
    sorted_,
    sorted_windows,
)

LISTS = [(1,), (5,), (3, 3, 3), (2, 2), (4, 3, 1), (1, 1, 1, 1, 1), (5, 5), (2, 4, 2, 3)]


def zeros_then_ones(length: int) -> list[list[int]]:
    """All sorted lists of zeros and ones."""
    return [[0] * (length - ones) + [1] * ones for ones in range(length + 1)]


@pytest.mark.parametrize("a", range(8))
@pytest.mark.parametrize("b", range(8))
def test_merged(a, b):
    for x, y in product(zeros_then_ones(a), zeros_then_ones(b)):
        assert merged(x, y, NUMBERS) == sorted(x + y)


@pytest.mark.parametrize("length", range(10))
def test_sorted(length):
    for values in product((0, 1), repeat=length):
        assert sorted_(values, NUMBERS) == sorted(values)


@pytest.mark.parametrize("size, count", [(1, 1), (1, 4), (3, 2), (5, 2), (5, 4), (2, 5), (7, 3)])
def test_windows(size, count):
    for values in product((0, 1), repeat=size + count - 1):
        assert sorted_windows(values, size, NUMBERS) == [
            sorted(values[i:i + size]) for i in range(count)]


@pytest.mark.parametrize("lengths", LISTS, ids=str)
def test_selected(lengths):
    for lists in product(*map(zeros_then_ones, lengths)):
        together = sorted(value for one in lists for value in one)
        for order, value in enumerate(together):
            assert selected(lists, order, NUMBERS) == value
            if len({*lengths}) == 1:
                assert of_grid(lists, order, NUMBERS) == value


def test_no_candidate_is_dropped_that_can_be_the_one():
    for length, others in product(range(1, 6), range(4)):
        total = length + others
        for order in range(total):
            # a value can be the one if what surely lies below and above it leaves room
            able = [i for i in range(length) if i <= order and length - 1 - i < total - order]
            assert list(range(length))[candidates(length, total, order)] == able


def test_a_median_of_nine_takes_few_operations():
    """Of a 3x3 median, columns sorted; those whose results nobody uses are not emitted."""

    def named(what: str):
        def operation(a, b):
            name = f"{what}({a[0]},{b[0]})"
            return name, {name} | a[1] | b[1]
        return operation

    pick = Pick(named("least"), named("largest"))
    columns = [[(f"x{i}{j}", set()) for i in range(3)] for j in range(3)]
    used = of_grid(columns, 4, pick)[1]
    assert len(used) == 14

"""Winograd transforms: exact in rationals, shared work kept, rounding within its bound."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.kernels.winograd_math import (
    POINTS,
    Matrix,
    Op,
    Program,
    Transform,
    error_growth,
    matrices,
    straight_line,
    transpose,
)

EPS32 = 2.0**-24
EVERY = [*itertools.product(range(1, 7), range(1, 8))]
NESTED = [*itertools.product(range(2, 7), range(2, 8))]
Vector = Sequence[Fraction]
Array = npt.NDArray[Any]


def unit(size: int, one: int) -> list[Fraction]:
    return [Fraction(i == one) for i in range(size)]


def apply(matrix: Matrix, vector: Vector) -> list[Fraction]:
    return [sum((c * x for c, x in zip(row, vector)), Fraction(0)) for row in matrix]


def correlate(data: Vector, taps: Vector) -> list[Fraction]:
    outputs = range(len(data) - len(taps) + 1)
    return [sum((data[i + j] * tap for j, tap in enumerate(taps)), Fraction(0)) for i in outputs]


def forward(t: Transform, data: Vector, taps: Vector) -> list[Fraction]:
    return apply(t.AT, [a * b for a, b in zip(apply(t.G, taps), apply(t.BT, data))])


def filter_gradient(t: Transform, data: Vector, dy: Vector) -> list[Fraction]:
    products = zip(apply(t.BT, data), apply(transpose(t.AT), dy))
    return apply(transpose(t.G), [a * b for a, b in products])


def is_correlation(t: Transform) -> bool:
    """Both sides are linear in data and in taps, so agreeing on all units is a proof."""
    units = itertools.product(range(t.n), range(t.r))
    pairs = ((unit(t.n, k), unit(t.r, j)) for k, j in units)
    return all(forward(t, data, taps) == correlate(data, taps) for data, taps in pairs)


def six_matrices(t: Transform) -> list[Matrix]:
    return [t.AT, t.G, t.BT, transpose(t.AT), transpose(t.G), transpose(t.BT)]


@pytest.mark.parametrize("m, r", EVERY)
def test_forward_is_the_correlation(m: int, r: int) -> None:
    t = matrices(m, r)
    assert (len(t.AT), len(t.G), len(t.BT)) == (m, t.n, t.n)
    assert is_correlation(t)


@pytest.mark.parametrize("m, r", EVERY)
def test_transposed_products_are_the_filter_gradient(m: int, r: int) -> None:
    t = matrices(m, r)
    for k, i in itertools.product(range(t.n), range(m)):
        data, dy = unit(t.n, k), unit(m, i)
        assert filter_gradient(t, data, dy) == correlate(data, dy)


@pytest.mark.parametrize("name", ["AT", "G", "BT"])
def test_any_wrong_coefficient_breaks_the_correlation(name: str) -> None:
    t = matrices(4, 3)
    matrix = getattr(t, name)
    for i, j in itertools.product(range(len(matrix)), range(len(matrix[0]))):
        wrong = [list(row) for row in matrix]
        wrong[i][j] += Fraction(1, 1 << 20)
        assert not is_correlation(dataclasses.replace(t, **{name: tuple(map(tuple, wrong))}))


def test_points() -> None:
    assert matrices(4, 3).points == tuple(Fraction(p, 4) for p in (0, 3, -3, 6, -6))
    assert matrices(2, 3).points == (0, 1, -1)
    assert all({-p for p in points} == set(points) for points in POINTS.values())


def test_given_points_are_used() -> None:
    t = matrices(3, 3, (Fraction(0), Fraction(1), Fraction(-1), Fraction(2)))
    assert t.AT[1] == (0, 1, -1, 2, 0)
    assert all(map(is_correlation, [t, matrices(1, 3, (Fraction(0), Fraction(1)))]))


@pytest.mark.parametrize("m, r, points", [(0, 3, None), (2, 0, None), (9, 9, None), (2, 2, (0, 0))])
def test_what_has_no_transform_is_refused(m: int, r: int, points: Any) -> None:
    with pytest.raises(ValueError, match=rf"F\({m}, {r}\) needs"):
        matrices(m, r, points)


class Exact:
    """Arithmetic by operators, exact on rationals."""

    add, sub, neg, scale = operator.add, operator.sub, operator.neg, operator.mul

    def zero(self) -> Any:
        return Fraction(0)

    def fma(self, a: Any, c: Any, b: Any) -> Any:
        return a * c + b


def product_of(program: Program) -> Matrix:
    """The matrix a program multiplies by; programs are linear, so units show all of it."""
    units = [unit(program.inputs, i) for i in range(program.inputs)]
    return transpose(tuple(tuple(program.run(u, Exact(), constant=Fraction)) for u in units))


@pytest.mark.parametrize("m, r", EVERY)
def test_programs_are_their_matrices(m: int, r: int) -> None:
    for matrix in six_matrices(matrices(m, r)):
        assert product_of(straight_line(matrix)) == matrix


def test_constants_are_floats_unless_told() -> None:
    assert straight_line(((Fraction(1, 3),),)).run([2.0], Exact()) == [2.0 * (1 / 3)]


rows_of_four = st.lists(st.sampled_from([0, 0, 1, -1, 2, -2, 3]), min_size=4, max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.lists(rows_of_four, min_size=1, max_size=6))
def test_any_matrix_has_a_program(rows: list[list[int]]) -> None:
    matrix = tuple(tuple(Fraction(c) for c in row) for row in rows)
    for form in (matrix, transpose(matrix)):
        program = straight_line(form)
        assert product_of(program) == form
        assert program.adds + program.muls <= sum(bool(c) for row in form for c in row)


# Operations of BT and of AT; dot products alone would take F(4, 3) 16 each.
COUNTS = {(2, 2): (3, 3), (2, 3): (4, 4), (3, 3): (10, 9), (4, 3): (12, 12), (6, 3): (24, 20)}


@pytest.mark.parametrize("m, r", COUNTS)
def test_sharing_has_not_vanished(m: int, r: int) -> None:
    for matrix, most in zip((matrices(m, r).BT, matrices(m, r).AT), COUNTS[m, r]):
        program = straight_line(matrix)
        assert program.adds + program.muls == len(program.ops) <= most


@pytest.mark.parametrize("m, r", [(m, r) for m, r in NESTED if m > 3 and r > 2])
def test_sharing_saves_work_in_large_transforms(m: int, r: int) -> None:
    for matrix in (matrices(m, r).BT, matrices(m, r).AT):
        plain = sum(sum(c != 0 for c in row) - any(abs(c) == 1 for c in row) for row in matrix)
        assert len(straight_line(matrix).ops) < 0.85 * plain


def test_few_values_are_live() -> None:
    for m, of_input, of_output in [(4, 5, 5), (6, 8, 7)]:
        assert straight_line(matrices(m, 3).BT).max_live <= of_input
        assert straight_line(matrices(m, 3).AT).max_live <= of_output


def test_live_values_are_counted() -> None:
    def add(*operands: int) -> Op:
        return Op("add", operands, Fraction(0))

    chain = Program(3, (add(0, 1), add(3, 2)), (4,))
    assert chain.max_live == 2  # each argument is read when needed, the sum replaces one
    fork = Program(2, (add(0, 1), add(0, 2), add(1, 3)), (2, 3, 4))
    assert fork.max_live == 3  # both arguments outlive the first sum
    assert straight_line(matrices(3, 1).BT).max_live == 0


def test_outputs_stream_when_known_and_arguments_are_read_once() -> None:
    reads: list[int] = []

    class Arguments(list[Fraction]):
        def __getitem__(self, index: Any) -> Any:
            reads.append(index)
            return super().__getitem__(index)

    outputs = straight_line(matrices(6, 3).BT).stream(Arguments(unit(8, 0)), Exact(), Fraction)
    seen = [len(reads) for _ in outputs]
    assert sorted(reads) == list(range(8))
    assert seen[0] < 8 == len(seen)


class Rounded(Exact):
    """Float32 arrays, with every operation rounded once as the hardware does."""

    def fma(self, a: Array, c: Any, b: Array) -> Array:
        return (a.astype(np.float64) * np.float64(c) + b).astype(np.float32)


def transform(row: Matrix, column: Matrix, x: Array) -> Array:
    """Both passes over the two leading axes, in float32."""
    half = np.stack(straight_line(row).run(list(x), Rounded(), np.float32))
    whole = np.stack(straight_line(column).run(list(half.swapaxes(0, 1)), Rounded(), np.float32))
    return whole.swapaxes(0, 1)


def rounded_weights(row: Matrix, column: Matrix, x: Array) -> Array:
    left, right = np.array(row, float), np.array(column, float)
    return np.einsum("ia,jb,ab...->ij...", left, right, x).astype(np.float32)


def accumulate(left: Array, right: Array) -> Array:
    """Sum over the third axis of the outer products of the fourth, one fused step at a time."""
    total = np.zeros((*left.shape[:2], left.shape[3], right.shape[3]), np.float32)
    for a, b in zip(np.moveaxis(left, 2, 0).astype(float), np.moveaxis(right, 2, 0)):
        total = (total + a[..., None] * b[:, :, None]).astype(np.float32)
    return total


def relative_rms(found: Array, exact: Array) -> float:
    return float(np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)))


def sample(row: Transform, column: Transform, channels: int, relu: bool) -> tuple[Array, Array]:
    rng = np.random.default_rng(channels)
    data = rng.standard_normal((row.n, column.n, channels, 8)).astype(np.float32)
    taps = rng.standard_normal((row.r, column.r, channels, 8)).astype(np.float32)
    return (np.maximum(data, 0) if relu else data), taps


def measured(row: Transform, column: Transform, channels: int, relu: bool = False) -> float:
    """Relative rms error of float32 tiles against a direct sum in float64."""
    data, taps = sample(row, column, channels, relu)
    inputs = transform(row.BT, column.BT, data)
    products = accumulate(inputs, rounded_weights(row.G, column.G, taps))
    windows = np.lib.stride_tricks.sliding_window_view(data, (row.m, column.m), (0, 1))
    exact = np.tensordot(windows.astype(float), taps.astype(float), ((0, 1, 2), (0, 1, 2)))
    return relative_rms(transform(row.AT, column.AT, products), exact.transpose(1, 2, 0, 3))


def bound(row: Transform, column: Transform, channels: int) -> float:
    return error_growth(row, column) * EPS32 * (2 + math.sqrt(channels))


@pytest.mark.parametrize("channels", [1, 16, 256])
@pytest.mark.parametrize("m, r", NESTED)
def test_error_stays_within_its_bound(m: int, r: int, channels: int) -> None:
    t = matrices(m, r)
    error, most = measured(t, t, channels), bound(t, t, channels)
    assert most / 6 < error < most / 1.7
    assert measured(t, t, channels, relu=True) < most / 1.7


@pytest.mark.parametrize("channels", [1, 16, 256])
@pytest.mark.parametrize("m, r", NESTED)
def test_error_of_one_dimensional_filters(m: int, r: int, channels: int) -> None:
    t = matrices(m, r)
    for row, column in [(t, matrices(1, 1)), (matrices(2, 1), t)]:
        errors = [measured(row, column, channels, relu) for relu in (False, True)]
        assert max(errors) < bound(row, column, channels) / 1.5


@pytest.mark.parametrize("m, r", [(2, 3), (4, 3), (3, 5), (6, 3), (2, 7)])
def test_error_of_the_filter_gradient(m: int, r: int) -> None:
    t, tiles, rng = matrices(m, r), 100, np.random.default_rng(0)
    data = rng.standard_normal((t.n, t.n, tiles, 8)).astype(np.float32)
    dy = rng.standard_normal((m, m, tiles, 8)).astype(np.float32)
    A, GT = transpose(t.AT), transpose(t.G)
    products = accumulate(transform(t.BT, t.BT, data), transform(A, A, dy))
    windows = np.lib.stride_tricks.sliding_window_view(data, (r, r), (0, 1)).astype(float)
    exact = np.tensordot(windows, dy.astype(float), ((0, 1, 2), (0, 1, 2))).transpose(1, 2, 0, 3)
    error = relative_rms(transform(GT, GT, products), exact)
    assert bound(t, t, tiles) / 6 < error < bound(t, t, tiles) / 1.7


def test_error_growth_of_the_chosen_points() -> None:
    assert error_growth(matrices(1, 5), matrices(4, 1)) == 1
    most = {2: 1.2, 3: 1.7, 4: 2.7, 5: 5.2, 6: 10.2, 7: 19.2, 8: 47.2, 9: 102.4, 10: 270, 11: 553}
    for count in POINTS:
        t = matrices(count // 2 + 1, (count + 1) // 2 + 1)
        assert error_growth(t, t) < most[count]


def test_points_of_f43_are_worth_it() -> None:
    integers = matrices(4, 3, tuple(map(Fraction, (0, 1, -1, 2, -2))))
    error = measured(matrices(4, 3), matrices(4, 3), 64)
    assert error < 1.2e-6
    assert measured(integers, integers, 64) > 1.6 * error

"""Winograd transforms in exact rationals, and the straight-line code that applies them.

F(m, r) computes m outputs of an r-tap correlation, ``y[i] = sum_j d[i + j] * g[j]``, with
n = m + r - 1 products: ``y = AT @ ((G @ g) * (BT @ d))``.  Nesting two of them gives 2-D.
The transposed form gives the filter gradient: ``dg = G.T @ ((BT @ d) * (AT.T @ dy))``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Literal, Protocol, TypeVar

Row = tuple[Fraction, ...]
Matrix = tuple[Row, ...]
Terms = list[tuple[int, Fraction]]
Kind = Literal["zero", "add", "sub", "neg", "scale", "fma"]
V = TypeVar("V")

ZERO, ONE = Fraction(0), Fraction(1)


def _points(*magnitudes: str) -> Row:
    """Both signs of every magnitude, once for zero."""
    both = [sign * Fraction(text) for text in magnitudes for sign in (1, -1)]
    return tuple(dict.fromkeys(both))


POINTS: dict[int, Row] = {
    2: _points("5/8"),
    3: _points("0", "1"),
    4: _points("3/8", "5/4"),
    5: _points("0", "3/4", "3/2"),
    6: _points("1/4", "3/4", "7/4"),
    7: _points("0", "1/2", "1", "2"),
    8: _points("1/4", "5/8", "5/4", "2"),
    9: _points("0", "3/8", "3/4", "5/4", "5/2"),
    10: _points("1/4", "1/2", "1", "4/3", "5/2"),
    11: _points("0", "3/8", "2/3", "1", "3/2", "3"),
}


@dataclass(frozen=True)
class Transform:
    """The matrices of F(m, r): AT is m x n, G is n x r, BT is n x n."""

    m: int
    r: int
    points: Row
    AT: Matrix
    G: Matrix
    BT: Matrix

    @property
    def n(self) -> int:
        """Products per tile, which is also the width of the input tile."""
        return self.m + self.r - 1


@lru_cache(maxsize=None)
def matrices(m: int, r: int, points: Row | None = None) -> Transform:
    """The transform F(m, r) at the given finite points, or at the most accurate known."""
    if m < 1 or r < 1:
        raise ValueError(f"F({m}, {r}) has no outputs or no taps")
    if points is None and 1 in (m, r):
        return _pointwise(m, r)
    chosen = _default_points(m, r) if points is None else tuple(map(Fraction, points))
    if len(set(chosen)) != m + r - 2 or len(chosen) != m + r - 2:
        raise ValueError(f"F({m}, {r}) needs {m + r - 2} distinct finite points, got {chosen}")
    return _cook_toom(m, r, chosen)


def _default_points(m: int, r: int) -> Row:
    if m + r - 2 not in POINTS:
        raise ValueError(f"no interpolation points known for F({m}, {r})")
    return POINTS[m + r - 2]


def _pointwise(m: int, r: int) -> Transform:
    """One tap or one output takes max(m, r) products already, so nothing is transformed."""
    n = max(m, r)
    identity = tuple(tuple(Fraction(i == j) for j in range(n)) for i in range(n))
    AT = identity if r == 1 else ((ONE,) * n,)
    G = ((ONE,),) * n if r == 1 else identity
    return Transform(m, r, (), AT, G, identity)


def _cook_toom(m: int, r: int, points: Row) -> Transform:
    """Transposed polynomial product: evaluate at the points, transpose the interpolation."""
    n = m + r - 1
    # Monic rows put a coefficient of 1 in every row of BT; G, applied rarely, takes the rest.
    BT = [_monic(points[:i] + points[i + 1 :], n) for i in range(n - 1)] + [_monic(points, n)]
    weights = [math.prod((p - q for q in points if q != p), start=ONE) for p in points] + [ONE]
    G = [
        tuple(value / weight for value in row)
        for row, weight in zip(_vandermonde(points, r), weights, strict=True)
    ]
    return Transform(m, r, points, transpose(_vandermonde(points, m)), tuple(G), tuple(BT))


def _vandermonde(points: Row, width: int) -> Matrix:
    """Powers of every finite point, then infinity, which sees only the leading coefficient."""
    infinity = (ZERO,) * (width - 1) + (ONE,)
    return (*(tuple(p**k for k in range(width)) for p in points), infinity)


def _monic(roots: Row, width: int) -> Row:
    """Coefficients, constant first, of the monic polynomial with these roots."""
    coefficients = [ONE]
    for root in roots:
        shifted, scaled = [ZERO, *coefficients], [*coefficients, ZERO]
        coefficients = [a - root * b for a, b in zip(shifted, scaled, strict=True)]
    return (*coefficients, *(ZERO,) * (width - len(coefficients)))


def transpose(matrix: Matrix) -> Matrix:
    return tuple(zip(*matrix, strict=True))


def error_growth(row: Transform, column: Transform) -> float:
    return _amplification(row) * _amplification(column)


def _amplification(transform: Transform) -> float:
    """Rms over the outputs of the products' size, against that of the output itself."""
    sizes = [
        _square(weights) * _square(inputs)
        for weights, inputs in zip(transform.G, transform.BT, strict=True)
    ]
    reached = sum(c * c * size for out in transform.AT for c, size in zip(out, sizes, strict=True))
    return math.sqrt(reached / (transform.m * transform.r))


def _square(values: Row) -> Fraction:
    return sum((value * value for value in values), ZERO)


class Arithmetic(Protocol[V]):
    """What a program needs of its values: vectors of IR, source text, arrays, numbers."""

    def zero(self) -> V: ...
    def add(self, a: V, b: V, /) -> V: ...
    def sub(self, a: V, b: V, /) -> V: ...
    def neg(self, a: V, /) -> V: ...
    def scale(self, a: V, c: float, /) -> V: ...
    def fma(self, a: V, c: float, b: V, /) -> V: ...


@dataclass(frozen=True)
class Op:
    """One operation on numbered values; fma is ``operands[0] * constant + operands[1]``."""

    kind: Kind
    operands: tuple[int, ...] = ()
    constant: Fraction = ZERO


@dataclass(frozen=True)
class Program:
    """Straight-line code: values below ``inputs`` are arguments, op k makes value inputs + k."""

    inputs: int
    ops: tuple[Op, ...]
    outputs: tuple[int, ...]

    @property
    def adds(self) -> int:
        """Operations without a constant."""
        return sum(op.kind in ("add", "sub", "neg") for op in self.ops)

    @property
    def muls(self) -> int:
        """Operations with a constant; an fma counts one."""
        return sum(op.kind in ("scale", "fma") for op in self.ops)

    @cached_property
    def max_live(self) -> int:
        """Most values held at once: arguments from first to last use, outputs until stored."""
        last = {value: step for step, op in enumerate(self.ops) for value in op.operands}
        held: set[int] = set()
        most = 0
        for step, op in enumerate(self.ops):
            held.update(op.operands)
            most = max(most, len(held))
            held = {value for value in held if last[value] > step}
            most = max(most, len(held) + 1)
            held.update({self.inputs + step} & last.keys())
        return most

    def run(
        self, values: Sequence[V], ops: Arithmetic[V], constant: Callable[[Fraction], Any] = float
    ) -> list[V]:
        """Every output; ``constant`` turns an exact coefficient into what ``ops`` accepts."""
        found = dict(self.stream(values, ops, constant))
        return [found[row] for row in range(len(self.outputs))]

    def stream(
        self, values: Sequence[V], ops: Arithmetic[V], constant: Callable[[Fraction], Any] = float
    ) -> Iterator[tuple[int, V]]:
        """Outputs as (row, value) as soon as known; an argument is read once, at first use."""
        known: dict[int, V] = {}
        for step, op in enumerate(self.ops):
            known.update({i: values[i] for i in op.operands if i not in known})
            result = _apply(op, [known[i] for i in op.operands], ops, constant)
            known[self.inputs + step] = result
            yield from ((row, result) for row in self._rows_of(self.inputs + step))
        for index in range(self.inputs):
            for row in self._rows_of(index):
                yield row, known[index] if index in known else values[index]

    def _rows_of(self, value: int) -> list[int]:
        return [row for row, output in enumerate(self.outputs) if output == value]


def _apply(
    op: Op, operands: list[V], ops: Arithmetic[V], constant: Callable[[Fraction], Any]
) -> V:
    if op.kind == "fma":
        return ops.fma(operands[0], constant(op.constant), operands[1])
    if op.kind == "scale":
        return ops.scale(operands[0], constant(op.constant))
    method: Callable[..., V] = getattr(ops, op.kind)
    return method(*operands)


@lru_cache(maxsize=None)
def straight_line(matrix: Matrix) -> Program:
    """Code for ``matrix @ x``: the cheapest of sharing by columns, by rows, both or neither."""
    choices = [_compile(matrix, columns, rows) for columns in (False, True) for rows in (False, True)]
    return min(choices, key=lambda program: (len(program.ops), program.max_live))


def _compile(matrix: Matrix, by_columns: bool, by_rows: bool) -> Program:
    code = _Code(len(matrix[0]))
    values = list(range(len(matrix[0])))
    if by_columns:
        values, matrix = _fold_columns(code, matrix)
    rows = [[term for term in zip(values, row, strict=True) if term[1]] for row in matrix]
    outputs: dict[int, int] = {}
    for i, j in _mirrored(matrix) if by_rows else []:
        outputs[i], outputs[j] = code.pair(rows[i], dict(rows[j]))
    for i, row in enumerate(rows):
        outputs[i] = outputs[i] if i in outputs else code.dot(row)
    return _ordered(code, [outputs[i] for i in range(len(rows))])


def _mirrored(rows: Matrix) -> list[tuple[int, int]]:
    """Disjoint pairs of rows equal up to sign, but neither equal nor opposite."""
    pairs: list[tuple[int, int]] = []
    for i, j in itertools.combinations(range(len(rows)), 2):
        signs = {a == b for a, b in zip(rows[i], rows[j], strict=True) if a or b}
        same_size = [*map(abs, rows[i])] == [*map(abs, rows[j])]
        if same_size and len(signs) == 2 and not {i, j} & set(itertools.chain(*pairs)):
            pairs.append((i, j))
    return pairs


def _fold_columns(code: _Code, matrix: Matrix) -> tuple[list[int], Matrix]:
    """Replace mirrored columns by their sum and difference: each row then needs only one."""
    columns = dict(enumerate(transpose(matrix)))
    folded: dict[int, Row] = {}
    for i, j in _mirrored(transpose(matrix)):
        a, b = columns.pop(i), columns.pop(j)
        folded[code.add("add", i, j)] = tuple((x + y) / 2 for x, y in zip(a, b, strict=True))
        folded[code.add("sub", i, j)] = tuple((x - y) / 2 for x, y in zip(a, b, strict=True))
    columns |= folded
    return list(columns), transpose(tuple(columns.values()))


class _Code:
    """Operations under construction; equal operations are the same value."""

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self.ops: dict[Op, int] = {}

    def add(self, kind: Kind, *operands: int, constant: Fraction = ZERO) -> int:
        return self.ops.setdefault(Op(kind, operands, constant), self.inputs + len(self.ops))

    def dot(self, terms: Terms) -> int:
        """A chain that starts, where possible, from a term that needs no multiplication."""
        if not terms:
            return self.add("zero")
        # A plain term is free to start from, a scaled one costs what it would cost later.
        start = min(terms, key=lambda term: (term[1] != 1, term[1] == -1))
        total = self._times(*start)
        for value, factor in terms:
            if value != start[0]:
                total = self._plus(total, value, factor)
        return total

    def pair(self, row: Terms, mirror: dict[int, Fraction]) -> tuple[int, int]:
        """E + O and E - O, with E and O divided so that they need no multiplication to start."""
        halves = []
        for same in (True, False):
            terms = [(v, c) for v, c in row if (mirror[v] == c) == same]
            units = [c for _, c in terms if abs(c) == 1]
            factor = max(units, default=terms[-1][1])
            halves.append((self.dot([(v, c / factor) for v, c in terms]), factor))
        even, (odd, factor) = halves
        return self.dot([even, (odd, factor)]), self.dot([even, (odd, -factor)])

    def missing(self, value: int, done: list[int]) -> list[int]:
        """Values still to be computed before this one and itself, in a possible order."""
        if value < self.inputs or value in done:
            return []
        order: list[int] = []
        for operand in list(self.ops)[value - self.inputs].operands:
            order += self.missing(operand, done + order)
        return [*order, value]

    def _times(self, value: int, factor: Fraction) -> int:
        if abs(factor) == 1:
            return value if factor == 1 else self.add("neg", value)
        return self.add("scale", value, constant=factor)

    def _plus(self, total: int, value: int, factor: Fraction) -> int:
        if abs(factor) == 1:
            return self.add("add" if factor == 1 else "sub", total, value)
        return self.add("fma", value, total, constant=factor)


def _ordered(code: _Code, outputs: list[int]) -> Program:
    """Of the greedy orders from every first output, the one that holds the fewest values."""
    orders = [_renumbered(code, outputs, first) for first in dict.fromkeys(outputs)]
    return min(orders, key=lambda program: program.max_live)


def _renumbered(code: _Code, outputs: list[int], first: int) -> Program:
    order = _schedule(code, outputs, first)
    number = {value: code.inputs + step for step, value in enumerate(order)}
    number |= {value: value for value in range(code.inputs)}
    made = list(code.ops)
    ops = [made[value - code.inputs] for value in order]
    renamed = [Op(op.kind, tuple(number[v] for v in op.operands), op.constant) for op in ops]
    return Program(code.inputs, tuple(renamed), tuple(number[value] for value in outputs))


def _schedule(code: _Code, outputs: list[int], first: int) -> list[int]:
    """Operations in the order that next finishes whichever output lacks the fewest."""
    order = code.missing(first, [])
    waiting = list(outputs)
    while waiting:
        waiting.sort(key=lambda output: len(code.missing(output, order)))
        order += code.missing(waiting.pop(0), order)
    return order

"""Winograd transforms in exact rationals, and the straight-line code that applies them.

F(m, r) makes m outputs of an r-tap correlation, `y[i] = sum(d[i + j] * g[j])`, from n = m + r - 1
products: `y = AT [(G g) * (BT d)]`. Nested in itself it makes m x m outputs of an r x r filter.
The same products transposed make the gradient of the filter: `dg = G^T [(BT d) * (A dy)]`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeVar

from ..core.cached import cached

Row = tuple[Fraction, ...]
Matrix = tuple[Row, ...]
Terms = list[tuple[int, Fraction]]
Kind = Literal["zero", "add", "sub", "neg", "scale", "fma"]
Cast = Callable[[Fraction], Any]
V = TypeVar("V")
ZERO, ONE = Fraction(0), Fraction(1)


def _points(*magnitudes: str) -> Row:
    """Both signs of every magnitude; zero once."""
    return tuple(dict.fromkeys(sign * Fraction(p) for p in magnitudes for sign in (1, -1)))


# By how many; found by searching simple fractions for the least fp32 error in two dimensions.
# An even number leaves out zero: against one point without its mirror, less error and work.
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
        """Products, and inputs, of one tile."""
        return self.m + self.r - 1


@lru_cache(maxsize=256)
def matrices(m: int, r: int, points: Row | None = None) -> Transform:
    """F(m, r) at these finite points and infinity; without points, at the table's."""
    if min(m, r) < 1:
        raise ValueError(f"F({m}, {r}) needs at least one output and one tap")
    if points is None and min(m, r) == 1:
        return _untransformed(m, r)
    chosen = POINTS.get(m + r - 2, ()) if points is None else tuple(map(Fraction, points))
    if not len(set(chosen)) == len(chosen) == m + r - 2:
        raise ValueError(f"F({m}, {r}) needs {m + r - 2} distinct points, got {len(chosen)}")
    return _cook_toom(m, r, chosen)


def _untransformed(m: int, r: int) -> Transform:
    """One output or one tap takes n products as it stands."""
    n = m + r - 1
    identity = tuple(tuple(Fraction(i == j) for j in range(n)) for i in range(n))
    AT = identity if r == 1 else ((ONE,) * n,)
    G = identity if r > 1 else ((ONE,),) * n
    return Transform(m, r, (), AT, G, identity)


def _cook_toom(m: int, r: int, points: Row) -> Transform:
    """A product of polynomials by evaluation and interpolation, transposed."""
    # Moving powers of two between rows of BT and G changes no fp32 error, so BT, applied most,
    # gets monic rows: one coefficient of each is 1, and mirrored points have mirrored rows.
    others = [points[:i] + points[i + 1 :] for i in range(len(points))]
    BT = tuple(_monic(roots, m + r - 1) for roots in [*others, points])
    norms = [math.prod((p - q for q in rest), start=ONE) for p, rest in zip(points, others)]
    values = zip(_vandermonde(points, r), [*norms, ONE])
    G = tuple(tuple(value / norm for value in row) for row, norm in values)
    return Transform(m, r, points, transpose(_vandermonde(points, m)), G, BT)


def _vandermonde(points: Row, width: int) -> Matrix:
    """Powers of every point; infinity sees the leading coefficient alone."""
    return (*(tuple(p**k for k in range(width)) for p in points), (ZERO,) * (width - 1) + (ONE,))


def _monic(roots: Row, width: int) -> Row:
    """Coefficients, constant first, of the product of all (x - root)."""
    coefficients = [ONE] + [ZERO] * (width - 1)
    for root in roots:
        shifted = [ZERO, *coefficients[:-1]]
        coefficients = [a - root * b for a, b in zip(shifted, coefficients)]
    return tuple(coefficients)


def transpose(matrix: Matrix) -> Matrix:
    return tuple(zip(*matrix))


def amplification(row: Transform) -> Fraction:
    """How much larger than a direct sum's the magnitudes of all that F(m, r) adds can be: for
    inputs of magnitude one, and the worst tap and output.

    >>> amplification(matrices(1, 3)), amplification(matrices(2, 3))
    (Fraction(1, 1), Fraction(4, 1))
    """
    inputs = [sum(map(abs, line)) for line in row.BT]
    return max(sum((abs(out[i] * row.G[i][tap]) * inputs[i] for i in range(row.n)), ZERO)
               for out in row.AT for tap in range(row.r))


def error_growth(row: Transform, column: Transform) -> float:
    """How much larger errors are than those of a direct sum, for which it is 1.

    With C channels the fp32 rms error over the rms output stays below error_growth * 2**-24 *
    (2 + sqrt(C)), about 3 times what normal data give; so does the filter gradient's with C tiles.
    """
    return _amplification(row) * _amplification(column)


def _amplification(t: Transform) -> float:
    """Rms of the products as they enter an output, over the rms of the output, on white data."""
    # Every product is rounded relative to its own size, so what cancels later stays as error.
    squares = [[sum(c * c for c in row) for row in rows] for rows in (transpose(t.AT), t.G, t.BT)]
    return math.sqrt(sum(a * g * b for a, g, b in zip(*squares)) / (t.m * t.r))


class Arithmetic(Protocol[V]):
    """What a program asks of its values, be they IR, source text, arrays or numbers."""

    def zero(self) -> V: ...
    def add(self, a: V, b: V, /) -> V: ...
    def sub(self, a: V, b: V, /) -> V: ...
    def neg(self, a: V, /) -> V: ...
    def scale(self, a: V, c: float, /) -> V: ...
    def fma(self, a: V, c: float, b: V, /) -> V: ...


@dataclass(frozen=True)
class Op:
    """An operation on numbered values; fma is operands[0] * constant + operands[1]."""

    kind: Kind
    operands: tuple[int, ...]
    constant: Fraction

    def apply(self, operands: list[V], ops: Arithmetic[V], constant: Cast) -> V:
        method: Callable[..., V] = getattr(ops, self.kind)
        factor = [constant(self.constant)] if self.constant else []
        return method(*operands[:1], *factor, *operands[1:])


@dataclass(frozen=True)
class Program:
    """Code without branches: arguments have the numbers below `inputs`, results follow on."""

    inputs: int
    ops: tuple[Op, ...]
    outputs: tuple[int, ...]

    @property
    def adds(self) -> int:
        """Operations without a constant."""
        return sum(op.kind in ("add", "sub", "neg") for op in self.ops)

    @property
    def muls(self) -> int:
        """Operations with a constant; an fma is one."""
        return sum(op.kind in ("scale", "fma") for op in self.ops)

    @cached
    def max_live(self) -> int:
        """Most values held at once by `stream`, if outputs are stored when they appear."""
        most, held, left = 0, set[int](), dict(enumerate(self.ops, self.inputs))
        for number, op in enumerate(self.ops, self.inputs):
            before = held | set(op.operands)
            held = _held_after(number, held, left)
            most = max(most, len(before), len(held | {number}))
            del left[number]
        return most

    def run(self, values: Sequence[V], ops: Arithmetic[V], constant: Cast = float) -> list[V]:
        """All outputs; `constant` makes of an exact coefficient what `ops` takes."""
        found = dict(self.stream(values, ops, constant))
        return [found[row] for row in range(len(self.outputs))]

    def stream(
        self, values: Sequence[V], ops: Arithmetic[V], constant: Cast = float
    ) -> Iterator[tuple[int, V]]:
        """Outputs as (row, value) when they are known; arguments are read when first needed."""
        known: dict[int, V] = {}
        for number, op in enumerate(self.ops, self.inputs):
            fresh = [i for i in op.operands if i not in known]
            known |= {i: values[i] for i in fresh}
            known[number] = op.apply([known[i] for i in op.operands], ops, constant)
            new = {*fresh, number}
            yield from ((row, known[i]) for row, i in enumerate(self.outputs) if i in new)
        yield from ((row, values[i]) for row, i in enumerate(self.outputs) if i not in known)


@lru_cache(maxsize=1024)
def straight_line(matrix: Matrix) -> Program:
    """Code for `matrix @ x`, with what mirrored columns, rows or both share, if that is less."""
    ways = itertools.product((False, True), repeat=2)
    shortest = min((_compile(matrix, *way) for way in ways), key=lambda code: len(code.ops))
    return min(shortest, _reordered(shortest), key=lambda program: program.max_live)


def _compile(matrix: Matrix, by_columns: bool, by_rows: bool) -> Program:
    code, values = _Code(len(matrix[0])), list(range(len(matrix[0])))
    if by_columns:
        values, matrix = _fold_columns(code, matrix)
    rows = [[(v, c) for v, c in zip(values, row) if c] for row in matrix]
    outputs: dict[int, int] = {}
    for i, j in _mirrored(matrix) if by_rows else []:
        outputs[i], outputs[j] = code.pair(rows[i], dict(rows[j]))
    outputs |= {i: code.dot(row) for i, row in enumerate(rows) if i not in outputs}
    return Program(code.inputs, tuple(code.ops), tuple(outputs[i] for i in range(len(rows))))


def _mirrored(rows: Matrix) -> list[tuple[int, int]]:
    """Disjoint pairs of rows that differ in the signs of some coefficients, not of all."""
    pairs: list[tuple[int, int]] = []
    for i, j in itertools.combinations(range(len(rows)), 2):
        signs = {(a == b) - (a == -b) for a, b in zip(rows[i], rows[j]) if a or b}
        if signs == {1, -1} and not {i, j} & set(itertools.chain(*pairs)):
            pairs.append((i, j))
    return pairs


def _fold_columns(code: _Code, matrix: Matrix) -> tuple[list[int], Matrix]:
    """Mirrored columns become their sum and difference, of which a row needs only one."""
    columns = dict(enumerate(transpose(matrix)))
    for i, j in _mirrored(transpose(matrix)):
        left, right = columns.pop(i), columns.pop(j)
        columns[code.add("add", i, j)] = tuple((a + b) / 2 for a, b in zip(left, right))
        columns[code.add("sub", i, j)] = tuple((a - b) / 2 for a, b in zip(left, right))
    return list(columns), transpose(tuple(columns.values()))


@dataclass
class _Code:
    """Operations as they are written; writing one again gives the value it has."""

    inputs: int
    ops: dict[Op, int] = field(default_factory=dict)

    def add(self, kind: Kind, *operands: int, constant: Fraction = ZERO) -> int:
        return self.ops.setdefault(Op(kind, operands, constant), self.inputs + len(self.ops))

    def dot(self, terms: Terms) -> int:
        """A term with factor 1 is free to start from; one with -1 is free anywhere else."""
        total: tuple[int, ...] = ()
        for value, factor in sorted(terms, key=lambda term: (term[1] != 1, term[1] == -1)):
            total = (self._plus(total, value, factor),)
        return total[0] if total else self.add("zero")

    def pair(self, row: Terms, mirror: dict[int, Fraction]) -> tuple[int, int]:
        """E + O and E - O of two rows that agree in their E and oppose in their O."""
        even = self._factored([(v, c) for v, c in row if mirror[v] == c])
        odd = self._factored([(v, c) for v, c in row if mirror[v] != c])
        return self.dot([even, odd]), self.dot([even, (odd[0], -odd[1])])

    def _factored(self, terms: Terms) -> tuple[int, Fraction]:
        """A value and its factor, taken out so that the sum has a term to start from."""
        factor = max((c for _, c in terms if abs(c) == 1), default=terms[-1][1])
        return self.dot([(v, c / factor) for v, c in terms]), factor

    def _plus(self, total: tuple[int, ...], value: int, factor: Fraction) -> int:
        if abs(factor) != 1:
            return self.add("fma" if total else "scale", value, *total, constant=factor)
        if total:
            return self.add("add" if factor == 1 else "sub", *total, value)
        return value if factor == 1 else self.add("neg", value)


def _held_after(number: int, held: set[int], left: dict[int, Op]) -> set[int]:
    """Values at hand that the operations left need once this one is done."""
    later = (op.operands for other, op in left.items() if other != number)
    return (held | {number, *left[number].operands}) & set(itertools.chain(*later))


def _reordered(program: Program) -> Program:
    """Always the operation next after which the fewest values are held."""
    left, held = dict(enumerate(program.ops, program.inputs)), set[int]()
    numbers = {i: i for i in range(program.inputs)}
    ops: list[Op] = []
    while left:
        ready = [i for i, op in left.items() if left.keys().isdisjoint(op.operands)]
        number = min(ready, key=lambda i: len(_held_after(i, held, left)))
        held, op = _held_after(number, held, left), left.pop(number)
        numbers[number] = program.inputs + len(ops)
        ops.append(Op(op.kind, tuple(numbers[i] for i in op.operands), op.constant))
    return Program(program.inputs, tuple(ops), tuple(numbers[i] for i in program.outputs))

"""A strided gradient of the input as dense convolutions, one for each phase of the stride.

Also a transposed convolution: it is such a gradient. docs/phases.md derives what is computed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from .grid import Grid
from .problem import Epilogue, Problem


@dataclass(frozen=True)
class Phase:
    """Every so many rows and columns of a result: a forward problem, and what it reads and writes.

    `offset` is the first pixel of the result, `rows` and `cols` are the taps of the weight in the
    order in which the problem has them.
    """

    problem: Problem
    offset: tuple[int, int]
    rows: tuple[int, ...]
    cols: tuple[int, ...]


@dataclass(frozen=True)
class _Axis:
    """A phase along one axis."""

    first: int
    size: int
    taps: tuple[int, ...]
    dilation: int
    padding: tuple[int, int]


@lru_cache(maxsize=4096)
def phases(p: Problem) -> tuple[Phase, ...]:
    """Of a gradient of the input; pixels that no tap reaches are in none of them.

    None at all for what is no such problem, or has no pixel in some phase. Where a phase does not
    need the last rows of the input, or the first, its padding is negative.
    """
    if p.direction != "backward_data" or p.stride == (1, 1) or p.h < p.stride[0] or (
            p.w < p.stride[1]):
        return ()
    down = _axis(p.h, p.conv_h, p.r, p.stride[0], p.dilation[0], p.padding[0])
    across = _axis(p.w, p.conv_w, p.s, p.stride[1], p.dilation[1], p.padding[2])
    return tuple(_phase(p, a, b) for a in down for b in across)


@lru_cache(maxsize=1024)
def weights(p: Problem) -> tuple[Phase, ...]:
    """All that weights of phases depend on, for images of any size: problems with one output."""
    down = _axis(p.stride[0], 1, p.r, p.stride[0], p.dilation[0], p.padding[0])
    across = _axis(p.stride[1], 1, p.s, p.stride[1], p.dilation[1], p.padding[2])
    return tuple(_smallest(p, a, b) for a in down for b in across)


def _smallest(p: Problem, a: _Axis, b: _Axis) -> Phase:
    problem = p.with_(
        n=1, c=p.k, k=p.c, h=(len(a.taps) - 1) * a.dilation + 1,
        w=(len(b.taps) - 1) * b.dilation + 1, r=len(a.taps), s=len(b.taps), stride=(1, 1),
        padding=(0, 0, 0, 0), dilation=(a.dilation, b.dilation), direction="forward",
        epilogue=Epilogue(), grid=None)
    return Phase(problem, (a.first, b.first), a.taps, b.taps)


def covers(p: Problem) -> bool:
    """Whether the phases of a problem write all of its result."""
    return len(phases(p)) == p.stride[0] * p.stride[1]


def _axis(size: int, outputs: int, taps: int, stride: int, dilation: int,
          before: int) -> list[_Axis]:
    """All phases of an axis with some tap."""
    apart = gcd(stride, dilation)
    step, reach = stride // apart, dilation // apart  # of taps of a phase, and of what they see
    found = []
    for first in range(stride):
        seen = [t for t in range(taps) if (first + before - t * dilation) % stride == 0]
        if not seen:
            continue
        assert seen == list(range(seen[0], taps, step))
        start = (first + before - seen[0] * dilation) // stride
        count = -(-(size - first) // stride)
        padding = ((len(seen) - 1) * reach - start, count - 1 + start - (outputs - 1))
        found.append(_Axis(first, count, tuple(reversed(seen)), reach, padding))
    return found


def _phase(p: Problem, a: _Axis, b: _Axis) -> Phase:
    whole = (p.h, p.w) if p.grid is None else p.grid[2:]
    problem = p.with_(
        c=p.k, k=p.c, h=p.conv_h, w=p.conv_w, r=len(a.taps), s=len(b.taps), stride=(1, 1),
        padding=(*a.padding, *b.padding), dilation=(a.dilation, b.dilation), direction="forward",
        grid=Grid(p.stride[0], p.stride[1], *whole))
    assert (problem.conv_h, problem.conv_w) == (a.size, b.size)
    return Phase(problem, (a.first, b.first), a.taps, b.taps)

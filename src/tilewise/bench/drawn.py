"""Random problems and schedules, for tests and for `tilewise doctor --selftest`."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from ..core.activations import ACTIVATIONS
from ..core.algorithm import Algorithm
from ..core.epilogue import Epilogue
from ..core.errors import InvalidProblem
from ..core.phases import covers, phases
from ..core.problem import Problem
from ..core.schedule import Schedule
from ..core.target import Target

# the code of clip is that of clamp
STEPS = (*(name for name in ACTIVATIONS if name != "clip"), "leaky_relu:0.2", "elu:0.5",
         "clamp:-2.0:3.0")
KINDS = {"dense": 30, "plain": 20, "pointwise": 18, "depthwise": 20, "grouped": 12}  # percent


def random_problem(rng: random.Random, flops: float = 1e6) -> Problem:
    """A small problem of any kind: at most so many operations an image."""
    while True:
        try:
            p = _any_problem(rng)
        except InvalidProblem:
            continue
        if p.with_(n=1).flops <= flops:
            return p


def _any_problem(rng: random.Random) -> Problem:
    kind = rng.choices(tuple(KINDS), tuple(KINDS.values()))[0]
    c, k, groups = _channels(rng, kind)
    r, s = (1, 1) if kind == "pointwise" else _two(rng, (1, 2, 3, 3, 3, 3, 4, 5, 5, 6, 7, 9, 11))
    stride = (1, 1) if kind == "plain" else _two(rng, (1, 1, 1, 1, 2, 2, 3, 4))
    dilation = (1, 1) if kind == "plain" else _two(rng, (1, 1, 1, 1, 2, 3))
    spans = ((r - 1) * dilation[0] + 1, (s - 1) * dilation[1] + 1)
    bare = kind == "pointwise" and rng.random() < 0.8
    padding = (0, 0, 0, 0) if bare else random_padding(rng, *spans)
    h, w = (rng.choice((rng.randint(1, 9), rng.randint(1, 20), rng.randint(10, 70)))
            for _ in range(2))
    bias, residual = rng.random() < 0.5, rng.random() < 0.3
    activation = rng.choice((None, "relu", STEPS[(c + 3 * h + 7 * w) % len(STEPS)]))
    epilogue = Epilogue(bias, residual, activation, rng.choice((1, 1, 1, 2)))
    return Problem(rng.randint(0, 3), c, h, w, k, r, s, stride, padding, dilation, groups,
                   epilogue=epilogue)


def random_linear(rng: random.Random) -> Problem:
    """A linear layer of eight rows, of any width."""
    epilogue = Epilogue(rng.random() < 0.5, rng.random() < 0.2, rng.choice((None, "relu", "relu6")))
    return Problem(8, rng.randint(1, 300), 1, 1, rng.randint(1, 70), 1, 1, epilogue=epilogue)


def random_phased(rng: random.Random) -> Problem | None:
    """The gradient of an input through a stride, or none in this draw."""
    stride = rng.choice(((2, 2), (2, 2), (1, 2), (3, 1), (2, 3)))
    r, s = rng.choice(((3, 3), (4, 4), (2, 2), (1, 1), (5, 3), (3, 5), (1, 4)))
    groups = rng.choice((1, 1, 1, 2))
    end = Epilogue(rng.random() < .5, rng.random() < .4, rng.choice((None, "relu", "silu")))
    def pad() -> int:
        return rng.randint(0, 2)

    try:
        p = Problem(rng.randint(0, 3), groups * rng.randint(1, 36), rng.randint(1, 26),
                    rng.randint(1, 26), groups * rng.randint(1, 20), r, s, stride,
                    (pad(), pad(), pad(), pad()),
                    rng.choice(((1, 1), (1, 1), (2, 3))),
                    groups, direction="backward_data", epilogue=end)
    except InvalidProblem:
        return None
    if not phases(p) or p.flops > 2e7:
        return None
    return p if covers(p) else p.with_(epilogue=Epilogue())  # nothing can follow


def more_filters(p: Problem) -> Problem:
    """Some depthwise problems with two, three or four filters a channel."""
    some = p.groups == p.c == p.k and (p.h + p.w) % 3 == 0
    return p.with_(k=p.c * (2 + p.h % 3)) if some else p


def _two(rng: random.Random, choices: Sequence[int]) -> tuple[int, int]:
    """Two values, equal more often than not."""
    first = rng.choice(choices)
    return first, first if rng.random() < 0.7 else rng.choice(choices)


def _channels(rng: random.Random, kind: str) -> tuple[int, int, int]:
    """Input channels, output channels, groups."""
    if kind == "depthwise":
        return (_width(rng, 70),) * 3
    if kind == "grouped":
        groups, c, k = rng.randint(2, 6), _width(rng, 18), _width(rng, 18)
        if (c + k) % 2:  # as nets have them: as many outputs, in one vector or two
            c = k = c + 16 * (k % 3 == 0)
        return groups * c, groups * k, groups
    return _width(rng, 70), _width(rng, 70), 1


def _width(rng: random.Random, most: int) -> int:
    """Small as often as large, and often next to a number of whole vectors."""
    if rng.random() < 0.3:
        near = rng.choice([lanes for lanes in (4, 8, 16, 32, 48, 64) if lanes < most])
        return near + rng.randint(-1, 1)
    return round(math.exp(rng.uniform(0, math.log(most))))


def random_padding(rng: random.Random, span_h: int, span_w: int) -> tuple[int, int, int, int]:
    """None, as much as keeps the size, uneven, or more than the filter reaches."""
    kind = rng.choice(("none", "same", "same", "uneven", "large"))
    if kind == "none":
        return (0, 0, 0, 0)
    if kind == "same":
        return (span_h // 2, span_h // 2, span_w // 2, span_w // 2)
    extra = 3 if kind == "large" else -1
    top, bottom, left, right = (rng.randint(0, max(0, span + extra))
                                for span in (span_h, span_h, span_w, span_w))
    return (top, bottom, left, right)


def random_schedule(algorithm: Algorithm, p: Problem, t: Target, rng: random.Random) -> Schedule:
    """A schedule of the space; most often the one of four that is quickest to compile."""
    space, start = algorithm.space(p, t), algorithm.default(p, t)
    drawn = [space.sample(rng, start) for _ in range(4 if rng.random() < 0.8 else 1)]
    return quickest(drawn, p)


def quickest(schedules: Sequence[Schedule], p: Problem) -> Schedule:
    """The one that is compiled soonest."""
    return min(schedules, key=lambda s: _unrolled(s, p))


def _unrolled(s: Schedule, p: Problem) -> int:
    """About how many instructions are written for a tile, which a filter makes larger."""
    names = [name for name in s if name.startswith(("tile", "rows", "vectors", "unroll"))]
    larger = {"tile_h": p.r - 1, "tile_w": p.s - 1}
    return math.prod(int(s[name]) + larger.get(name, 0) for name in names)

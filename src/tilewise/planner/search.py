"""Which schedules are worth a measurement."""

from __future__ import annotations

import random

from ..core.algorithm import Algorithm
from ..core.problem import Problem
from ..core.schedule import Schedule
from ..core.target import Target

# how many schedules of each algorithm are estimated at random, and how many of them are measured
EFFORTS = {"estimate": (0, 1), "wisdom_only": (0, 1), "measure": (0, 1), "exhaustive": (400, 8)}


def shortlist(algorithm: Algorithm, p: Problem, t: Target, effort: str,
              start: Schedule | None = None) -> list[Schedule]:
    """A schedule, the default one if none is given, and the most promising others."""
    drawn, kept = EFFORTS[effort]
    default = algorithm.default(p, t) if start is None else start
    if drawn == 0 or not algorithm.space(p, t).tunables:
        return [default]
    space, rng = algorithm.space(p, t), random.Random(0)
    others = {space.sample(rng, default) for _ in range(drawn)}
    others |= set(_neighbours(algorithm, p, t, default))
    ranked = sorted(others - {default}, key=lambda s: (algorithm.cost(p, t, s), s.to_json()))
    return [default, *ranked[:kept - 1]]


def _neighbours(algorithm: Algorithm, p: Problem, t: Target, s: Schedule) -> list[Schedule]:
    """Schedules that differ in one tunable."""
    space = algorithm.space(p, t)
    moves = [s.with_(**{name: value}) for name, values in space.tunables.items()
             for value in values if value != s[name]]
    return [move for move in moves if move in space]

"""What tests of deliberate faults share: how one is described and judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tilewise.core import Algorithm, Problem, Schedule, Target
from tilewise.kernels.cpu.between.epilogue import finish
from tilewise.kernels.cpu.emit import Pointer
from tilewise.planner.planner import inner_problem

from . import faults, harness
from .faults import replaced

PADDED = "n2c5h9w19k21r3s3p1_f32_forward+bias+residual+relu"
POOLED = "n2c5h9w19k21r3s3p1_f32_forward+bias+relu+pool2"


class Mutation(NamedTuple):
    """A fault; an algorithm, a problem and changes of its schedule that run into it; a judge."""

    apply: Callable[[pytest.MonkeyPatch], None]
    algorithm: str
    problem: str
    tunables: dict[str, int] = {}
    judge: Callable[[Algorithm, Problem, Target, Schedule], object] = harness.check


def next_bias(f: Any, value: Any, p: Any, bias: Any, *operands: Any) -> Any:
    return finish(f, value, p, (bias[0], bias[1] + 1), *operands)


def whole_vectors(name: str) -> Callable[..., None]:
    """Loads or stores that forget how many lanes they are for."""
    original = getattr(Pointer, name)

    def unmasked(*args: Any, count: Any = None, **options: Any) -> Any:
        return original(*args, **options)

    return replaced(Pointer, name, unmasked)


def check(mutation: Mutation) -> None:
    p = Problem.parse(mutation.problem)
    algorithm = next(a for a in harness.WRITTEN if a.name == mutation.algorithm)
    target = Target.host(threads=harness.THREADS)
    s = algorithm.default(inner_problem(algorithm, p), target).with_(**mutation.tunables)
    with faults.patched(mutation.apply):
        mutation.judge(algorithm, p, target, s)

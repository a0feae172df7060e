"""Running a model once to learn its problems, and planning them with more effort."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from torch import nn

from ..conv.checks import arguments_of, check_module
from ..conv.linear import Linear, is_planned
from ..conv.running import ENGINE
from ..core.plan import Plan
from ..core.problem import Problem
from ..core.progress import Tell, silent
from ..core.target import Target
from .nn import Block, Conv1d, Conv2d, Conv3d
from .patterns import CONVOLUTIONS
from .rehearsal import cloned, rehearsal


@dataclass(frozen=True)
class Layer:
    """A convolution or a large linear layer of a model as it was run."""

    name: str
    plan: Plan


def tune(model: nn.Module, example: Any, effort: str = "measure", max_error: float | None = None,
         tell: Tell = silent) -> list[Layer]:
    """Plan every convolution of the model for this example; what was measured is remembered."""
    layers = observe(model, example, tell)
    if effort == "estimate":
        return layers
    found = {p: ENGINE.plan(p, t, effort, max_error=max_error)
             for p, t in distinct(layers, "measuring", tell)}
    ENGINE.executables.clear()  # what was planned before is planned by what is known now
    observe(model, example, tell)
    return [Layer(layer.name, found[layer.plan.problem]) for layer in layers]


def distinct(layers: list[Layer], doing: str, tell: Tell) -> Iterator[tuple[Problem, Target]]:
    """Every problem once, in the order of the layers, and told of when its turn comes."""
    problems = list(dict.fromkeys((layer.plan.problem, layer.plan.target) for layer in layers))
    for i, (problem, target) in enumerate(problems):
        tell(f"{doing} {problem}", i, len(problems))
        yield problem, target
    tell(doing, len(problems), len(problems))


def observe(model: nn.Module, example: Any, tell: Tell = silent) -> list[Layer]:
    """Run a copy of the model in eval mode without gradients and note every convolution's plan."""
    check_module(model)
    seen: list[Layer] = []
    count = sum(map(_is_planned, model.modules()))
    with rehearsal(model) as trial:
        names = {module: name for name, module in trial.named_modules()}

        def note(plan: Plan) -> None:
            name = _running(names)
            tell(f"running {name}", min(len(seen), count), count)
            seen.append(Layer(name, plan))

        with observed(note):
            trial(*cloned(arguments_of(example)))
    return seen


def _is_planned(module: nn.Module) -> bool:
    return isinstance(module, tuple(CONVOLUTIONS)) or (
        isinstance(module, nn.Linear) and is_planned(module))


def _running(names: dict[nn.Module, str]) -> str:
    """The name of the layer that is running, found on the stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, Block | Linear):
            return names.get(module._parts[0], names.get(module, ""))
        if isinstance(module, Conv1d | Conv2d | Conv3d):
            return names.get(module, "")
        frame = frame.f_back
    return ""


@contextmanager
def observed(note: Callable[[Plan], object]) -> Iterator[None]:
    """Tell of the plans that this thread runs."""
    thread = get_ident()

    def tell(plan: Plan) -> None:
        if get_ident() == thread:
            note(plan)

    ENGINE.observers.append(tell)
    try:
        yield
    finally:
        ENGINE.observers.remove(tell)

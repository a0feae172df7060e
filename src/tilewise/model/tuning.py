"""Running a model, or a step of its training, to learn its problems; planning them with effort."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..conv.checks import arguments_of, check_module
from ..conv.linear import Linear, is_planned
from ..conv.running import ENGINE
from ..core.errors import TilewiseError
from ..core.plan import Plan
from ..core.problem import DIRECTIONS, Epilogue, Problem
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
         tell: Tell = silent, training: bool = False) -> list[Layer]:
    """Plan every convolution of the model for this example; what was measured is remembered.

    Those of a step of training are the forward ones and both gradients.
    """
    layers = observe(model, example, tell, training)
    if effort == "estimate":
        return layers
    found = {p: ENGINE.plan(p, t, effort, max_error=max_error)
             for p, t in distinct(layers, "measuring", tell)}
    ENGINE.executables.clear()  # what was planned before is planned by what is known now
    observe(model, example, tell, training)
    return [Layer(layer.name, found[layer.plan.problem]) for layer in layers]


def distinct(layers: list[Layer], doing: str, tell: Tell) -> Iterator[tuple[Problem, Target]]:
    """Every problem once, in the order of the layers, and told of when its turn comes."""
    problems = list(dict.fromkeys((layer.plan.problem, layer.plan.target) for layer in layers))
    for i, (problem, target) in enumerate(problems):
        tell(f"{doing} {problem}", i, len(problems))
        yield problem, target
    tell(doing, len(problems), len(problems))


def observe(model: nn.Module, example: Any, tell: Tell = silent,
            training: bool = False) -> list[Layer]:
    """Run a copy of the model in eval mode without gradients and note every convolution's plan.

    In training: a forward and a backward pass; each layer is followed by its gradients.
    """
    check_module(model)
    seen: list[Layer] = []
    count = sum(map(_is_planned, model.modules())) * (3 if training else 1)
    with rehearsal(model, training) as trial:
        names = {module: name for name, module in trial.named_modules()}

        def note(plan: Plan) -> None:
            name = _running(names)
            tell(f"running {name}", min(len(seen), count), count)
            seen.append(Layer(name, plan))

        with observed(note):
            result = trial(*cloned(arguments_of(example)))
            if training:
                _differentiate(trial, result)
    return _by_layers(seen) if training else seen


def _differentiate(model: nn.Module, result: Any) -> None:
    """A backward pass that leaves no gradients behind."""
    results = [y for y in tree_leaves(result) if isinstance(y, Tensor) and y.requires_grad]
    wanted = [p for p in model.parameters() if p.requires_grad]
    if not results or not wanted:
        raise TilewiseError(f"{type(model).__name__} has nothing to learn in training mode: no "
                            "parameter, or no result, requires a gradient")
    torch.autograd.grad([y.sum() for y in results], wanted, allow_unused=True)


def _by_layers(seen: list[Layer]) -> list[Layer]:
    """Each layer with its gradients behind it, which take its name.

    Gradients run in the opposite order, and know only the problem they belong to.
    """
    groups = [[layer] for layer in seen if layer.plan.problem.direction == DIRECTIONS[0]]
    rest = []  # of layers that torch ran forward
    for direction in DIRECTIONS[1:]:
        waiting = defaultdict(list)
        for group in groups:
            waiting[_bare(group[0].plan.problem)].append(group)
        for layer in [one for one in seen if one.plan.problem.direction == direction]:
            found = waiting[_bare(layer.plan.problem)]
            if found:
                group = found.pop()
                group.append(Layer(group[0].name, layer.plan))
            else:
                rest.append(layer)
    return [layer for group in groups for layer in group] + rest


def _bare(p: Problem) -> Problem:
    return p.with_(direction="forward", epilogue=Epilogue())


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

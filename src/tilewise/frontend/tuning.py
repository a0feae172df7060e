"""Running a model once to learn its problems, and planning them with more effort."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..core.plan import Plan
from ..core.problem import Problem
from ..core.progress import Tell, silent
from ..core.target import Target
from .nn import Block, Conv2d
from .ops import ENGINE

BLOCKS = "tilewise_blocks"


@dataclass(frozen=True)
class Layer:
    """A convolution of a model as it was run."""

    name: str
    plan: Plan

    @property
    def label(self) -> str:
        """Its name as people know it."""
        return label(self.name)


def label(name: str) -> str:
    """A module's name in the original model."""
    return name.rpartition(f"{BLOCKS}.")[2]


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
    """Run the model in eval mode without gradients and note every convolution's plan."""
    seen: list[Layer] = []
    current = [""]
    modules = [(name, module) for name, module in model.named_modules()
               if isinstance(module, Block | Conv2d)]

    def enter(name: str) -> None:
        current[0] = name
        tell(f"running {label(name)}", min(len(seen), len(modules)), len(modules))

    hooks = [module.register_forward_pre_hook(_naming(name, enter)) for name, module in modules]
    arguments = example if isinstance(example, tuple) else (example,)
    try:
        with evaluating(model), _observer(lambda plan: seen.append(Layer(current[0], plan))):
            model(*arguments)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _naming(name: str, enter: Callable[[str], None]) -> Any:
    return lambda module, args: enter(name)


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Eval mode without gradients, and then as it was."""
    modes = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def _observer(note: Any) -> Iterator[None]:
    ENGINE.observers.append(note)
    try:
        yield
    finally:
        ENGINE.observers.remove(note)

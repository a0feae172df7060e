"""Running a model once to learn its problems, and planning them with more effort."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..core.plan import Plan
from .nn import Block, Conv2d
from .ops import ENGINE


@dataclass(frozen=True)
class Layer:
    """A convolution of a model as it was run."""

    name: str
    plan: Plan


def tune(model: nn.Module, example: Any, effort: str = "measure",
         max_error: float | None = None) -> list[Layer]:
    """Plan every convolution of the model for this example; what was measured is remembered."""
    layers = observe(model, example)
    if effort == "estimate":
        return layers
    found = {p: ENGINE.plan(p, t, effort, max_error=max_error)
             for p, t in {(layer.plan.problem, layer.plan.target) for layer in layers}}
    ENGINE.executables.clear()  # what was planned before is planned by what is known now
    observe(model, example)
    return [Layer(layer.name, found[layer.plan.problem]) for layer in layers]


def observe(model: nn.Module, example: Any) -> list[Layer]:
    """Run the model in eval mode without gradients and note every convolution's plan."""
    seen: list[Layer] = []
    current = [""]
    hooks = [module.register_forward_pre_hook(_naming(name, current))
             for name, module in model.named_modules() if isinstance(module, Block | Conv2d)]
    arguments = example if isinstance(example, tuple) else (example,)
    try:
        with evaluating(model), _observer(lambda plan: seen.append(Layer(current[0], plan))):
            model(*arguments)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _naming(name: str, current: list[str]) -> Any:
    def hook(module: nn.Module, args: Any) -> None:
        current[0] = name

    return hook


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

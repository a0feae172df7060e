"""What a case is: a model, and a script that uses it as a user would and returns all it sees."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CASES: list[Case] = []
LAYOUT = [torch.contiguous_format]  # of the images that scripts make; the runner changes it


@dataclass(frozen=True)
class Case:
    kind: str
    name: str
    make: Callable[[], nn.Module]
    script: Callable[..., Any]  # script(model), or script(model, original)
    example: Callable[[], Any]
    grad: bool  # the script computes gradients itself
    edits: bool  # the script changes modules or weights: what it does to the original differs
    released: bool  # keep_original=False can give the same answers
    compiled: bool  # torch.compile can give the same answers

    def __str__(self) -> str:
        return f"{self.kind}-{self.name}"


def case(function: Callable[..., Any], make: Callable[[], nn.Module], script: Callable[..., Any], *,
         example: Callable[[], Any] | None = None, grad: bool = False, edits: bool = False,
         released: bool | None = None, compiled: bool = True) -> None:
    released = not (edits or grad) if released is None else released
    kind = function.__module__.rpartition(".")[2]
    CASES.append(Case(kind, function.__name__, make, script, example or image, grad, edits,
                      released, compiled))


def forward(script: Callable[..., Any] | None = None,
            parts: Callable[[], dict[str, Any]] = dict, train: bool = False, **flags: Any) -> Any:
    """The decorated function is the forward of a model with a few parts, called twice."""
    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        kind = type(function.__name__, (Net,), {"forward": function,
                                                "__module__": function.__module__})
        case(function, lambda: with_parts(kind(), parts()).train(train), script or calls, **flags)
        return function
    return note


def script(make: Callable[[], nn.Module], train: bool = False, **flags: Any) -> Any:
    """The decorated function is what is done with the model."""
    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        case(function, lambda: make().train(train), function, **flags)
        return function
    return note


class Net(nn.Module):
    """The parts that most models here are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d = conv(), conv()
        self.bn = norm()
        self.relu, self.relu_ = nn.ReLU(), nn.ReLU(inplace=True)
        self.pool, self.drop = nn.MaxPool2d(2), nn.Dropout(0.5)
        self.fc = nn.Linear(8, 4)


class Chain(Net):
    """conv, norm, ReLU, conv, add, ReLU, head."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn(self.c(x)))
        return self.fc(self.relu(self.d(y) + x).mean((2, 3)))


class Features(Net):
    """conv, norm, ReLU: the result is an image."""

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.c(x)))


def row() -> nn.Sequential:
    return nn.Sequential(conv(), norm(), nn.ReLU(), conv(), nn.ReLU(inplace=True))


def with_parts(model: nn.Module, parts: dict[str, Any]) -> nn.Module:
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def conv(**options: Any) -> nn.Conv2d:
    return nn.Conv2d(8, 8, 3, **{"padding": 1, **options})


def norm(**options: Any) -> nn.BatchNorm2d:
    """With statistics as after training."""
    made = nn.BatchNorm2d(8, **options)
    for tensor, draw in ((made.running_mean, Tensor.normal_), (made.running_var, positive_),
                         (made.weight, positive_), (made.bias, Tensor.normal_)):
        if tensor is not None:
            draw(tensor.data)
    return made


def positive_(tensor: Tensor) -> Tensor:
    return tensor.uniform_(0.5, 2)


def image(n: int = 1, c: int = 8, h: int = 9, w: int = 9) -> Tensor:
    return torch.randn(n, c, h, w).contiguous(memory_format=LAYOUT[0])


def calls(model: nn.Module) -> list[Any]:
    """Two calls, and what is left of both inputs."""
    seen = []
    for _ in range(2):
        x = image()
        seen += [attempt(model, x), x]
    return seen


def attempt(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result, or the exception."""
    try:
        return function(*args, **options)
    except Exception as error:
        return error


class Gradients(dict[str, "Tensor | None"]):
    """Compared beside each other: before a norm a bias has none but rounding errors."""


def gradients(model: nn.Module) -> Gradients:
    return Gradients((name, parameter.grad) for name, parameter in model.named_parameters())


def module_of(function: Callable[..., Any]) -> Any:
    """Where a function's globals are, for cases that change them."""
    return sys.modules[function.__module__]

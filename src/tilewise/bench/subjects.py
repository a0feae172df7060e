"""What is measured or explained: a model, one convolution, or what a user's function makes."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
import traceback
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.errors import InvalidProblem, TilewiseError
from ..core.problem import Problem
from ..kernels.activations import activated, apart
from ..models import MODELS
from ..runtime.engine import random_operands
from ..runtime.types import DTYPES

SHAPES = {"lenet_a": (1, 86, 86), "lenet_b": (1, 70, 70)}  # of an image; others are as below
USUAL = (3, 224, 224)


@dataclass(frozen=True)
class Subject:
    """A plain torch module in eval mode and an example of its input."""

    name: str
    model: nn.Module
    example: Tensor
    problem: Problem | None = None  # if it is one convolution

    @property
    def images(self) -> int:
        return int(self.example.shape[0])


def subject(text: str, batch: int | None = None, shape: str | None = None) -> Subject:
    """The subject that a user named.

    >>> subject("lenet_a", batch=2).example.shape
    torch.Size([2, 1, 86, 86])
    """
    if text in MODELS:
        image = _shape(shape) or SHAPES.get(text, USUAL)
        return _model(text, MODELS[text](), batch or 8, image)
    if ":" in text:
        return _by_user(text, batch, _shape(shape))
    if re.match(r"n\d", text):
        p = Problem.parse(text)
        return layer(p if batch is None else p.with_(n=batch))
    close = difflib.get_close_matches(text, MODELS, 1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise InvalidProblem(f"subject is {text!r}{hint}, needs a model ({', '.join(MODELS)}), a "
                         "problem such as n8c64h56w56k64r3s3p1_f32_forward+bias+relu, or "
                         "package.module:factory")


def layer(p: Problem) -> Subject:
    """One convolution with its epilogue as a module."""
    if p.direction != "forward":
        raise InvalidProblem(f"direction is {p.direction}, needs forward")
    x, weight, bias, residual = random_operands(p)
    return Subject(str(p), Layer(p, weight, bias, residual).eval(), x, p)


class Layer(nn.Module):
    """A convolution and what follows it, written as users write it; `channels` has the bias."""

    def __init__(self, p: Problem, weight: Tensor, channels: Tensor | None,
                 residual: Tensor | None) -> None:
        super().__init__()
        bias, slope = apart(p, channels)
        top, bottom, left, right = p.padding
        even = top == bottom and left == right
        self.pad = None if even else nn.ZeroPad2d((left, right, top, bottom))
        self.conv = nn.Conv2d(p.c, p.k, (p.r, p.s), p.stride, (top, left) if even else 0,
                              p.dilation, p.groups, p.epilogue.bias, dtype=DTYPES[p.dtype])
        self.conv.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.conv.bias = nn.Parameter(bias, requires_grad=False)
        self.register_buffer("residual", residual)
        self.register_buffer("slope", slope)
        self.activation, self.pool = p.epilogue.activation, p.epilogue.pool

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x if self.pad is None else self.pad(x))
        y = y if self.residual is None else y + self.residual
        y = activated(y, self.activation, self.slope)
        return y if self.pool == 1 else F.max_pool2d(y, self.pool)


def _model(name: str, model: nn.Module, batch: int, image: tuple[int, ...]) -> Subject:
    rng = torch.Generator().manual_seed(1)
    settle(model, torch.randn(2, *image, generator=rng))
    return Subject(f"{name} batch {batch}", model, torch.randn(batch, *image, generator=rng))


@torch.no_grad()
def settle(model: nn.Module, images: Tensor) -> None:
    """Batch norms with statistics as after training, so that values neither grow nor vanish."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    if norms:
        model.train()
        model(images)
    model.eval()


def _by_user(text: str, batch: int | None, image: tuple[int, ...] | None) -> Subject:
    made = _made(text, _factory(text))
    model, example = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise TilewiseError(f"{text} returned {type(model).__name__}, needs a torch.nn.Module, or "
                            "one and an example of its input")
    if image is not None or example is None:
        example = torch.randn(batch or 8, *(image or USUAL))
    elif batch is not None:
        example = example[:1].expand(batch, *example.shape[1:]).contiguous()
    return Subject(f"{text} batch {example.shape[0]}", model.eval(), example)


def _factory(text: str) -> Any:
    module, _, name = text.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the user's own directory
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise TilewiseError(f"cannot import {text!r}: {error}") from error


def _made(text: str, factory: Any) -> Any:
    """What a user's function returns; its own errors are told by their last line."""
    if not callable(factory) or isinstance(factory, nn.Module):
        raise TilewiseError(f"{text} is a {type(factory).__name__}, needs a function that returns "
                            "a torch.nn.Module: def make(): return ...")
    try:
        inspect.signature(factory).bind()
    except TypeError:
        raise TilewiseError(f"{text} takes {inspect.signature(factory)}, needs a function without "
                            "arguments: def make(): return ...") from None
    except ValueError:
        pass  # some builtins have no signature
    try:
        return factory()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise TilewiseError(f"{text} raised {type(error).__name__}: {error} ({last.filename}:"
                            f"{last.lineno})") from error


def _shape(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    sizes = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if not sizes:
        raise InvalidProblem(f"shape is {text!r}, needs channels x height x width, as 3x224x224")
    return tuple(int(size) for size in sizes.groups())

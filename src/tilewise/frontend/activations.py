"""What means an activation in a graph: modules, functions and methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..core.activations import ACTIVATIONS

# modules, and their attributes that are numbers of the activation
MODULES: dict[type, tuple[str, tuple[str, ...]]] = {
    nn.ReLU: ("relu", ()), nn.SiLU: ("silu", ()), nn.Mish: ("mish", ()),
    nn.ReLU6: ("clamp", ("min_val", "max_val")),
    nn.Sigmoid: ("sigmoid", ()), nn.Tanh: ("tanh", ()), nn.Hardswish: ("hardswish", ()),
    nn.Hardsigmoid: ("hardsigmoid", ()), nn.GELU: ("gelu", ()),
    nn.LeakyReLU: ("leaky_relu", ("negative_slope",)), nn.ELU: ("elu", ("alpha",)),
    nn.Hardtanh: ("clamp", ("min_val", "max_val"))}
# arguments of functions after the image, which have the defaults of the row
NUMBERS = {"leaky_relu": ("negative_slope",), "elu": ("alpha", "scale", "input_scale"),
           "clamp": ("min_val", "max_val"), "gelu": ("approximate",)}


def _functions() -> dict[Any, str]:
    """Every form of a function that torch, Dynamo or a method's name has."""
    found: dict[Any, str] = {F.hardtanh: "clamp", F.hardtanh_: "clamp"}
    for name in ACTIVATIONS:
        for form in (name, f"{name}_"):
            for place in (F, torch, torch._C._nn):
                if name != "clamp" and callable(getattr(place, form, None)):
                    found[getattr(place, form)] = name
            if name in ("relu", "sigmoid", "tanh"):
                found[form] = name
    return found


FUNCTIONS = _functions()


def of_module(module: Any) -> str | None:
    """The step that a module is, if it is one."""
    name, attributes = MODULES.get(type(module), (None, ()))
    if name is None:
        return None
    if name == "gelu":
        return _gelu(module.approximate)
    return _step(name, [getattr(module, attribute) for attribute in attributes])


def of_call(target: Any, rest: Sequence[Any], options: dict[str, Any]) -> str | None:
    """The step that a call is; `rest` are its arguments after the image."""
    try:
        name = FUNCTIONS.get(target)
    except TypeError:  # a target that cannot be a key
        return None
    if name is None:
        return None
    names = NUMBERS.get(name, ())
    given = {**dict(zip((*names, "inplace"), rest)), **options}
    given.pop("inplace", None)
    if not set(given) <= set(names):
        return None
    if name == "gelu":
        return _gelu(given.get("approximate", "none"))
    if given.pop("scale", 1) != 1 or given.pop("input_scale", 1) != 1:
        return None
    row = ACTIVATIONS[name]
    return _step(name, [given.get(word, default) for word, default in zip(names, row.numbers)])


def _gelu(approximate: Any) -> str | None:
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)


def _step(name: str, numbers: Sequence[Any]) -> str | None:
    if not all(type(number) in (int, float) and number == number for number in numbers):
        return None
    if name == "clamp" and tuple(numbers) == (0, 6):
        return "relu6"
    return ACTIVATIONS[name].step(*numbers)

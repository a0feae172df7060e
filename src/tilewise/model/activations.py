"""What means an activation in a graph: modules, functions and methods, by the table's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..core.activations import INNER, ROWS, Activation

MODULES: dict[type, list[Activation]] = {}
for _row in ROWS:
    for _name in _row.modules:
        MODULES.setdefault(getattr(nn, _name), []).append(_row)
METHODS = ("relu", "sigmoid", "tanh", "prelu", "clamp")  # that tensors have
ALIASES = {"clip": "clamp"}


def _forms(row: Activation) -> Iterator[Any]:
    """Every form of its function that torch, Dynamo or a method's name has."""
    name = row.function or row.name
    for known in (name, *(alias for alias, meant in ALIASES.items() if meant == name)):
        for form in (known, f"{known}_"):
            for place in (F, torch, torch._C._nn):
                if callable(getattr(place, form, None)):
                    yield getattr(place, form)
            if name in METHODS:
                yield form


FUNCTIONS: dict[Any, list[Activation]] = {}
for _row in ROWS:
    for _form in set(_forms(_row)):
        FUNCTIONS.setdefault(_form, []).append(_row)
DEFAULTS = {name: value for row in reversed(ROWS) for name, value in row.fixed}  # the first row's


def attributes(kind: type) -> tuple[str, ...]:
    """What an activation's module has besides its kind."""
    return tuple({name: None for row in MODULES.get(kind, ())
                  for name in (*row.arguments, *dict(row.fixed)) if name not in INNER})


def of_module(module: Any) -> str | None:
    """The step that a module is, if it is one."""
    given = {name: getattr(module, name) for name in attributes(type(module))}
    return _step(MODULES.get(type(module), ()), given)


def of_call(target: Any, rest: Sequence[Any], options: dict[str, Any]) -> str | None:
    """The step that a call is; `rest` are its arguments after the image."""
    try:
        rows = FUNCTIONS.get(target, [])
    except TypeError:  # a target that cannot be a key
        return None
    if not rows:
        return None
    operand = [name for name in (rows[0].operand,) if name]
    names = (*operand, *rows[0].arguments, *dict(rows[0].fixed))
    given = {**dict(zip((*names, "inplace"), rest)), **options}
    given.pop("inplace", None)
    if rows[0].name == "clip":  # a side may be open, not both
        given = {name: value for name, value in given.items() if value is not None}
        if not given:
            return None
    return _step(rows, given) if set(operand) <= set(given) <= set(names) else None


def slope_of(rest: Sequence[Any], options: dict[str, Any]) -> Any:
    """The slopes that a call of an activation is given, if it is one that has some."""
    return rest[0] if rest else options.get("weight")


def _step(rows: Sequence[Activation], given: dict[str, Any]) -> str | None:
    """The step of the row whose fixed values are given, with the numbers that are."""
    for row in rows:
        if all(given.get(name, DEFAULTS[name]) == value for name, value in row.fixed):
            numbers = [given.get(name, default)
                       for name, default in zip(row.arguments, row.numbers, strict=True)]
            if not all(type(number) in (int, float) and number == number for number in numbers):
                return None
            return "relu6" if (row.name, *numbers) == ("clamp", 0, 6) else row.step(*numbers)
    return None

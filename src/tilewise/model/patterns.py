"""(pad +) conv (+ batch norm) (+ add) (+ relu) (+ 2x2 max-pool) in a traced graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from ..core.activations import SLOPED
from .activations import of_call, of_module, slope_of
from .effects import Effects

AXES: dict[type, int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
TRANSPOSED: dict[type, int] = {nn.ConvTranspose1d: 1, nn.ConvTranspose2d: 2,
                               nn.ConvTranspose3d: 3}
CONVOLUTIONS = {**AXES, **TRANSPOSED}
NORMS: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
IN_PLACE = {operator.iadd, "add_"}  # the sum has the type and shape of what is written to
ADDS = {operator.add, torch.add, "add", *IN_PLACE}
PADS = {F.pad, torch._C._nn.pad}  # Dynamo sees through the first
PADDINGS = (nn.ZeroPad2d, nn.ConstantPad2d)
ModuleOf = Callable[[fx.Node], Any]
CONV2D = {F.conv2d, torch.conv2d}
POOLS = {F.max_pool2d, torch.max_pool2d}
DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout,
            F.feature_alpha_dropout}
TWO_BY_TWO = {"kernel_size": 2, "stride": 2, "padding": 0, "dilation": 1, "ceil_mode": False,
              "return_indices": False}


class Chain:
    """What follows a convolution, as far as one call can do it; modules or functions alike.

    The call takes the place of the last link. So nothing between the links may write to what the
    convolution read, or to what is added.
    """

    STEPS: tuple[str, ...] = ("_norm", "_add", "_activate", "_pool")

    def __init__(self, effects: Effects, module_of: Callable[[fx.Node], Any], conv: fx.Node,
                 norm_of: Callable[[fx.Node], Any] | None = None, axes: int = 2) -> None:
        self._effects, self._module_of = effects, module_of
        self._norm_of = norm_of or is_in_eval_mode
        self._axes = axes
        self.conv, self.links = conv, [conv]
        self.norm: fx.Node | None = None
        self.learns = False  # whether the norm moves statistics, as far as is known
        self.residual: fx.Node | None = None
        self.adds_in_place = False
        self.activation: str | None = None
        self.slope: fx.Node | nn.Module | None = None  # or the module that has them
        self.pool = 1
        for step in self.STEPS:
            user = _only_user(self.last)
            if user is not None and self._may_join(user) and getattr(self, step)(user):
                self.links.append(user)

    @property
    def last(self) -> fx.Node:
        return self.links[-1]

    @property
    def modules(self) -> list[nn.Module]:
        """Those whose work one call does."""
        return [found for found in map(self._module_of, self.links) if found is not None]

    def replace_by(self, graph: fx.Graph, node: fx.Node) -> None:
        """Let a node take the place of the whole chain."""
        self.last.replace_all_uses_with(node)
        self._effects.takes_place(node, self.last)
        for link in reversed(self.links):
            graph.erase_node(link)

    def _may_join(self, user: fx.Node) -> bool:
        if not self._effects.knows(user):
            return False  # another chain's call
        operands = [None, *(value for link in (*self.links, user) for value in link.all_input_nodes
                            if value not in self.links)]
        if self.norm is not None and not self._moves_unseen(self.norm, user):
            return False
        return not self._effects.is_written_between(self.conv, user, operands, set(self.links))

    def _moves_unseen(self, norm: fx.Node, user: fx.Node) -> bool:
        """Whether a norm's statistics may move with a later link."""
        module = self._module_of(norm) or self._norm_of(norm)
        return not (self._effects.is_met_between(norm, user, getattr(module, "of", module))
                    or (self.learns and self._effects.is_unknown_between(norm, user)))

    def _norm(self, user: fx.Node) -> bool:
        module = self._module_of(user)
        found = type(module) is NORMS[self._axes] and module.track_running_stats
        if user.target is F.batch_norm:
            module = found = self._norm_of(user)
        self.norm = user if found and user.args[:1] == (self.last,) else None
        self.learns = self.norm is not None and getattr(module, "training", False)
        return self.norm is not None

    def _add(self, user: fx.Node) -> bool:
        if user.target not in ADDS or user.kwargs or len(user.args) != 2:
            return False
        others = [arg for arg in user.args if arg is not self.last]
        if len(others) != 1 or not isinstance(others[0], fx.Node):
            return False
        if others[0] in self._effects.written(user):
            return False  # the sum is written to the other operand
        self.residual, self.adds_in_place = others[0], user.target in IN_PLACE
        return True

    def _activate(self, user: fx.Node) -> bool:
        module = self._module_of(user)
        if user.args[:1] != (self.last,):
            return False
        rest = user.args[1:], user.kwargs
        step = of_module(module) if module is not None else of_call(user.target, *rest)
        if step in SLOPED:
            slope = slope_of(*rest) if module is None else module
            if not isinstance(slope, fx.Node | nn.Module):
                return False
            self.slope = slope
        self.activation = step
        return step is not None

    def _pool(self, user: fx.Node) -> bool:
        module, options = self._module_of(user), {}
        if user.args[:1] != (self.last,) or self._axes != 2:
            return False
        if type(module) is nn.MaxPool2d:
            options = {name: getattr(module, name) for name in TWO_BY_TWO}
        elif user.target in POOLS:
            options = {name: value for name, value in _arguments(user, F_MAX_POOL).items()
                       if name != "input"}
        found = bool(options) and all(
            _one(value) == TWO_BY_TWO[name] for name, value in options.items())
        self.pool = 2 if found else 1
        return found


class TransposedChain(Chain):
    """What follows a transposed convolution."""

    STEPS = ("_norm", "_activate")

    def _activate(self, user: fx.Node) -> bool:
        if not super()._activate(user) or self.slope is not None:
            self.activation = self.slope = None
            return False
        return True


class LinearChain(Chain):
    """What follows a linear layer."""

    STEPS = ("_activate",)


F_BATCH_NORM = {"input": None, "running_mean": None, "running_var": None, "weight": None,
                "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
F_MAX_POOL = {"input": None, "kernel_size": 2, "stride": None, "padding": 0, "dilation": 1,
              "ceil_mode": False, "return_indices": False}
TRANSPOSED_CONVOLUTION = {"input": None, "weight": None, "bias": None, "stride": 1, "padding": 0,
                          "output_padding": 0, "groups": 1, "dilation": 1}
CONVOLUTION = {"input": None, "weight": None, "bias": None, "stride": 1, "padding": 0,
               "dilation": 1, "groups": 1}


F_DROPOUT = {"input": None, "p": 0.5, "training": True, "inplace": False}
F_PAD = {"input": None, "pad": None, "mode": "constant", "value": None}


def padded_by(options: dict[str, Any], axes: int,
              module_of: ModuleOf | None = None) -> tuple[fx.Node, list[int]] | None:
    """What a zero padding before a convolution pads, and (top, bottom, left, right) of it."""
    node = options["input"]
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return None
    module: Any = module_of(node) if module_of is not None else None
    if type(module) in PADDINGS and len(node.args) == 1 and not node.kwargs:
        found = {"input": node.args[0], "pad": module.padding, "mode": "constant",
                 "value": module.value}
    elif node.op == "call_function" and node.target in PADS:
        found = arguments(node, F_PAD)
    else:
        return None
    sides = found["pad"] if isinstance(found["pad"], tuple | list) else ()
    plain = (found["mode"], found["value"] or 0) == ("constant", 0)
    whole = len(sides) == 2 * axes and all(type(side) is int and side >= 0 for side in sides)
    if not plain or not whole:
        return None
    if _one(options["padding"]) != 0:
        return None
    return found["input"], [side for i in reversed(range(axes)) for side in sides[2 * i:2 * i + 2]]


def is_in_eval_mode(norm: fx.Node) -> bool:
    """Whether a function normalises with the numbers that it is given."""
    return arguments(norm, F_BATCH_NORM)["training"] is False


def is_quiet(node: fx.Node) -> bool:
    """Whether a call is a dropout that drops nothing."""
    if node.op != "call_function" or node.target not in DROPOUTS:
        return False
    options = arguments(node, F_DROPOUT)
    return options["training"] is False or options["p"] == 0


def arguments(node: fx.Node, defaults: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by name."""
    return {**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs}


def _arguments(node: fx.Node, defaults: dict[str, Any]) -> dict[str, Any]:
    found = arguments(node, defaults)
    if found.get("stride", 0) is None or found.get("stride", 0) == []:
        found["stride"] = found["kernel_size"]  # a pool that does not say steps by its window
    return found


def _one(value: Any) -> Any:
    """A number that stands for both axes."""
    if isinstance(value, tuple | list):
        return value[0] if len(set(value)) == 1 else None
    return value


def _only_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None

"""A model as a list of plain operations, so that every engine gets the same numbers."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.optimization import fuse
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional as F

from ..core.errors import TilewiseError

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Node:
    """One operation: conv, linear, relu, maxpool, mean, flatten, add or constant."""

    op: str
    name: str
    inputs: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class Graph:
    """Operations in order; the input is called x, the result is the last one's."""

    nodes: tuple[Node, ...]
    input_shape: tuple[int, ...]


class CannotExport(TilewiseError):
    """The model has an operation that is not written for other engines."""


@torch.no_grad()
def export(model: nn.Module, example: Tensor) -> Graph:
    """The model in eval mode, batch norms multiplied into the convolutions before them."""
    if example.dtype != torch.float32:
        raise CannotExport(f"dtype is {example.dtype}, peers are given float32")
    try:
        traced = fuse(copy.deepcopy(model).eval())
        ShapeProp(traced).propagate(example[:1])
    except Exception as error:
        raise CannotExport(f"the model cannot be traced for other engines: {error}") from error
    nodes: list[Node] = []
    names: dict[str, str] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            if names:
                raise CannotExport("the model has several inputs, peers are given one")
            names[node.name] = "x"
        elif node.op != "output":
            made = _convert(traced, node, tuple(names[i.name] for i in node.all_input_nodes))
            if made is not None:
                nodes.append(made)
            names[node.name] = made.name if made else names[node.all_input_nodes[0].name]
    return Graph(tuple(nodes), tuple(example.shape))


def _convert(model: fx.GraphModule, node: fx.Node, inputs: tuple[str, ...]) -> Node | None:
    """An operation, or None for what does nothing in eval mode."""
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(model)
        return Node("constant", node.name, (), {}, {"value": _array(value)})
    kind = node.target
    module = None
    if node.op == "call_module":
        module = model.get_submodule(str(node.target))
        kind = type(module)
    rule = RULES.get(kind)
    if rule is None:
        raise CannotExport(f"{getattr(kind, '__name__', kind)} is not written for other engines")
    made = rule(node, module)
    return None if made is None else Node(made[0], node.name, inputs, *made[1:])


Made = tuple[str, dict[str, Any], Arrays] | None
Rule = Callable[[fx.Node, Any], Made]


def _conv(node: fx.Node, conv: Any) -> Made:
    if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        raise CannotExport(f"padding is {conv.padding!r} ({conv.padding_mode}), peers are given "
                           "numbers and zeros")
    bias = np.zeros(conv.out_channels, np.float32) if conv.bias is None else _array(conv.bias)
    return "conv", {"stride": list(conv.stride), "padding": list(conv.padding),
                    "dilation": list(conv.dilation), "groups": conv.groups}, {
                        "weight": _array(conv.weight), "bias": bias}


def _linear(node: fx.Node, linear: Any) -> Made:
    bias = np.zeros(linear.out_features, np.float32) if linear.bias is None else _array(linear.bias)
    return "linear", {}, {"weight": _array(linear.weight), "bias": bias}


def _pool(node: fx.Node, pool: Any) -> Made:
    if pool.dilation not in (1, (1, 1)) or pool.ceil_mode:
        raise CannotExport("max-pooling is dilated or rounds up, peers are given plain pooling")
    return _max_pool(pool.kernel_size, pool.stride, pool.padding)


def _max_pool(size: Any, stride: Any, padding: Any) -> Made:
    return "maxpool", {"size": _pair(size), "stride": _pair(size if stride is None else stride),
                       "padding": _pair(padding)}, {}


def _functional_pool(node: fx.Node, _: Any) -> Made:
    arguments = [*node.args[1:], None, None, None][:3]
    size = node.kwargs.get("kernel_size", arguments[0])
    stride = node.kwargs.get("stride", arguments[1])
    return _max_pool(size, stride, node.kwargs.get("padding", arguments[2] or 0))


def _adaptive(node: fx.Node, pool: Any) -> Made:
    wanted = _pair(pool.output_size)
    found = list(node.all_input_nodes[0].meta["tensor_meta"].shape[-2:])
    if wanted == found:
        return None
    if wanted == [1, 1]:
        return "mean", {}, {}
    raise CannotExport(f"adaptive pooling from {found} to {wanted} is not written for other "
                       "engines")


def _flatten(node: fx.Node, module: Any) -> Made:
    start = module.start_dim if module is not None else [*node.args[1:], 1][0]
    if node.kwargs.get("start_dim", start) != 1:
        raise CannotExport(f"flatten starts at {start}, peers are given 1")
    return "flatten", {}, {}


def _add(node: fx.Node, _: Any) -> Made:
    if len(node.all_input_nodes) != 2:
        raise CannotExport("a sum with a number is not written for other engines")
    return "add", {}, {}


def _relu(node: fx.Node, _: Any) -> Made:
    return "relu", {}, {}


def _nothing(node: fx.Node, _: Any) -> Made:
    return None


RULES: dict[Any, Rule] = {
    nn.Conv2d: _conv, nn.Linear: _linear, nn.MaxPool2d: _pool, nn.AdaptiveAvgPool2d: _adaptive,
    nn.ReLU: _relu, F.relu: _relu, torch.relu: _relu, nn.Flatten: _flatten,
    torch.flatten: _flatten, operator.add: _add, torch.add: _add, nn.Dropout: _nothing,
    nn.Identity: _nothing, F.max_pool2d: _functional_pool, torch.max_pool2d: _functional_pool,
}


def _array(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.detach().numpy())


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)

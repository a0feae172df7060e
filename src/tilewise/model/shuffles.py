"""Channel shuffles as models write them: a view of five axes, two of them swapped, a view back."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ..runtime.shuffling import channel_shuffle
from .effects import Effects
from .layout import settled
from .native import Value, filled

SHAPES = ("view", "reshape", torch.reshape)
FLATTENED = ("flatten", torch.flatten)
SWAPPED = {"transpose": (1, 2), torch.transpose: (1, 2), "permute": (0, 2, 1, 3, 4),
           torch.permute: (0, 2, 1, 3, 4)}


class Shuffle:
    """The nodes of one, in their order."""

    def __init__(self, nodes: list[fx.Node]) -> None:
        self.nodes = nodes

    @property
    def operands(self) -> list[fx.Node]:
        """The image, then sizes that are values of the graph."""
        return list(dict.fromkeys(source for node in self.nodes for source in node.all_input_nodes
                                  if source not in self.nodes))

    def settled(self) -> tuple[Shuffled, list[fx.Node]]:
        """What runs it, and in whose place; operands are as the graph has them now."""
        numbers = {node: Value(i) for i, node in enumerate(self.operands)}
        first, last = (map_arg(node.args[1:], numbers.__getitem__)
                       for node in (self.nodes[0], self.nodes[-1]))
        return Shuffled(first, None if self.nodes[-1].target in FLATTENED else last), self.nodes


class Shuffled:
    """shuffled(x, *sizes): by a kernel if the views are such as they must be; `last` may be None
    for one that flattens both axes."""

    def __init__(self, first: Any, last: Any) -> None:
        self._first, self._last = first, last

    def __call__(self, x: Any, *sizes: Any) -> Tensor | None:
        if not isinstance(x, Tensor) or x.dim() != 4 or x.numel() == 0:
            return None
        n, c, h, w = x.shape
        if any(isinstance(size, Tensor) for size in sizes):
            return None  # whose value may be another in the next call
        five = _resolved(filled(self._first, (x, *sizes)), x.numel())
        if len(five) != 5 or min(five[1], five[2]) < 2 or five[1] * five[2] != c or (
                five[0], *five[3:]) != (n, h, w):
            return None
        back = self._last and _resolved(filled(self._last, (x, *sizes)), x.numel())
        return channel_shuffle(x, five[1]) if back in (None, (n, c, h, w)) else None


def _resolved(sizes: Sequence[Any], count: int) -> tuple[int, ...]:
    """Sizes of a view with no -1 in them."""
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = sizes[0]
    known = prod(size for size in sizes if size != -1)
    return tuple(count // known if size == -1 and known else size for size in sizes)


def shuffles(graph: fx.Graph, effects: Effects) -> dict[fx.Node, Shuffle]:
    """All of a graph, by their last node."""
    found = {}
    for node in graph.nodes:
        nodes = _nodes(node)
        if nodes is not None and not effects.is_written_between(
                nodes[0], nodes[-1], [nodes[0].args[0]], set(nodes)):
            found[nodes[-1]] = Shuffle(nodes)
    return found


def _nodes(first: fx.Node) -> list[fx.Node] | None:
    if not _calls(first, SHAPES):
        return None
    swap = _next(first)
    if swap is None or not _calls(swap, tuple(SWAPPED)) or not _swaps(swap):
        return None
    nodes, last = [first, swap], _next(swap)
    if last is not None and _calls(last, ("contiguous", settled)) and len(last.args) == 1:
        nodes, last = [*nodes, last], _next(last)
    if last is None or not (_calls(last, SHAPES) or (
            _calls(last, FLATTENED) and last.args[1:] == (1, 2))):
        return None
    return [*nodes, last]


def _calls(node: fx.Node, targets: tuple[Any, ...]) -> bool:
    return (node.op in ("call_function", "call_method") and node.target in targets
            and not node.kwargs and bool(node.args) and isinstance(node.args[0], fx.Node))


def _swaps(node: fx.Node) -> bool:
    axes: Any = node.args[1:]
    if len(axes) == 1 and isinstance(axes[0], tuple | list):
        axes = tuple(axes[0])
    return axes == SWAPPED[node.target]


def _next(node: fx.Node) -> fx.Node | None:
    """Who alone reads a node, as its first argument."""
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    return user if user.args and user.args[0] is node else None

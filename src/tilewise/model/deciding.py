"""Numbers that a model's Python asks for: known where they follow from the sizes of its inputs.

Where axes, types and devices tell it, it holds for inputs of all sizes. Else it holds for inputs of
the same shapes, and for the parameters and options that modules had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from .contents import FIXED, Refused
from .effects import SIZES, Effects, is_number, name_of
from .graphs import known_module
from .guards import Guards, Passing
from .layout import PLAIN
from .shadows import MODULES, RIGID, Shadows, Unknown

Form = tuple[torch.Size, ...]


def forms_of(tensors: Sequence[Tensor]) -> Form:
    """All that numbers can follow from."""
    return tuple(x.shape for x in tensors)


class _Shapes:
    """Those that some tensors have now."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)

    def __call__(self) -> list[torch.Size]:
        return [tensor.shape for tensor in self._tensors]


class Deciding:
    """number(node): its value with these tensors as inputs.

    Args:
        graph: As far as it is traced.
        called: The modules that it calls, by name.
        tensors: Modules and the names of their tensors, by name.
        guards: They get the parameters that a number depends on.
        inputs: Of the graph, in their order.
        is_sized: Whether a graph for their sizes alone is wanted.
    """

    def __init__(self, graph: fx.Graph, called: dict[str, nn.Module],
                 tensors: dict[str, tuple[nn.Module, str]], guards: Guards,
                 inputs: Sequence[Tensor], is_sized: bool) -> None:
        self._graph, self._called, self._tensors = graph, called, tensors
        self._guards, self._is_sized = guards, is_sized
        self.shadows = Shadows(graph, inputs, self._module_of, tensors, guards)
        self._numbers: set[fx.Node] = set()  # of the graph so far
        self.has_decided = False

    def number(self, node: fx.Node) -> Any:
        try:
            return self.shadows.number(node)
        except Unknown:
            return self._by_sizes(node)

    def _by_sizes(self, node: fx.Node) -> Any:
        self._numbers = set()
        for other in self._graph.nodes:
            if is_number(other, self._numbers, SIZES):
                self._numbers.add(other)
        if node not in self._numbers:
            raise Refused(f"Python depends on the value of {node}")
        if not self._is_sized:
            raise Passing(f"Python depends on {node}")
        needed = self._needed(node)
        self._check(needed)
        self.has_decided = True
        return self._value(needed)

    def _needed(self, node: fx.Node) -> list[fx.Node]:
        """All that a node follows from, in the graph's order, and itself."""
        found, open_ = {node}, [node]
        while open_:
            more = [source for source in open_.pop().all_input_nodes if source not in found]
            found.update(more)
            open_ += more
        return [other for other in self._graph.nodes if other in found]

    def _module_of(self, node: fx.Node) -> Any:
        return known_module(self._called, node)

    def _check(self, needed: list[fx.Node]) -> None:
        """Sizes must follow from sizes, whatever is written."""
        effects = Effects(self._graph, self._module_of)
        if effects.writes_outside:
            raise Refused("it writes to its inputs, or to parameters")
        writing = [node for node in self._graph.nodes if effects.written(node)]
        for node in (*needed, *writing):
            if not self._is_plain(node):
                raise Refused(f"{node} may have another size in every call")

    def _is_plain(self, node: fx.Node) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return True
        module = self._module_of(node)
        if node.op == "call_module":
            learns = isinstance(module, _NormBase) and module.training
            return isinstance(module, MODULES) and not learns
        # by a mask, as many as there are; by a number, one
        picks = name_of(node) == "getitem" and not self._numbers.issuperset(
            node.all_input_nodes[1:])
        return not picks and (name_of(node) in PLAIN | RIGID or node in self._numbers)

    def _value(self, needed: list[fx.Node]) -> Any:
        try:
            found = self.shadows.of(needed[-1]).value
        except Unknown:
            raise Refused(f"{needed[-1]} may have another size in every call") from None
        for node in needed:
            if node.op == "get_attr":
                self._relies_on(self._tensors[str(node.target)][0])
            if node.op == "call_module":
                self._relies_on(self._called[str(node.target)])
        return found

    def _relies_on(self, module: nn.Module) -> None:
        """The tensors that a module has, and its options: others might make other sizes."""
        found = []
        for space in (module.__dict__["_parameters"], module.__dict__["_buffers"]):
            for name, tensor in space.items():
                self._guards.reads(space, name, tensor)
                found += [] if tensor is None else [tensor]
        self._guards.asks(_Shapes(found))
        for name, value in module.__dict__.items():
            if not name.startswith("_") and isinstance(value, (*FIXED, tuple)):
                self._guards.reads(module.__dict__, name, value)

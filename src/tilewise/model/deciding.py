"""Numbers that a model's Python asks for: known where they follow from the sizes of its inputs.

The graph as far as it is traced is run once. What is decided by it holds for inputs of the same
shapes, and for the parameters and options that modules had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.nn.modules.batchnorm import _NormBase

from ..conv.options import output_shape
from .contents import FIXED, Refused
from .effects import MODULES as FRESH_MODULES
from .effects import SIZES, Effects, is_number, name_of, torch_module
from .guards import Guards, Passing
from .layout import PLAIN
from .native import function_of

Form = tuple[torch.Size, ...]
# whose results have sizes that follow from those of their arguments
MODULES = (*FRESH_MODULES, nn.Identity, nn.Flatten, nn.PixelShuffle, nn.PixelUnshuffle,
           nn.ZeroPad2d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# whose results have the sizes of their arguments
ALIKE = (nn.ReLU, nn.ReLU6, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid,
         nn.Hardtanh, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Softplus, nn.Identity)


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
    """number(node): its value with these tensors as inputs; without them it is not known now.

    Args:
        graph: As far as it is traced.
        called: The modules that it calls, by name.
        tensors: Modules and the names of their tensors, by name.
        guards: They get the parameters that a number depends on.
        inputs: None where a graph for all sizes is wanted.
    """

    def __init__(self, graph: fx.Graph, called: dict[str, nn.Module],
                 tensors: dict[str, tuple[nn.Module, str]], guards: Guards,
                 inputs: Sequence[Tensor] | None) -> None:
        self._graph, self._called, self._tensors = graph, called, tensors
        self._guards, self._inputs = guards, inputs
        self._numbers: set[fx.Node] = set()  # of the graph so far
        self.has_decided = False

    def number(self, node: fx.Node) -> Any:
        self._numbers = set()
        for other in self._graph.nodes:
            if is_number(other, self._numbers, SIZES):
                self._numbers.add(other)
        if node not in self._numbers:
            raise Refused(f"Python depends on the value of {node}")
        if self._inputs is None:
            raise Passing(f"Python depends on {node}")
        needed = self._needed(node)
        self._check(needed)
        self.has_decided = True
        return self._run(needed)

    def _needed(self, node: fx.Node) -> list[fx.Node]:
        """All that a node follows from, in the graph's order, and itself."""
        found, open_ = {node}, [node]
        while open_:
            more = [source for source in open_.pop().all_input_nodes if source not in found]
            found.update(more)
            open_ += more
        return [other for other in self._graph.nodes if other in found]

    def _module_of(self, node: fx.Node) -> Any:
        known = node.op == "call_module" and not node.meta.get("opaque")
        return torch_module(self._called[str(node.target)]) if known else None

    def _check(self, needed: list[fx.Node]) -> None:
        """Running it must leave no trace, and sizes must follow from sizes."""
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
        return not picks and (name_of(node) in PLAIN or node in self._numbers)

    @torch.no_grad()
    def _run(self, needed: list[fx.Node]) -> Any:
        inputs: dict[fx.Node, Tensor] = {}
        given = iter(self._inputs or ())
        for node in self._graph.nodes:
            if node.op == "placeholder":
                inputs[node] = next(given)
        uses = {source: node for node in needed for source in node.all_input_nodes}
        values: dict[fx.Node, Any] = {}
        for node in needed:
            values[node] = inputs[node] if node in inputs else self._value(node, values)
            for source in node.all_input_nodes:
                if uses[source] is node:
                    values.pop(source, None)
        return values[needed[-1]]

    def _value(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            module, name = self._tensors[str(node.target)]
            self._relies_on(module)
            return getattr(module, name)
        args, kwargs = (map_arg(part, values.__getitem__) for part in (node.args, node.kwargs))
        if node.op != "call_module":
            return function_of(node)(*args, **kwargs)
        module = self._called[str(node.target)]
        for part in module.modules():
            self._relies_on(part)
        found = None if kwargs else _sized(module, *args)
        return type(module).forward(module, *args, **kwargs) if found is None else found

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


def _sized(module: nn.Module, x: Any = None, *more: Any) -> Tensor | None:
    """A result of the right size and of no values, in memory of its own: what comes next may write
    to it. None where only a run tells it, or an error."""
    if more or not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    if type(module) in ALIKE:
        return torch.empty_like(x)
    if type(module) is nn.BatchNorm2d and x.dim() == 4 and x.shape[1] == module.num_features:
        return torch.empty_like(x)
    if type(module) not in CONVOLUTIONS:
        return None
    return _convolved(module, x)


def _convolved(module: Any, x: Tensor) -> Tensor | None:
    weight = module.weight
    fits = (x.dim() == weight.dim() and x.shape[1] == weight.shape[1] * module.groups
            and x.dtype == weight.dtype and module.padding_mode == "zeros")
    shape = output_shape(x, weight, module.stride, module.padding, module.dilation) if fits else ()
    return x.new_empty(shape) if shape and min(shape) > 0 else None

"""A graph with the modules and tensors behind its names, run as a program or node by node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from ..conv.linear import Linear
from .effects import torch_module
from .native import Native
from .nn import Block
from .programs import Programs

OURS = (Block, Linear, Native)


class Names:
    """What a graph's code finds by name: modules, and tensors where modules have them now."""

    def __init__(self, modules: dict[str, Any], tensors: dict[str, tuple[nn.Module, str]]) -> None:
        # our own have no hooks, and nn.Module's look for some takes longer than ours for a plan
        self.__dict__.update({name: step.forward if isinstance(step, OURS) else step
                              for name, step in modules.items()})
        self._tensors = tensors

    def __getattr__(self, name: str) -> Any:
        module, attribute = self._tensors[name]
        return getattr(module, attribute)


# what convolutions call inside; transposed ones only inherit it
INNER = {None, *(kind._conv_forward for kind in (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.modules.conv._ConvNd))}


def known_module(steps: dict[str, Any], node: fx.Node) -> Any:
    """The module a node calls, if it is known what it does."""
    if node.op != "call_module":
        return None
    module = steps[str(node.target)]
    if isinstance(module, OURS):
        return module
    own, inner = module.__dict__.get("forward"), getattr(type(module), "_conv_forward", None)
    if node.meta.get("opaque") or "_conv_forward" in module.__dict__ or inner not in INNER or (
            own is not None and not hasattr(own, "captures")):
        return None
    return torch_module(module)


class Graph:
    """results(tensors): what a graph gives, by a program where there is one."""

    graph: fx.Graph
    steps: dict[str, Any]
    tensors: dict[str, tuple[nn.Module, str]]

    def settle(self) -> None:
        """All passes are done."""
        self._function, self._names = self._compiled(), Names(self.steps, self.tensors)
        self.programs = Programs(self)

    def module_of(self, node: fx.Node) -> Any:
        return known_module(self.steps, node)

    def results(self, tensors: Sequence[Tensor]) -> Sequence[Any]:
        found = self.programs.run(tensors)
        return self.run(self._names, tensors) if found is None else found

    def run(self, names: Names, tensors: Iterable[Tensor]) -> tuple[Any, ...]:
        """The results, with these steps and tensors behind the names."""
        results: tuple[Any, ...] = self._function(names, *tensors)
        return results

    def _compiled(self) -> Callable[..., Any]:
        code = self.graph.python_code(root_module="self")
        space = dict(code.globals)
        exec(compile(code.src, "<tilewise graph>", "exec"), space)
        return space["forward"]

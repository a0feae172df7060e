"""What is left of a model that keeps nothing of the original."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from ..conv.checks import CannotScript
from ..core.errors import TilewiseError
from .capture import Capture
from .captured import Learned, form_of, is_traced
from .graphs import known_module
from .guards import Guards
from .layout import enter, image_of, leave, settled
from .programs import Programs
from .shadows import granted
from .values import asserted, exactly

SET = ("_parts", "activation", "pool", "max_error")  # of blocks, when they were made


class Released(nn.Module):
    """A graph that is all that is left of a model."""

    _whole: _Whole | None = None
    _asked: frozenset[Any] = frozenset()

    def __init__(self, graph: fx.GraphModule, capture: Capture, form: Any) -> None:
        super().__init__()
        self.body, self._form, self._ended = graph, form, capture.ended
        self._guards: Guards | None = capture.guards
        self._asked, self._granted = capture.asked, capture.granted
        self.tuned = Learned()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_guards": None, "_whole": None}  # they are of this process

    def __prepare_scriptable__(self) -> Any:
        raise CannotScript

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        if form_of(leaves, spec) != self._form:
            raise TilewiseError("the model was released for arguments of another form: give "
                                "optimize an example of those that it is called with")
        if self._guards is not None and not self._guards.hold():
            raise TilewiseError("the model was released, and what it reads beside its arguments "
                                "has changed since: optimize it again")
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if self._asked and self._granted != granted(tensors, self._asked):
            raise TilewiseError("the model was released for tensors of other sizes or types, with "
                                "other numbers of axes, on other devices or under another "
                                "autocast, and its code asks for these: give optimize an example "
                                "of those that it is called with")
        results = None if is_traced() else self.whole.run(tensors)
        return self._ended(self.body(*tensors) if results is None else results)

    @property
    def whole(self) -> _Whole:
        if self._whole is None or not self._whole.is_of(self.body):
            self._whole = _Whole(self.body)
        return self._whole


class Retracer(fx.Tracer):
    """A graph that is loaded is traced anew, but not through functions of ours."""

    def __init__(self) -> None:
        super().__init__(autowrap_functions=(enter, leave, image_of, settled, exactly, asserted))

    def trace(self, *args: Any, **kwargs: Any) -> fx.Graph:
        graph = super().trace(*args, **kwargs)
        for node in graph.nodes:  # else torch would remember every graph's code for good
            node.meta.pop("is_wrapped", None)
        return graph


class _Whole:
    """The parts of a released graph by their names, and its programs."""

    def __init__(self, body: fx.GraphModule) -> None:
        self._body, self._hooks, self._parts = body, Guards(), Guards()
        self.graph = body.graph
        self.steps: dict[str, Any] = {
            str(node.target): attrgetter(str(node.target))(body)  # not all of them are modules
            for node in self.graph.nodes if node.op == "call_module"}
        self.tensors = {str(node.target): _owner(body, str(node.target))
                        for node in self.graph.nodes if node.op == "get_attr"}
        self._hooks.unhooked(body.modules())
        self._guard()
        self.programs = Programs(self)

    def _guard(self) -> None:
        """A module may be replaced, or set otherwise, as long as it is there for all to see."""
        for name in ("_graph", "_code"):
            self._parts.reads(self._body.__dict__, name, self._body.__dict__.get(name))
        for module in self._body.modules():
            self._parts.is_a(module)
            self._parts.lists(module._modules)
            for name in SET:
                if name in module.__dict__:
                    self._parts.reads(module.__dict__, name, module.__dict__[name])

    def is_of(self, body: fx.GraphModule) -> bool:
        return self._body is body and self._parts.hold()

    def module_of(self, node: fx.Node) -> Any:
        return known_module(self.steps, node)

    def run(self, tensors: Sequence[Tensor]) -> Sequence[Any] | None:
        """As `Programs.run`; None also where hooks would not be called."""
        return self.programs.run(tensors) if self._hooks.hold() else None


def _owner(body: nn.Module, target: str) -> tuple[Any, str]:
    """The module that has a tensor, and its name there."""
    path, _, name = target.rpartition(".")
    return body.get_submodule(path), name

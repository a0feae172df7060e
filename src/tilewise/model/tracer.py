"""Tracing that is right or refuses: a graph of torch's operators, and what it takes for granted.

Tensors are proxies; everything else is the model's own Python, which runs once. Whatever it reads
besides tensors becomes a guard, whatever a graph could not repeat is refused.
"""

from __future__ import annotations

import functools
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .contents import CONTAINERS, Refused, snapshot
from .deciding import Deciding
from .graphs import known_module
from .guards import HOOKS, Guards
from .kinds import SEVERAL, may_be_none, may_be_truth, note_result
from .patterns import CONVOLUTIONS
from .purity import Watch, is_models
from .surroundings import has_company, modes, no_collection
from .values import Attribute, Value, is_compared_next, is_none_asked

LOCK = threading.RLock()  # modules are patched for all threads while one is traced
OF_TYPES = (torch.promote_types, torch.can_cast)
QUIET = {*HOOKS, "_parameters", "_buffers", "_non_persistent_buffers_set", "_compiled_call_impl",
         "_is_full_backward_hook", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
         "_forward_pre_hooks_with_kwargs", "__dict__", "__class__"}


class _Functions(TorchFunctionMode):
    """Functions of torch that no proxy is an argument of belong to the graph as well."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, function: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in OF_TYPES:
            return function(*args, **kwargs)
        if getattr(function, "__name__", "") in ("__set__", "__delete__"):
            raise Refused("an attribute of a tensor is set")
        if torch.overrides.is_tensor_method_or_property(function):
            name = function.__name__
            if name == "__get__":
                return getattr(self._tracer.known_tensor(args[0]), function.__self__.__name__)
            return self._tracer.create_proxy("call_method", name, args, kwargs)
        return self._tracer.create_proxy("call_function", function, args, kwargs)


class Tracer(fx.Tracer):
    """One attempt at a module; `opaque` modules are called, not looked into.

    If it `is_sized`, the graph may be one for these inputs' sizes alone.
    """

    def __init__(self, root: nn.Module, opaque: dict[nn.Module, Refused],
                 is_sized: bool = False) -> None:
        super().__init__(autowrap_modules=())
        self.root, self.opaque, self.guards = root, opaque, Guards()
        self.paths = {module: name for name, module in root.named_modules()}
        self.stack: list[nn.Module] = []
        self.called: dict[str, nn.Module] = {}
        self.tensors: dict[str, tuple[nn.Module, str]] = {}
        self._thread: int | None = threading.get_ident()
        self._is_sized = is_sized
        self._copies: list[tuple[Any, Any]] = []
        self._modes = modes()
        self._spaces = [(space, dict(space)) for module in self.paths for space in (
            module.__dict__, *map(module.__dict__.get, ("_parameters", "_buffers")))
            if space is not None]
        self.watch = Watch(self.guards)

    def run(self, leaves: list[Any], spec: Any) -> tuple[fx.Graph, list[Any], Any]:
        """The graph, and the result as constants and nodes in their structure."""
        self.graph = fx.Graph(tracer_cls=fx.Tracer)
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.deciding = Deciding(self.graph, self.called, self.tensors, self.guards, inputs,
                                 self._is_sized)
        given = [self.create_proxy("placeholder", f"p{i}", (), {}) if isinstance(leaf, Tensor)
                 else leaf for i, leaf in enumerate(leaves)]
        args, kwargs = tree_unflatten(given, spec)
        try:
            result = self._traced(args, kwargs)
        finally:
            changed = self.guards.restore()
            left = self._restore()
        if left:
            raise Refused(f"{left[0]} of a module is set")
        if changed:
            raise Refused("a container outside of the model is changed")
        if tree_map(id, tree_flatten((args, kwargs))[0]) != tree_map(id, given):
            raise Refused("an argument is changed")
        if modes() != self._modes:
            raise Refused("a mode of torch is left switched")
        self.watch.check()
        if any(snapshot(copy) != before for copy, before in self._copies):
            raise Refused("a container of a module is changed")
        self.guards.ends(self.watch.names)
        return self._outputs(result)

    def _restore(self) -> list[str]:
        """Names under which stand-ins were left in modules, which have what they had."""
        found = []
        for space, before in self._spaces:
            for name in [name for name, value in space.items() if type(value) in (
                    Value, Attribute)]:
                found.append(name)
                if name in before:
                    space[name] = before[name]
                else:
                    del space[name]
        self._spaces = []  # else they would keep weights that are replaced
        return found

    def _traced(self, args: Any, kwargs: Any) -> Any:
        state = np.random.get_state()
        try:
            with LOCK, no_collection(), self._patched(), _Functions(self), self.watch:
                if type(self.root) in CONVOLUTIONS:
                    return self.proxy(self._leaf(self.root, args, kwargs))
                result = self.call_module(self.root, None, args, kwargs)
        finally:
            drawn = pickle.dumps(np.random.get_state()) != pickle.dumps(state)
            if drawn and not has_company():  # other threads must not get their numbers twice
                np.random.set_state(state)
        if drawn:
            raise Refused("random numbers of NumPy are drawn")
        return result

    def _outputs(self, result: Any) -> tuple[fx.Graph, list[Any], Any]:
        leaves, spec = tree_flatten(result)
        if any(isinstance(leaf, types.FunctionType | types.MethodType | functools.partial)
               for leaf in leaves):
            raise Refused("a result is a function, which may hold tensors")
        found = [leaf.node if type(leaf) in (Value, Attribute) else snapshot(leaf)
                 for leaf in leaves]
        self.graph.output(tuple(leaf for leaf in found if isinstance(leaf, fx.Node)))
        return self.graph, found, spec

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Modules tell what is read from them and written to them, in this thread."""
        kinds = {"__call__": self._call, "__getattr__": self._found, "__setattr__": self._written,
                 "__delattr__": self._written}
        before = {name: nn.Module.__dict__[name] for name in kinds}

        def patch(name: str) -> Callable[..., Any]:
            real, mine = before[name], kinds[name]

            def patched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() != self._thread:
                    return real(module, *args, **kwargs)
                return mine(module, real, *args, **kwargs)

            return patched

        def read(module: nn.Module, name: str) -> Any:
            value = object.__getattribute__(module, name)
            if threading.get_ident() != self._thread:
                return value
            if name in QUIET:
                asking = sys._getframe(1)
                if name == "__dict__" and is_models(asking) and asking.f_code.co_name not in (
                        "__getattr__", "__getattribute__"):
                    raise Refused("the dictionary of a module is read")
                return value
            return self._read(module, name, value)

        for name in kinds:
            setattr(nn.Module, name, patch(name))
        nn.Module.__getattribute__ = read  # type: ignore[method-assign]
        try:
            yield
        finally:
            del nn.Module.__getattribute__
            for name, real in before.items():
                setattr(nn.Module, name, real)

    def _call(self, module: nn.Module, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if module not in self.paths:
            if any(True for _ in module.parameters()):
                raise Refused("a module with parameters is made, or is another model's")
            return real(module, *args, **kwargs)
        if self._is_leaf(module):
            with self.watch.aside():
                return self.proxy(self._leaf(module, args, kwargs))
        return self.call_module(module, real, args, kwargs)

    def call_module(self, module: nn.Module, _: Any, args: Any, kwargs: Any) -> Any:
        self.stack.append(module)
        self.guards.is_a(module)
        own = module.__dict__.get("forward")
        self.watch.closures.meets(type(module).forward)
        # what stands there by optimize, or calls what stood there
        if own is None or hasattr(own, "captures") or self.stack == [self.root]:
            result = type(module).forward(module, *args, **kwargs)
        else:
            result = own(*args, **kwargs)
        self.stack.pop()
        return result

    def _is_leaf(self, module: nn.Module) -> bool:
        return module in self.opaque or is_hooked(module) or is_torchs(module)

    def _leaf(self, module: nn.Module, args: Any, kwargs: Any) -> fx.Node:
        self.guards.is_a(module)
        name = "m_" + self.paths[module].replace(".", "_")
        while self.called.setdefault(name, module) is not module:
            name += "_"
        node = self.create_node("call_module", name, self.create_arg(args),
                                self.create_arg(kwargs))
        node.meta["opaque"] = module in self.opaque or is_hooked(module)
        if SEVERAL in module.__dict__:
            self.guards.reads(module.__dict__, SEVERAL, module.__dict__[SEVERAL])
        note_result(node, known_module(self.called, node))
        return node

    def _read(self, module: nn.Module, name: str, value: Any) -> Any:
        """An attribute that a module has itself, or its class."""
        if module not in self.paths:
            return value
        space = module.__dict__
        if name == "_modules":
            self.guards.lists(value)
            return value
        if name not in space:
            return self._inherited(module, name, value)
        if isinstance(value, Tensor):
            return self._asked_tensor(module, space, name)
        if isinstance(value, CONTAINERS):
            self.guards.reads(space, name, snapshot(value))
            return self._copied(value)
        self.guards.knows(space, name, value)
        return value

    def _inherited(self, module: nn.Module, name: str, value: Any) -> Any:
        kind = type(module)
        if hasattr(nn.Module, name):
            return value
        self.guards.reads(module.__dict__, name, None)
        own = getattr(kind, name, None)
        if isinstance(own, CONTAINERS):
            self.guards.inherits(kind, name, snapshot(own))
            return self._copied(own)
        self.guards.inherits(kind, name, own)
        self.watch.closures.meets(own)
        return value

    def _copied(self, value: Any) -> Any:
        """A container that the model's code may write to; whether it did is looked at later."""
        self._copies.append((snapshot(value), snapshot(value)))
        return self._copies[-1][0]

    def _found(self, module: nn.Module, real: Callable[..., Any], name: str) -> Any:
        """A parameter, a buffer or a child."""
        try:
            value = real(module, name)
        except AttributeError:
            if module in self.paths:
                for kind in ("_parameters", "_buffers", "_modules"):
                    self.guards.reads(module.__dict__[kind], name, None)
                self.guards.reads(module.__dict__, name, None)
                self.guards.inherits(type(module), name, None)
            raise
        if module not in self.paths:
            return value
        for kind in ("_parameters", "_buffers", "_modules"):
            space = module.__dict__[kind]
            if name not in space:
                continue
            if isinstance(value, Tensor):
                return self._asked_tensor(module, space, name)
            self.guards.reads(space, name, value)
        return value

    def _asked_tensor(self, module: nn.Module, space: dict[str, Any], name: str) -> Value:
        if is_compared_next():
            raise Refused(f"whether a value is {name} is asked")
        return self._tensor(module, space, name)

    def _tensor(self, module: nn.Module, space: dict[str, Any], name: str) -> Value:
        self.guards.finds(space, name)
        target = f"t_{self.paths[module].replace('.', '_')}_{name}"
        while self.tensors.setdefault(target, (module, name)) != (module, name):
            target += "_"
        return self.create_proxy("get_attr", target, (), {})

    def class_of(self, target: str) -> type:
        """Of a tensor of the model."""
        module, name = self.tensors[target]
        spaces = (module._parameters, module._buffers, module.__dict__)
        return next(type(space[name]) for space in spaces if name in space)

    def _written(self, module: nn.Module, real: Callable[..., Any], name: str, *value: Any) -> None:
        if module in self.paths:
            raise Refused(f"{name} of a module is set")
        real(module, name, *value)

    def create_arg(self, a: Any) -> Any:
        if type(a) in (Value, Attribute):
            return a.node
        if isinstance(a, Tensor):
            return self.known_tensor(a).node
        return super().create_arg(a)

    def number(self, node: fx.Node) -> Any:
        """The value of a number that follows from sizes."""
        with self._as_always():
            return self.deciding.number(node)

    def attribute(self, node: fx.Node, name: str) -> Any:
        """The type or the device of a value, where that follows from those of the inputs."""
        with self._as_always():
            return self.deciding.shadows.attribute(node, name)

    def length(self, size: fx.Node) -> int | None:
        """Of a torch.Size, where it follows from those of the inputs."""
        with self._as_always():
            return self.deciding.shadows.length(size)

    @contextmanager
    def _as_always(self) -> Iterator[None]:
        """Modules and operators of torch do what they do when nothing is traced."""
        if modes()[2:] != self._modes[2:]:  # what types follow from
            raise Refused("a mode of torch is switched inside the model")
        thread, self._thread = self._thread, None
        try:
            with self.watch.aside(), torch._C.DisableTorchFunction():
                yield
        finally:
            self._thread = thread

    def known_tensor(self, tensor: Tensor) -> Value:
        for module in self.paths:
            for kind in ("_parameters", "_buffers"):
                for name, own in module.__dict__[kind].items():
                    if own is tensor:
                        return self._tensor(module, module.__dict__[kind], name)
        raise Refused("a tensor comes from outside of the model")

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        with self.watch.aside():
            return super().create_proxy(*args, **kwargs)

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None,
                    type_expr: Any = None) -> fx.Node:
        if modes() != self._modes:
            raise Refused("a mode of torch is switched inside the model")
        if kind not in ("placeholder", "get_attr"):
            self.watch.reaching.creates()
        return self.graph.create_node(kind, target, args, kwargs, name, type_expr)

    def proxy(self, node: fx.Node) -> Value:
        if node.target is not getattr and may_be_truth(node):
            self.watch.unsure(f"the result of {node}")
        if may_be_none(node) and is_none_asked():
            raise Refused(f"whether {node} is None is asked")
        return Value(node, self)


def is_hooked(module: nn.Module) -> bool:
    return any(module.__dict__.get(name) for name in HOOKS)


def is_torchs(module: nn.Module) -> bool:
    """Modules that are operators of the graph."""
    home = type(module).__module__
    return (home.startswith("torch.") and not isinstance(module, nn.Sequential)
            and type(module).__name__ != "Module")

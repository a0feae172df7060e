"""What a capture took for granted, checked before it is used again."""

from __future__ import annotations

import enum
import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torchs

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
EVERYWHERE = (torchs._global_forward_hooks, torchs._global_forward_pre_hooks,
              torchs._global_backward_hooks, torchs._global_backward_pre_hooks)
FIXED = (int, float, complex, str, bytes, type(None), type(...), range, slice, enum.Enum,
         torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type,
        functools.partial, nn.Module, staticmethod, classmethod, property,
        functools._lru_cache_wrapper)  # which answers the same arguments alike
CONTAINERS = (list, dict, OrderedDict, set, deque)


class Refused(BaseException):
    """Python that a graph cannot stand for; not an Exception, lest a model's code catch it."""


def snapshot(value: Any) -> Any:
    """A value as it is now: containers are copied, what cannot change is itself."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return kind((key, snapshot(item)) for key, item in value.items())
    if kind in (list, set, deque):
        return kind(map(snapshot, value))
    if isinstance(value, tuple | frozenset) and not isinstance(value, torch.Size):
        for item in value:
            snapshot(item)
        return value
    if isinstance(value, (*FIXED, *CODE)):
        return value
    raise Refused(f"a {kind.__qualname__}, whose changes cannot be seen")


class Guards:
    """Names and what they meant; `hold()` tells whether they still mean the same."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._classes: dict[tuple[type, str], Any] = {}
        self._states: dict[Callable[[], Any], Any] = {}
        self._tensors: dict[tuple[int, str], Any] = {}
        self._orders: list[tuple[dict[str, Any], list[Any]]] = []
        self._empty: list[Any] = list(EVERYWHERE)
        self._kinds: dict[nn.Module, type] = {}
        self._kept: list[tuple[Any, Any]] = []  # containers of others, and what they held
        self._ready: list[tuple[Callable[[str], Any], tuple[str, ...], list[Any]]] | None = None

    def reads(self, namespace: dict[str, Any], name: str, value: Any) -> None:
        """A dictionary gave this value; None stands for nothing."""
        self._names.setdefault(id(namespace), (namespace, {}))[1][name] = value

    def knows(self, namespace: dict[str, Any], name: str, value: Any) -> None:
        """A dictionary gave this value, or an object of which all that can be seen is guarded."""
        try:
            self.reads(namespace, name, snapshot(value))
        except Refused:
            self.reads(namespace, name, value)
            self.knows_object(value)
            return
        if isinstance(value, CONTAINERS):
            self._kept.append((value, snapshot(value)))

    def knows_object(self, value: Any) -> None:
        if hasattr(value, "__next__") or type(value).__module__.startswith("numpy") or (
                isinstance(value, torch.Generator)):
            raise Refused(f"a {type(value).__qualname__} is another one after every use")
        space = getattr(value, "__dict__", None)
        if type(space) is not dict or id(space) in self._names:
            return
        self._names[id(space)] = (space, {})
        for name, part in list(space.items()):
            if not isinstance(part, Tensor):
                self.knows(space, name, part)

    def inherits(self, kind: type, name: str, value: Any) -> None:
        """A class gave this value."""
        self._classes[kind, name] = value

    def asks(self, state: Callable[[], Any]) -> None:
        """A function of torch told a setting."""
        self._states[state] = state()

    def finds(self, namespace: dict[str, Any], name: str) -> None:
        """There is a tensor of this name; which one is looked up in every call."""
        self._tensors[id(namespace), name] = namespace

    def lists(self, namespace: dict[str, Any]) -> None:
        """The names, and modules, of a dictionary were gone through."""
        self._orders.append((namespace, _order(namespace)))

    def is_a(self, module: nn.Module) -> None:
        """A module's class, and the forward that it has by it or by itself, count."""
        self._kinds[module] = type(module)
        self.inherits(type(module), "forward", type(module).forward)
        self.reads(module.__dict__, "forward", module.__dict__.get("forward"))

    def restore(self) -> bool:
        """Let containers hold what they did before the model's code ran; whether they did not."""
        changed = False
        for value, before in self._kept:
            if value != before:
                changed = True
                value.clear()
                (value.update if isinstance(value, dict | set) else value.extend)(before)
        return changed

    def unhooked(self, modules: Iterable[nn.Module]) -> None:
        """Hooks of these would not be called."""
        self._empty += [module.__dict__[name] for module in modules for name in HOOKS
                        if name in module.__dict__]

    def hold(self) -> bool:
        if self._ready is None:
            self._ready = [(space.get, tuple(names), list(names.values()))
                           for space, names in self._names.values()]
        if any(self._empty):
            return False
        try:
            for get, names, values in self._ready:
                if list(map(get, names)) != values:
                    return False
            return (all(type(module) is kind for module, kind in self._kinds.items())
                    and all(getattr(kind, name, None) == value
                        for (kind, name), value in self._classes.items())
                    and all(state() == value for state, value in self._states.items())
                    and all(isinstance(space.get(name), Tensor)
                            for (_, name), space in self._tensors.items())
                    and all(_order(space) == order for space, order in self._orders))
        except Exception:  # what stands there now cannot even be compared
            return False


def _order(namespace: dict[str, Any]) -> list[Any]:
    return [(name, item if isinstance(item, nn.Module) else item is None)
            for name, item in namespace.items()]

"""What a capture took for granted, checked before it is used again."""

from __future__ import annotations

import enum
import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from copy import copy
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..conv.batch_norm import EVERYWHERE
from ..runtime.stamps import ATTEMPTS, Stamps, dicts_count, of_dict, of_kind

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
FIXED = (int, float, complex, str, bytes, type(None), type(...), range, slice, enum.Enum,
         torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type,
        functools.partial, nn.Module, staticmethod, classmethod, property,
        functools._lru_cache_wrapper)  # which answers the same arguments alike
CONTAINERS = (list, dict, OrderedDict, set, deque)
MANY = 256  # items of a container of others: a registry, which nobody changes between calls
PLAIN = ("torch.", "builtins", "tilewise.")  # whose classes do not change


def items_of(value: Any) -> list[Any]:
    """What a container of others holds; of what can change itself, which one it is."""
    pairs = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    return [(key, item if isinstance(item, FIXED) else id(item)) for key, item in pairs]


def slots_of(value: Any) -> list[Any]:
    """What an object without a dictionary holds."""
    names = [name for kind in type(value).__mro__ for name in (
        [kind.__dict__["__slots__"]] if isinstance(kind.__dict__.get("__slots__"), str)
        else kind.__dict__.get("__slots__", ()))]
    found = [getattr(value, name, None) for name in names]
    return [item if isinstance(item, FIXED) else id(item) for item in found]


class Refused(BaseException):
    """Python that a graph cannot stand for; not an Exception, lest a model's code catch it."""


class Passing(Refused):
    """Refused now; where the same sizes come again, a graph for these alone may do."""


def snapshot(value: Any) -> Any:
    """A value as it is now: containers are copied, what cannot change is itself."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return kind((key, snapshot(item)) for key, item in value.items())
    if kind in (list, set, deque):
        return kind(map(snapshot, value))
    if isinstance(value, tuple | frozenset) and not isinstance(value, torch.Size):
        items = tuple(map(snapshot, value))
        return items if kind is tuple else value
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
        self._orders: list[_Order] = []
        self._empty: list[Any] = list(EVERYWHERE)
        self._caches: dict[int, tuple[Any, int]] = {}  # with what they had computed before
        self._met: dict[int, Any] = {}  # objects by their addresses, which are so kept
        self._kinds: dict[nn.Module, type] = {}
        self._kept: dict[int, tuple[Any, Any]] = {}  # containers of others, what they held first
        self._ready: _Ready | None = None
        self._looked: tuple[Stamps | None, bool] = (None, False)  # what the last look found
        self._attempts = ATTEMPTS

    def fills(self, value: Any) -> None:
        """What a function with a cache computes while it is traced must not stay there."""
        cache = value.__func__ if type(value) is types.MethodType else value
        if isinstance(cache, functools._lru_cache_wrapper):
            self._caches.setdefault(id(cache), (cache, cache.cache_info().misses))

    def _more(self) -> None:
        self._ready, self._looked = None, (None, False)

    def reads(self, namespace: dict[str, Any], name: str, value: Any) -> None:
        """A dictionary gave this value; None stands for nothing."""
        self._more()
        self.fills(value)
        self._names.setdefault(id(namespace), (namespace, {}))[1][name] = value

    def knows(self, namespace: dict[str, Any], name: str, value: Any) -> None:
        """A dictionary gave this value, or an object of which all that can be seen is guarded."""
        try:
            self.reads(namespace, name, snapshot(value))
        except Refused:
            self.reads(namespace, name, value)
            self.knows_object(value)
            return
        self._keep(value)
        if isinstance(value, type):
            self._knows_class(value)

    def _keep(self, value: Any) -> None:
        """Containers get back what they held before the model's code ran."""
        if isinstance(value, CONTAINERS):
            self._kept.setdefault(id(value), (value, snapshot(value)))
        elif isinstance(value, tuple):
            for item in value:
                self._keep(item)

    def knows_object(self, value: Any) -> None:
        if hasattr(value, "__next__") or type(value).__module__.startswith("numpy") or (
                isinstance(value, torch.Generator)):
            raise Refused(f"a {type(value).__qualname__} is another one after every use")
        if isinstance(value, (*CONTAINERS, tuple)):
            self._knows_items(value)
        elif "__slots__" in vars(type(value)) and self._is_new(value):
            self.asks(functools.partial(slots_of, value))
        space = getattr(value, "__dict__", None)
        if type(space) is not dict or id(space) in self._names:
            return
        self._names[id(space)] = (space, {})
        self.lists(space)  # a name that it gets hides its class's
        self._knows_class(type(value))
        for name, part in list(space.items()):
            if not isinstance(part, Tensor):
                self.knows(space, name, part)

    def _knows_class(self, kind: type) -> None:
        """Settings that are attributes of a class."""
        for one in kind.__mro__:
            if one.__module__.startswith(PLAIN) or not self._is_new(one):
                continue
            for name, value in list(vars(one).items()):
                if isinstance(value, FIXED) and not name.startswith("__"):
                    self.inherits(one, name, value)

    def _knows_items(self, value: Any) -> None:
        """A container of objects, or of a class of its own."""
        if len(value) > MANY or not self._is_new(value):
            return
        self.asks(functools.partial(items_of, value))
        items = list(value.values() if isinstance(value, dict) else value)
        if isinstance(value, CONTAINERS) and all(isinstance(item, FIXED) for item in items):
            held = dict(value) if isinstance(value, dict) else copy(value)
            self._kept.setdefault(id(value), (value, held))
        for item in items:
            if not isinstance(item, (*FIXED, *CODE, Tensor)):
                self.knows_object(item)

    def _is_new(self, value: Any) -> bool:
        """Whether it was not looked at before."""
        known = id(value) in self._met
        self._met[id(value)] = value
        return not known

    def inherits(self, kind: type, name: str, value: Any) -> None:
        """A class gave this value."""
        self._more()
        self.fills(value)
        self._classes[kind, name] = value

    def asks_class(self, kind: type, name: str) -> None:
        """The same for a class that the code names, whatever it gave."""
        value = getattr(kind, name, None)
        if isinstance(value, FIXED):
            self.inherits(kind, name, value)
        elif isinstance(value, CONTAINERS) and all(isinstance(item, FIXED) for item in value):
            self.inherits(kind, name, snapshot(value))
            self._keep(value)
        elif not isinstance(value, (*CODE, Tensor)):
            self.knows_object(value)

    def asks(self, state: Callable[[], Any]) -> None:
        """A function of torch told a setting."""
        self._more()
        self._states.setdefault(state, state())

    def finds(self, namespace: dict[str, Any], name: str) -> None:
        """There is a tensor of this name; which one is looked up in every call."""
        self._more()
        self._tensors[id(namespace), name] = namespace

    def lists(self, namespace: dict[str, Any]) -> None:
        """The names, and modules, of a dictionary were gone through."""
        self._more()
        self._orders.append(_Order(namespace, list(namespace), _marks(namespace)))

    def is_a(self, module: nn.Module) -> None:
        """A module's class, and the forward that it has by it or by itself, count."""
        self._kinds[module] = type(module)
        self.inherits(type(module), "forward", type(module).forward)
        inner = "_conv_forward"  # a convolution whose is replaced may pad otherwise
        for name in ("forward", inner) if hasattr(type(module), inner) else ("forward",):
            self.reads(module.__dict__, name, module.__dict__.get(name))

    def restore(self) -> bool:
        """Let containers hold what they did before the model's code ran; whether they did not."""
        changed = False
        for cache, misses in self._caches.values():
            if cache.cache_info().misses != misses:
                cache.cache_clear()
        for value, before in self._kept.values():
            if value != before:
                changed = True
                value.clear()
                (value.update if isinstance(value, dict | set) else value.extend)(before)
        return changed

    def unhooked(self, modules: Iterable[nn.Module]) -> None:
        """Hooks of these would not be called."""
        self._more()
        self._empty += [module.__dict__[name] for module in modules for name in HOOKS
                        if name in module.__dict__]

    def hold(self) -> bool:
        ready = self._ready = self._ready or self._made_ready()
        if torch.compiler.is_compiling():  # which cannot follow addresses
            return self._calm_hold(ready) and self._rest_holds(ready)
        stamps, held = self._looked
        if stamps is not None and stamps.same():
            self._attempts = ATTEMPTS
        else:
            stamps = self._stamped(ready)  # before the look, which might miss what comes after it
            held = self._calm_hold(ready)
            self._looked = stamps, held  # both at once: threads share it
        return held and self._rest_holds(ready)

    def _stamped(self, ready: _Ready) -> Stamps | None:
        """What they are of is kept by the guards; what changes all the time gets none."""
        self._attempts -= 1
        if ready.addresses is None or self._attempts < 0:
            return None
        return Stamps(ready.addresses)

    def _rest_holds(self, ready: _Ready) -> bool:
        """What has no stamp."""
        try:
            return (ready.busy.hold() and all(map(_has_order, ready.ordered))
                    and list(map(getattr, *ready.classes, repeat(None))) == ready.inherited
                    and all(state() == value for state, value in self._states.items()))
        except Exception:  # what stands there now cannot even be compared
            return False

    def _calm_hold(self, ready: _Ready) -> bool:
        """All that has a stamp."""
        try:
            return (not any(self._empty) and ready.calm.hold()
                    and list(map(type, self._kinds)) == ready.kinds
                    and _are_tensors(map(dict.get, *ready.tensors))
                    and all(map(_has_order, self._orders)))
        except Exception:
            return False

    def _made_ready(self) -> _Ready:
        named = [(space, name, value) for space, known in self._names.values()
                 for name, value in known.items()]
        calm, busy = [
            _Named.of(row for row in named if _is_busy(row[0], row[2]) == wanted)
            for wanted in (False, True)]
        tensors = [(space, name) for (_, name), space in self._tensors.items()]
        return _Ready(calm, busy, list(self._kinds.values()), _columns(list(self._classes)),
                      list(self._classes.values()), _columns(tensors),
                      [order for order in self._orders if type(order.namespace) is not dict],
                      self._addresses(calm.spaces))

    def _addresses(self, named: list[Any]) -> list[int] | None:
        """Of words that change with what is calm."""
        spaces = {id(space): space for space in (
            *named, *self._empty, *self._tensors.values(),
            *(order.namespace for order in self._orders))}
        if not dicts_count() or not all(isinstance(space, dict) for space in spaces.values()):
            return None
        return [*map(of_dict, spaces.values()), *map(of_kind, self._kinds)]


class _Named(NamedTuple):
    """Names in dictionaries and what they meant, in columns: loops over them are not Python's."""

    spaces: list[Any]
    names: list[str]
    values: list[Any]

    @staticmethod
    def of(rows: Iterable[tuple[Any, str, Any]]) -> _Named:
        found = list(rows)
        return _Named([row[0] for row in found], [row[1] for row in found],
                      [row[2] for row in found])

    def hold(self) -> bool:
        return list(map(dict.get, self.spaces, self.names)) == self.values


class _Ready(NamedTuple):
    """What is compared: in every call, or where stamps are not what they were."""

    calm: _Named
    busy: _Named
    kinds: list[type]
    classes: tuple[list[Any], list[str]]
    inherited: list[Any]
    tensors: tuple[list[Any], list[str]]
    ordered: list[_Order]  # whose order may change while they do not
    addresses: list[int] | None  # of the stamps of all that is calm


def _is_busy(space: dict[str, Any], value: Any) -> bool:
    """In a Python module, where other names change all the time; or what changes by itself."""
    return "__name__" in space or isinstance(value, CONTAINERS)


def _columns(pairs: list[tuple[Any, str]]) -> tuple[list[Any], list[str]]:
    return [where for where, _ in pairs], [name for _, name in pairs]


def _are_tensors(values: Iterable[Any]) -> bool:
    kinds = set(map(type, values))
    return kinds <= {Tensor, nn.Parameter} or all(issubclass(kind, Tensor) for kind in kinds)


class _Order(NamedTuple):
    """A dictionary with its names, and what counts of its items."""

    namespace: dict[str, Any]
    names: list[str]
    marks: list[Any]


def _marks(namespace: dict[str, Any]) -> list[Any]:
    """Modules; of others, whether there is one."""
    return [item if isinstance(item, nn.Module) else item is None for item in namespace.values()]


def _has_order(order: _Order) -> bool:
    space = order.namespace
    return list(space) == order.names and (
        all(map(is_, space.values(), order.marks)) or _marks(space) == order.marks)

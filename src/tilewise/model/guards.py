"""What a capture took for granted, checked before it is used again."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ..conv.batch_norm import EVERYWHERE
from ..runtime.stamps import ATTEMPTS, Stamps, dicts_count, of_dict, of_kind
from .contents import (
    CODE,
    CONTAINERS,
    FIXED,
    PLAIN,
    Refused,
    changing,
    items_of,
    keeps_stand_ins,
    parts_of,
    put_back,
    shallow,
    slots_of,
    snapshot,
)

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MANY = 256  # items of containers of others that are compared in every call, in all


class Passing(Refused):
    """Refused now; where the same sizes come again, a graph for these alone may do."""


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
        self._others: dict[int, Any] = {}  # objects that were met in this trace
        self._classed: dict[int, Any] = {}  # of which the class was asked for
        self._budget = MANY
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
            self._others[id(value)] = value

    def _keep(self, value: Any) -> None:
        """Containers get back what they held before the model's code ran."""
        if isinstance(value, CONTAINERS) and id(value) not in self._kept:
            self._kept[id(value)] = value, shallow(value)
            self._keep_all(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, tuple):
            self._keep_all(value)

    def _keep_all(self, items: Iterable[Any]) -> None:
        for item in items:
            if isinstance(item, (*CONTAINERS, tuple)):
                self._keep(item)

    def knows_object(self, value: Any) -> None:
        if issubclass(type(value), fx.Proxy):  # made while this is traced
            return
        if changing(value):
            raise Refused(f"a {type(value).__qualname__} is another one after every use")
        if isinstance(value, (*CONTAINERS, tuple)):
            self._keep(value)
            self._knows_items(value)
        self._others[id(value)] = value
        for one in type(value).__mro__:
            for part in () if one.__module__.startswith(PLAIN) else list(vars(one).values()):
                self.fills(part)
        space = getattr(value, "__dict__", None)
        if type(space) is not dict or id(space) in self._names:
            return
        self._names[id(space)] = (space, {})
        for name, part in list(space.items()):
            if not isinstance(part, Tensor):
                self.knows(space, name, part)

    def knows_class(self, value: Any) -> None:
        """The code asks for an object's class, and may read its attributes."""
        if issubclass(type(value), fx.Proxy):
            raise Refused("the type of a value is asked for")
        is_others = id(value) in self._others or isinstance(value, nn.Module)
        if is_others and id(value) not in self._classed:
            self._classed[id(value)] = value
            self.asks(functools.partial(type, value))
        self._others[id(type(value))] = type(value)

    def _knows_items(self, value: Any) -> None:
        """A container of objects, or of a class of its own."""
        items = list(value.values() if isinstance(value, dict) else value)
        if len(items) > self._budget or id(value) in self._others or any(
                issubclass(type(item), fx.Proxy) for item in items):
            return
        self._others[id(value)] = value
        self._budget -= len(items)
        self.asks(functools.partial(items_of, value))
        for item in items:
            if not (isinstance(item, (*FIXED, *CODE, Tensor)) or changing(item)):
                self.knows_object(item)

    def ends(self, names: set[str]) -> None:
        """The code was gone through; it has these names, by which it may have read objects."""
        done: dict[int, Any] = {}
        while self._others.keys() - done.keys():  # classes may hold more of them
            for key, value in list(self._others.items()):
                if key not in done:
                    done[key] = value
                    for one in (value if isinstance(value, type) else type(value)).__mro__:
                        if not one.__module__.startswith(PLAIN):
                            self._knows_class(value, one, names)
        self._others, self._kept = {}, {}

    def _knows_class(self, value: Any, kind: type, names: set[str]) -> None:
        """Attributes of an object by one of its classes: its slots, and what it has not itself."""
        slots = tuple(name for name in slots_of(kind) if name in names)
        if slots and not isinstance(value, type) and not any(
                issubclass(type(getattr(value, name, None)), fx.Proxy) for name in slots):
            self.asks(functools.partial(parts_of, value, slots))
        space = None if isinstance(value, type) else getattr(value, "__dict__", None)
        for name, part in list(vars(kind).items()):
            if name in names and name not in slots and isinstance(part, (*FIXED, *CONTAINERS)):
                self.asks_class(kind, name)
                self.asks_class(value if isinstance(value, type) else type(value), name)
                if type(space) is dict and name not in space:
                    self.reads(space, name, None)

    def inherits(self, kind: type, name: str, value: Any) -> None:
        """A class gave this value."""
        self._more()
        self.fills(value)
        self._classes[kind, name] = value

    def asks_class(self, kind: type, name: str) -> None:
        """The same for a class that the code names, whatever it gave."""
        value = getattr(kind, name, None)
        if isinstance(value, (*CODE, Tensor)) or changing(value):
            return
        if isinstance(value, (*CONTAINERS, tuple)) and len(value) > MANY:
            return
        try:
            self.inherits(kind, name, snapshot(value))
            self._keep(value)
        except Refused:
            if type(value).__eq__ is object.__eq__:
                self.inherits(kind, name, value)
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
        has_inner = hasattr(type(module), inner)
        if has_inner:
            self.inherits(type(module), inner, getattr(type(module), inner))
        for name in ("forward", inner) if has_inner else ("forward",):
            self.reads(module.__dict__, name, module.__dict__.get(name))

    def restore(self) -> bool:
        """Let containers hold what they did before the model's code ran; whether they did not."""
        changed = False
        for cache, misses in self._caches.values():
            if cache.cache_info().misses != misses and keeps_stand_ins(cache):
                cache.cache_clear()
        for value, before in self._kept.values():
            changed |= put_back(value, before)
        self._kept, self._caches = {}, {}
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
    kinds: list[type]  # 1 is not 1.0

    @staticmethod
    def of(rows: Iterable[tuple[Any, str, Any]]) -> _Named:
        found = list(rows)
        return _Named([row[0] for row in found], [row[1] for row in found],
                      [row[2] for row in found], [type(row[2]) for row in found])

    def hold(self) -> bool:
        found = list(map(dict.get, self.spaces, self.names))
        return found == self.values and list(map(type, found)) == self.kinds


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

"""What objects hold that are no modules: compared later, and put back after a trace."""

from __future__ import annotations

import enum
import functools
import gc
import threading
import types
from collections import OrderedDict, deque
from copy import copy
from typing import Any

import torch
from torch import fx, nn

FIXED = (int, float, complex, str, bytes, type(None), type(...), range, slice, enum.Enum,
         torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type,
        functools.partial, nn.Module, staticmethod, classmethod, property,
        functools._lru_cache_wrapper)  # which answers the same arguments alike
CONTAINERS = (list, dict, OrderedDict, set, deque)
PLAIN = ("torch.", "builtins", "tilewise.")  # homes of classes that do not change


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
        items = tuple(map(snapshot, value))
        return items if kind is tuple else value
    if isinstance(value, (*FIXED, *CODE)):
        return value
    raise Refused(f"a {kind.__qualname__}, whose changes cannot be seen")


class Same:
    """An item that counts by what it is; it is kept, so that no other has its address."""

    def __init__(self, item: Any) -> None:
        self._item = item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._item is other._item


def told(item: Any) -> Any:
    """An item as it can be compared."""
    try:
        return snapshot(item)
    except Refused:
        return Same(item)


def items_of(value: Any) -> list[Any]:
    """What a container of others holds."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return [(key, told(item)) for key, item in pairs]


def parts_of(value: Any, names: tuple[str, ...]) -> list[Any]:
    """What an object without a dictionary holds under some names."""
    return [told(getattr(value, name, None)) for name in names]


def slots_of(kind: type) -> list[str]:
    """Names that instances of one class have a place for."""
    slots = vars(kind).get("__slots__", ())
    return [f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") else name
            for name in ([slots] if isinstance(slots, str) else slots)
            if name not in ("__dict__", "__weakref__")]


def changing(value: Any) -> bool:
    """Whether it is another one after every use, or in every thread."""
    return (hasattr(type(value), "__next__") or type(value).__module__.startswith("numpy")
            or isinstance(value, torch.Generator | threading.local))


def shallow(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else copy(value)


def put_back(value: Any, before: Any) -> bool:
    """Let a container hold what it held; whether it did not."""
    if isinstance(value, dict):
        same = list(value) == list(before) and all(
            _is_same(value[key], item) for key, item in before.items())
    else:
        same = len(value) == len(before) and (
            value == before if isinstance(value, set) else all(map(_is_same, value, before)))
    if same:
        return False
    value.clear()
    if isinstance(value, dict):
        dict.update(value, before)
    else:
        (value.update if isinstance(value, set) else value.extend)(before)
    return True


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, FIXED) and one == other)


def keeps_stand_ins(cache: Any) -> bool:
    """Whether a function's cache holds what stood for a tensor."""
    for kept in gc.get_referents(cache):
        if type(kept) is dict:
            for link in list(kept.values()):
                inner = gc.get_referents(link) if type(link).__name__ == "_lru_list_elem" else []
                if any(map(_stands_in, [link, *inner])):
                    return True
    return False


def _stands_in(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_stands_in, value))
    if isinstance(value, dict):
        return any(map(_stands_in, value.values()))
    return issubclass(type(value), fx.Proxy)

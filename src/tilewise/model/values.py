"""What stands for tensors, and numbers made of them, while a model's Python is traced."""

from __future__ import annotations

import abc
import functools
import operator
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from .bytecode import instructions, may_ask_none, steps_of
from .contents import Refused
from .effects import FRESH, name_of
from .kinds import kind_of, may_be_none
from .purity import OURS, TORCH, is_models
from .shadows import ATTRIBUTES

KNOWN = (TORCH, OURS)
NOTHING = {"grad", "grad_fn", "_base", "_grad", "_backward_hooks", "name",
           "_post_accumulate_grad_hooks"}  # what a tensor may have not
# functions of torch that ask for a class on behalf of a model
ASKING = ("is_tensor", "_isinstance", "__instancecheck__", "container_checker")
COMPARED = {*ATTRIBUTES, "layout", "requires_grad", "retains_grad"}  # by `is`, perhaps
ABSTRACT = abc.ABCMeta.__instancecheck__.__code__
TOLD = {"is_floating_point", "is_complex", "dim", "ndimension"}  # methods whose answers are


class Value(fx.Proxy):
    """Stands for a value of the graph; of its class, where that is known."""

    def __init__(self, node: fx.Node, tracer: Any) -> None:
        object.__setattr__(self, "tracer", tracer)
        object.__setattr__(self, "node", node)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        """Its own class for torch's C++, which would take a tensor's memory for granted."""
        code = sys._getframe(1).f_code
        asked = code.co_name in ASKING if code.co_filename.startswith(KNOWN) else (
            self.tracer.watch.calling[-1:] in ([isinstance], [getattr])
            or code.co_filename == functools.__file__)
        with self.tracer.watch.kept():  # it may ask for the next of several classes
            kind = self._kind() if asked else Value
        abstract: Any = sys._getframe(1).f_locals.get("cls") if code is ABSTRACT else object
        if issubclass(kind, abstract) != issubclass(Value, abstract):  # which it looks at, too
            raise Refused(f"whether {self.node} is of {abstract} is asked")
        return kind

    def _kind(self) -> type:
        if self.node.op == "get_attr":
            return self.tracer.class_of(self.node.target)
        kind = kind_of(self.node)
        if kind is None or _may_be_parameter(self.node):
            raise Refused(f"the class of {self.node} is asked for")
        return kind

    @property
    def keys(self) -> Any:
        """A proxy of fx has them, as mappings do."""
        return self.__getattr__("keys")

    def __getattr__(self, name: str) -> Any:
        if name in ("_is_param", "_is_buffer"):  # marks that subclasses have, asked by isinstance
            raise AttributeError(name)
        kind = kind_of(self.node)
        if kind is not None and not hasattr(kind, name):
            raise Refused(f"a {kind.__name__} is asked for {name}")
        maybe = name in NOTHING if kind is Tensor else kind is None and (
            name == "index" or self.tracer.watch.calling[-1:] in ([hasattr], [getattr]))
        if maybe:
            raise Refused(f"whether {self.node} has a {name} is asked")
        if may_be_none(self.node) and is_none_asked():
            raise Refused(f"whether the {name} of {self.node} is None is asked")
        if kind not in (Tensor, None) or not _is_answer(name):
            return Attribute(self, name)
        found = self.tracer.attribute(self.node, name) if name in ATTRIBUTES else None
        if found is None:
            self.tracer.watch.unsure(f"the {name} of {self.node}")
        return Attribute(self, name) if found is None else found

    def __call__(self, *_: Any, **__: Any) -> Any:
        """`callable` takes it for a function."""
        raise Refused(f"{self.node} is called")

    def __repr__(self) -> str:
        asking = sys._getframe(1)
        if not asking.f_code.co_filename.startswith(KNOWN) and not _is_in_assertion(asking):
            raise Refused(f"{self.node} becomes text")
        return super().__repr__()

    def __setattr__(self, name: str, value: Any) -> None:
        raise Refused(f"{name} of a tensor is set")

    def __iter__(self) -> Iterator[Any]:
        count, whole = self._length(), self
        if count is None:
            count = _unpacked(sys._getframe(1)) or _pieces(self.node)
            if count is None:
                raise Refused(f"{self.node} is iterated over")
            whole = self.tracer.create_proxy("call_function", exactly, (self, count), {})
        return iter([whole[i] for i in range(count)])

    def __bool__(self) -> bool:
        if not _is_asserted(sys._getframe(1)):
            return bool(self.tracer.number(self.node))
        self.tracer.create_proxy("call_function", asserted, (self,), {})
        return True

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __format__(self, _: str) -> str:
        if not _is_in_assertion(sys._getframe(1)):
            raise Refused(f"{self.node} becomes text")
        return "?"

    def __hash__(self) -> int:
        """A look-up by a number that is not known would find nothing."""
        if not sys._getframe(1).f_code.co_filename.startswith(KNOWN):
            raise Refused(f"{self.node} is looked up")
        return id(self)

    def _number(self) -> Any:
        return self.tracer.number(self.node)

    def _refuse(self, *_: Any) -> Any:
        raise Refused(f"Python asks for the value of {self.node}")

    def _length(self) -> int | None:
        """Of a tensor's shape, where it is known."""
        is_known = kind_of(self.node) in (torch.Size, None)  # of sums of shapes, the class is not
        return self.tracer.length(self.node) if is_known else None

    def __len__(self) -> int:
        length, count = self._length(), _pieces(self.node)
        if length is not None:
            return length
        if kind_of(self.node) is Tensor and count is None:
            return int(self.size(0))
        if count is None:
            raise Refused(f"the length of {self.node} is asked for")
        self.tracer.create_proxy("call_function", exactly, (self, count), {})
        return count

    def __float__(self) -> float:
        """`math.ceil` and the like ask for it, too."""
        return float(self._number())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self._number(), digits)

    __int__ = __index__ = _number
    __complex__ = __contains__ = __str__ = _refuse


def _in_place(name: str) -> Callable[..., Any]:
    """`x += y` and the like, which torch does in place."""
    function = getattr(operator, name)

    def write(self: Value, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return write


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior",
              "ixor", "imatmul", "ilshift", "irshift"):
    setattr(Value, f"__{_name}__", _in_place(_name))


class Attribute(Value):
    """An attribute of a value: a node of its own only if it is not called."""

    def __init__(self, root: Value, name: str) -> None:
        object.__setattr__(self, "root", root)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "tracer", root.tracer)
        object.__setattr__(self, "made", None)

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        if self.made is None:
            proxy = self.tracer.create_proxy("call_function", getattr, (self.root, self.name), {})
            object.__setattr__(self, "made", proxy.node)
        return self.made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.tracer.attribute(self.root.node, self.name) if (
            self.name in TOLD and not args and not kwargs) else None
        return self.tracer.create_proxy("call_method", self.name, (self.root, *args), kwargs) if (
            found is None) else found


class Mismatch(ValueError):
    """A sequence is not as long as it was taken to be."""


def exactly(values: Any, count: int) -> tuple[Any, ...]:
    """A sequence of so many values."""
    found = tuple(values)
    if len(found) != count:
        more = "too many" if len(found) > count else "not enough"
        raise Mismatch(f"{more} values to unpack (expected {count})")
    return found


def asserted(value: Any) -> None:
    """What an assert statement does."""
    if not value:
        raise AssertionError


def _may_be_parameter(node: fx.Node) -> bool:
    """Whether it may be a parameter itself, as casts to its own type give it."""
    source = node.args[0] if node.args else None
    return (isinstance(source, fx.Node) and source.op == "get_attr"
            and name_of(node).strip("_") not in FRESH)


def _is_answer(name: str) -> bool:
    """Whether an attribute of a tensor is a type, a device or a truth."""
    return name in COMPARED or (name.startswith("is_")
                                and not callable(getattr(Tensor, name, None)))


def is_compared_next() -> bool:
    """Whether what the model's code reads now is compared by `is` at once."""
    frame = _first_behind((OURS,))
    return is_models(frame) and [step.opname for step in steps_of(frame)[1:2]] == ["IS_OP"]


def is_none_asked() -> bool:
    """Whether what the model's code gets now may be compared with None."""
    frame = _first_behind(KNOWN)
    return is_models(frame) and may_ask_none(frame)


def _first_behind(places: tuple[str, ...]) -> Any:
    """The first frame of other code than that in some places."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename.startswith(places):
        frame = frame.f_back
    return frame


def _unpacked(frame: Any) -> int | None:
    """Into how many names a frame takes a sequence apart."""
    step = steps_of(frame)[0]
    return int(step.argval) if step.opname == "UNPACK_SEQUENCE" else None


def _pieces(node: fx.Node) -> int | None:
    """Into how many pieces a tensor is cut."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    cut = node.args[1] if len(node.args) > 1 else node.kwargs.get(
        "chunks", node.kwargs.get("split_size_or_sections"))
    if name == "chunk" and isinstance(cut, int):
        return cut
    return len(cut) if name == "split" and isinstance(cut, list | tuple) else None


def _is_asserted(frame: Any) -> bool:
    """Whether a truth is asked for by an assert statement."""
    names = [step.opname for step in steps_of(frame)[:4]]
    for jump, after in pairwise(names):
        if "JUMP" in jump:
            return jump.endswith("IF_TRUE") and after == "LOAD_ASSERTION_ERROR"
    return False


def _is_in_assertion(frame: Any) -> bool:
    """Whether a text is made for torch._assert, which shows it only if it fails."""
    lines = [(begin, end, line) for begin, end, line in frame.f_code.co_lines() if line]
    asked = [line for step in instructions(frame.f_code) if step.argval == "_assert"
             for begin, end, line in lines if begin <= step.offset < end]
    return any(line <= frame.f_lineno <= line + 8 for line in asked)

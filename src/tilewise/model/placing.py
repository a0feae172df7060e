"""A concatenation is where its parts are written: who can write there, and at which channels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..runtime.concatenation import concatenated
from ..runtime.images import channels_last
from ..runtime.pointwise import empty
from ..runtime.types import element_of
from .effects import Effects, is_query, name_of
from .native import Native
from .nn import Block, TransposedBlock
from .operations import Cat

StepOf = Callable[[fx.Node], Any]


# what gives slices of an image and reads nothing
VIEWS = {"chunk", "split", "tensor_split", "narrow", "getitem", "exactly", "enter", "settled"}


class Form(NamedTuple):
    """Of the tensor that a node gave."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    address: int


class Slot(NamedTuple):
    """Where a value lies: in the result of a concatenation, from a channel on."""

    home: fx.Node
    first: int


def _parts(cat: fx.Node) -> list[fx.Node]:
    return [part for part in cat.args if isinstance(part, fx.Node)]


def is_cat(step: Any) -> bool:
    return (isinstance(step, Native) and isinstance(step.run, Cat)
            and step.run.joins_channels)


def may_be_placed(node: fx.Node, step_of: StepOf) -> bool:
    """Whether who makes a value can write to a slice of channels, and all who read it read one."""
    return _writes(node, step_of(node)) and _is_read(node, step_of)


def _is_block(step: Any) -> bool:
    return isinstance(step, Block) and step.axes == 2 and not isinstance(step, TransposedBlock)


def _writes(node: fx.Node, step: Any) -> bool:
    if isinstance(step, Block) and step.axes == 2:
        return step.pool == 1 and not node.kwargs and (len(node.args) < 2 or node.args[1] is None)
    return isinstance(step, Native) and step.slices


def _is_read(node: fx.Node, step_of: StepOf) -> bool:
    return all(_reads(user, seen, step_of(user)) for user, seen in _readers(node))


def _reads(node: fx.Node, value: fx.Node, step: Any) -> bool:
    if _is_block(step):
        return node.args[0] is value and value not in node.args[1:] and not node.kwargs
    return isinstance(step, Native) and step.slices


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Who reads a value or a slice of it, and which of these."""
    for user in node.users:
        if _is_view(user):
            yield from _readers(user)
        elif not is_query(user):
            yield user, node


def _is_view(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and name_of(node) in VIEWS


def _whole(node: fx.Node) -> fx.Node:
    """What a value is a slice of; itself where it is none."""
    while _is_view(node) and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def mark(graph: fx.Graph, step_of: StepOf) -> None:
    """Blocks whose results may be placed take code that can write there, whatever comes of it;
    those that read such results have both kinds of code made in time."""
    cats = [node for node in graph.nodes if is_cat(step_of(node))]
    for part in dict.fromkeys(_whole(part) for cat in cats for part in _parts(cat)):
        if may_be_placed(part, step_of):
            if isinstance(step_of(part), Block):
                step_of(part).is_part = True
            for user, _ in _readers(part):
                if _is_block(step_of(user)):
                    step_of(user).reads_part = True


def slots(graph: fx.Graph, step_of: StepOf, forms: dict[fx.Node, Form],
          by_torch: set[fx.Node]) -> dict[fx.Node, Slot]:
    """A place for each value that can have one; the last concatenation first: it has the most."""
    effects = Effects(graph, step_of)
    written = {effects.root(value) for node in graph.nodes for value in effects.written(node)}
    found: dict[fx.Node, Slot] = {}
    for cat in reversed(graph.nodes):
        known = is_cat(step_of(cat)) and all(node in forms for node in (cat, *_parts(cat)))
        if not known or not _is_image(cat, forms) or effects.root(cat) in written or (
                cat in by_torch):
            continue  # who writes to it must not write to its parts
        if cat not in found and _is_read(cat, step_of):
            _nest(cat, forms, found)
        own = found.get(cat, Slot(cat, 0))
        for part, first in _covered(cat, forms):
            able = may_be_placed(part, step_of) and part not in by_torch
            if able and part not in found and _is_image(part, forms) and (
                    effects.root(part) not in written):
                found[part] = Slot(own.home, own.first + first)
                found.setdefault(cat, own)
    return found


def _covered(cat: fx.Node, forms: dict[fx.Node, Form]) -> Iterator[tuple[fx.Node, int]]:
    """Values that are parts as a whole, slice by slice in their order, and their first channels."""
    first, found = 0, Counter[tuple[fx.Node, int]]()
    for part in _parts(cat):
        whole, count = _whole(part), forms[part].shape[1]
        at = _channel(forms[part], forms[whole]) if whole in forms else None
        if at is not None:
            found[whole, first - at] += count
        first += count
    for (whole, first), count in found.items():
        if count == forms[whole].shape[1]:
            yield whole, first


def _channel(part: Form, whole: Form) -> int | None:
    """The first channel of a slice; None of what is none."""
    at = (part.address - whole.address) // part.dtype.itemsize
    sizes, others = part.shape[:1] + part.shape[2:], whole.shape[:1] + whole.shape[2:]
    alike = part.strides == whole.strides and sizes == others
    return at if alike and 0 <= at <= whole.shape[1] - part.shape[1] else None


def _nest(cat: fx.Node, forms: dict[fx.Node, Form], found: dict[fx.Node, Slot]) -> None:
    """One whose parts lie behind each other in another is a slice of that."""
    parts = _parts(cat)
    place = found.get(parts[0])
    if place is None:
        return
    home, first = place
    for part in parts:
        if found.get(part) != Slot(home, first):
            return
        first += forms[part].shape[1]
    found[cat] = place


def _is_image(node: fx.Node, forms: dict[fx.Node, Form]) -> bool:
    """Whether a value is what a kernel makes of channels-last images."""
    form = forms.get(node)
    return (form is not None and element_of(form.dtype) is not None and len(form.shape) == 4
            and form.strides == channels_last(form.shape)[1])


def told(found: dict[fx.Node, Slot], forms: dict[fx.Node, Form]) -> str:
    """A line for each value that lies in another."""
    return "\n".join(
        f"{node.name}: channels {first} to {first + forms[node].shape[1]} of {home.name}"
        for node, (home, first) in sorted(found.items()) if node is not home)


class Places:
    """The memory of concatenations in one call, and the slices of it."""

    def __init__(self, found: dict[fx.Node, Slot], forms: dict[fx.Node, Form]) -> None:
        self._found, self._forms = found, forms
        self._homes: dict[fx.Node, Tensor] = {}

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._found

    def call(self, node: fx.Node, step: Any, args: tuple[Any, ...]) -> Tensor | None:
        """What a step gives, in its place; None where it cannot write there."""
        out = self._slice(node)
        if is_cat(step):
            return _joined(out, args)
        given = (args[0], *args[2:]) if isinstance(step, Block) else args  # without a residual
        result: Tensor | None = step.into(out, *given)
        return result

    def _slice(self, node: fx.Node) -> Tensor:
        home, first = self._found[node]
        if home not in self._homes:
            form = self._forms[home]
            self._homes[home] = empty(*channels_last(form.shape), form.dtype)
        return self._homes[home].narrow(1, first, self._forms[node].shape[1])


def _joined(out: Tensor, parts: tuple[Tensor, ...]) -> Tensor | None:
    """Copies the parts that do not lie in their places, neighbours together."""
    for first, run in _missing(out, parts):
        place = out.narrow(1, first, sum(part.shape[1] for part in run))
        if concatenated(run, out=place) is None:
            return None
    return out


def _missing(out: Tensor, parts: tuple[Tensor, ...]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    first, begin = 0, None
    for i, part in enumerate(parts):
        place = out.narrow(1, first, part.shape[1])
        if part.data_ptr() == place.data_ptr() and part.stride() == place.stride():
            if begin is not None:
                yield begin[0], parts[begin[1]:i]
            begin = None
        elif begin is None:
            begin = first, i
        first += part.shape[1]
    if begin is not None:
        yield begin[0], parts[begin[1]:]

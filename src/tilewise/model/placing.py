"""A concatenation is where its parts are written: who can write there, and at which channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..runtime.concatenation import concatenated
from ..runtime.images import channels_last
from ..runtime.pointwise import empty
from .effects import Effects
from .native import Native
from .nn import Block, TransposedBlock
from .operations import Cat

StepOf = Callable[[fx.Node], Any]


class Form(NamedTuple):
    """Of the tensor that a node gave."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


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


def _writes(node: fx.Node, step: Any) -> bool:
    if isinstance(step, Block):
        plain = step.axes == 2 and step.pool == 1 and not isinstance(step, TransposedBlock)
        return plain and not node.kwargs and (len(node.args) < 2 or node.args[1] is None)
    return isinstance(step, Native) and step.slices


def _is_read(node: fx.Node, step_of: StepOf) -> bool:
    steps = [step_of(user) for user in node.users]
    return all(isinstance(step, Native) and step.slices for step in steps)


def mark(graph: fx.Graph, step_of: StepOf) -> None:
    """Blocks whose results may be placed take code that can write there, whatever comes of it."""
    for node in graph.nodes:
        if is_cat(step_of(node)):
            for part in _parts(node):
                block = step_of(part)
                if isinstance(block, Block) and may_be_placed(part, step_of):
                    block.is_part = True


def slots(graph: fx.Graph, step_of: StepOf, forms: dict[fx.Node, Form]) -> dict[fx.Node, Slot]:
    """A place for each value that can have one; the last concatenation first: it has the most."""
    effects = Effects(graph, step_of)
    written = {effects.root(value) for node in graph.nodes for value in effects.written(node)}
    found: dict[fx.Node, Slot] = {}
    for cat in reversed(graph.nodes):
        known = is_cat(step_of(cat)) and all(node in forms for node in (cat, *_parts(cat)))
        if not known or not _is_image(cat, forms) or effects.root(cat) in written:
            continue  # who writes to it must not write to its parts
        if cat not in found and _is_read(cat, step_of):
            _nest(cat, forms, found)
        own = found.get(cat, Slot(cat, 0))
        home, first = own.home, own.first
        for part in _parts(cat):
            if part not in found and may_be_placed(part, step_of) and _is_image(part, forms):
                found[part] = Slot(home, first)
                found.setdefault(cat, own)
            first += forms[part].shape[1]
    return found


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
    return (form is not None and form.dtype == torch.float32 and len(form.shape) == 4
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
            self._homes[home] = empty(*channels_last(self._forms[home].shape))
        return self._homes[home].narrow(1, first, self._forms[node].shape[1])


def _joined(out: Tensor, parts: tuple[Tensor, ...]) -> Tensor | None:
    """Copies the parts that do not lie in their places."""
    first = 0
    for part in parts:
        place = out.narrow(1, first, part.shape[1])
        there = part.data_ptr() == place.data_ptr() and part.stride() == place.stride()
        if not there and concatenated((part,), out=place) is None:
            return None
        first += part.shape[1]
    return out

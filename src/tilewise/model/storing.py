"""Images that a graph stores in bfloat16 between its convolutions, where the precision admits it.

Inputs, results and weights stay float32, and so does all arithmetic. An image is rounded once, when
it is stored. What no kernel of ours computes, and what no convolution reads any more, is float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx

from ..conv.again import autocast_type, can_repeat, form, settings
from ..conv.running import ENGINE
from ..core.cost import traffic
from ..core.plan import Plan
from ..kernels import precision
from ..runtime.casting import cast
from ..runtime.engine import PRECISIONS
from ..runtime.types import element_of
from .ahead import look, seen
from .effects import SIZES, Effects, is_number, name_of
from .graphs import Graph
from .layout import enter, leave
from .native import Native, Original
from .nn import Block
from .placing import VIEWS

NARROW = torch.bfloat16
LEAST = 2.0 ** -8  # no bound of a convolution with such a result is smaller
GAIN = 0.85  # of the estimated time that it may take, where products are of float32
ON_UNIT = 1.0  # and where a unit multiplies bfloat16: all between convolutions gains, too
CAST = 6  # bytes that a value moves when its type changes
MOST = 64  # decisions that are remembered

_forced: ContextVar[bool | None] = ContextVar("storing", default=None)
_casts: ContextVar[list[int] | None] = ContextVar("casts", default=None)  # values of each


@contextmanager
def storing(wanted: bool) -> Iterator[None]:
    """Inside, images are stored so, or not, whatever the estimates say; precision still decides.

    >>> with storing(True):
    ...     pass
    """
    before = _forced.set(wanted)
    try:
        yield
    finally:
        _forced.reset(before)


def narrowed(x: Any) -> Any:
    """An image as it is stored."""
    _count(x)
    return _narrow(x)


def _narrow(x: Any) -> Any:
    return _cast(x, NARROW) if isinstance(x, Tensor) and x.dtype == torch.float32 else x


def widened(x: Any) -> Any:
    """An image, or pieces of one, as torch expects them."""
    _count(x)
    return _widen(x)


def _widen(x: Any) -> Any:
    if isinstance(x, tuple | list):
        return type(x)(map(_widen, x))
    return _cast(x, torch.float32) if isinstance(x, Tensor) and x.dtype == NARROW else x


def _count(x: Any) -> None:
    if (counts := _casts.get()) is not None and isinstance(x, Tensor):
        counts.append(x.numel())


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    found = cast(x, dtype) if can_repeat(x) else None
    return x.to(dtype) if found is None else found


class WideOriginal:
    """What torch had in a step's place, in float32."""

    def __init__(self, original: Original) -> None:
        self._original = original

    def __call__(self, *operands: Any) -> Any:
        return _narrow(self._original(*map(_widen, operands)))


class Stored(Graph):
    """A capture's graph with images in 16 bits; `is_any` says whether there are some."""

    def __init__(self, capture: Graph) -> None:
        self.graph = fx.Graph()
        self.graph.output(self.graph.graph_copy(capture.graph, {}))
        self.steps, self.tensors = dict(capture.steps), capture.tensors
        self.narrow: set[fx.Node] = set()
        self._casts: dict[tuple[Any, fx.Node], fx.Node] = {}
        effects = Effects(self.graph, self.module_of)
        # a copy in another type must not be written to in the place of what it is a copy of
        writes = any(effects.written(node) for node in self.graph.nodes
                     if node.op != "call_module" or self.module_of(node) is not None)
        # of images with a large mean, norms of their own pixels would leave little but roundings
        centres = any(getattr(self.module_of(node), "centres", False) for node in self.graph.nodes)
        self.blocks = sum(isinstance(self.module_of(node), Block) for node in self.graph.nodes)
        self.is_any = not (writes or centres) and any(map(self._is_block, self.graph.nodes))
        if self.is_any:
            self._choose()
            self._cast()
        self.settle()

    def _is_block(self, node: fx.Node) -> bool:
        step = self.module_of(node)
        return isinstance(step, Block) and step.axes == 2

    def _choose(self) -> None:
        """Which values are narrow: results of convolutions, and what leads from one to another."""
        numbers: set[fx.Node] = set()
        leads: set[fx.Node] = set()
        for node in reversed(self.graph.nodes):
            if any(self._is_image(node, user) or (user in leads and self._hands_on(user))
                   for user in node.users):
                leads.add(node)
        for node in self.graph.nodes:
            if is_number(node, numbers):
                numbers.add(node)
            given = [source for source in self._read(node) if source not in numbers]
            able = self._is_block(node) or node.target is enter or (
                node in leads and self._hands_on(node) and given and self.narrow >= set(given))
            if able and self._may_be_rounded(node):
                self.narrow.add(node)
                self._take(node)

    def _may_be_rounded(self, value: fx.Node) -> bool:
        """Whether only steps of ours read it, or who called; what others make of its rounding
        nobody knows."""
        return bool(value.users) and all(
            self._is_image(value, user) or (value.target is not enter and (
                user.op == "output" or user.target is leave or self._hands_on(user)))
            for user in value.users)

    def _is_image(self, value: fx.Node, user: fx.Node) -> bool:
        """Whether a convolution reads a value as its image or its residual."""
        return self._is_block(user) and value in user.args[:2]

    def _hands_on(self, node: fx.Node) -> bool:
        """Whether it gives narrow images of narrow images."""
        step = self.module_of(node)
        if isinstance(step, Native):
            return step.halves
        return node.op in ("call_function", "call_method") and name_of(node) in VIEWS

    def _read(self, node: fx.Node) -> list[fx.Node]:
        """Values of which a node wants images."""
        step = self.module_of(node)
        given = node.args[:2] if isinstance(step, Block) else (
            node.args[:step.count] if isinstance(step, Native) else node.args[:1])
        return [value for value in given if isinstance(value, fx.Node)]

    def _take(self, node: fx.Node) -> None:
        """The step in the place of a float32 one."""
        step = self.module_of(node)
        if isinstance(step, Block | Native):
            self.steps[str(node.target)] = (
                step.stored() if isinstance(step, Block)
                else step.instead(WideOriginal(step.original)))

    def _cast(self) -> None:
        """What is read in another type than it has."""
        for node in list(self.graph.nodes):
            wants = set(self._read(node)) if node in self.narrow else set()
            if node not in self.narrow and self._reads_no_value(node):
                continue
            for value in node.all_input_nodes:
                if value in wants and value not in self.narrow:
                    node.replace_input_with(value, self._as(narrowed, value, node))
                elif value not in wants and value in self.narrow:
                    node.replace_input_with(value, self._as(widened, value, node))

    def _reads_no_value(self, node: fx.Node) -> bool:
        """Whether it asks for a size, or is a view that nobody looks at."""
        return name_of(node) in SIZES or (
            not node.users and node.op != "output" and self._hands_on(node))

    def _as(self, cast: Any, value: fx.Node, user: fx.Node) -> fx.Node:
        found = self._casts.get((cast, value))
        if found is None:
            with self.graph.inserting_before(user):
                found = self._casts[cast, value] = self.graph.call_function(cast, (value,))
        return found


class Choice:
    """of(tensors): a capture's graph with images in 16 bits, where that is admitted and pays."""

    def __init__(self, capture: Any, max_error: float | None) -> None:
        self._capture, self._max_error = capture, max_error
        self.stored: Stored | None = None  # made when it is first looked at
        self._known: dict[Any, bool] = {}
        self._parts: list[torch.nn.Module] | None = None  # of the graph's steps

    def of(self, tensors: Sequence[Tensor]) -> Stored | None:
        if self._admitted() < LEAST or not tensors or _forced.get() is False:
            return None
        if not can_repeat(*tensors) or autocast_type() is not None:
            return None
        if self._learns() or any(map(_is_other, self._capture.blocks)):
            return None
        key = (tuple(map(form, tensors)), settings(), _forced.get())
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MOST:
                self._known.clear()
            found = self._known[key] = self._decided(tensors)
        return self.stored if found else None

    def _learns(self) -> bool:
        """Whether a step follows its images: looking ahead would show it others."""
        if self._parts is None:
            steps = [self._capture.module_of(node) for node in self._capture.graph.nodes
                     if node.op == "call_module"]
            self._parts = [part for step in steps for part in getattr(step, "parts", (step,))
                           if isinstance(part, torch.nn.Module)]
        return any(part.training for part in self._parts)

    def _admitted(self) -> float:
        """Of float32: what is stored in 16 bits is admitted by a caller, or by "medium"."""
        return PRECISIONS[precision.asked()] if self._max_error is None else self._max_error

    def _decided(self, tensors: Sequence[Tensor]) -> bool:
        if not self._capture.is_channels_last or element_of(NARROW) is None or any(
                x.is_floating_point() and x.dtype != torch.float32 for x in tensors):
            return False
        stored = self.stored or Stored(self._capture)
        self.stored = stored
        if not stored.is_any:
            return False
        before = _casts.set([])
        try:
            narrow, casts = seen(stored, tensors), sum(_casts.get() or ())
        finally:
            _casts.reset(before)
        # an input is rounded, too
        if any(plan.error + LEAST > self._admitted() or plan.algorithm == "vendor"
               for plan in narrow.plans):
            return False
        # what is unknown may come behind the last convolution
        is_all = narrow.is_all or narrow.blocks == stored.blocks
        if not (_forced.get() or (is_all and self._pays(narrow.plans, casts, tensors))):
            return False
        look(stored, tensors)
        return True

    def _pays(self, narrow: list[Plan], casts: int, tensors: Sequence[Tensor]) -> bool:
        """By all convolutions, and what casts move."""
        if not narrow:
            return False
        wide, target = seen(self._capture, tensors).plans, narrow[0].target.on_two
        share = ON_UNIT if target.row.reads_bf16 else GAIN
        seconds = _seconds(narrow) + traffic(target, CAST * casts)
        return len(wide) == len(narrow) and seconds < share * _seconds(wide)


def _is_other(block: Block) -> bool:
    """Whether a block has weights of another type than float32."""
    return bool(block.parts[0].weight.dtype != torch.float32)


def _seconds(plans: list[Plan]) -> float:
    """Of all convolutions on two threads, whatever the number: it must not change bits."""
    return sum(ENGINE.planner.algorithm(plan.algorithm).cost(plan.inner, plan.target.on_two,
                                                             plan.schedule) for plan in plans)

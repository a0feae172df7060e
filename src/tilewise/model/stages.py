"""What a graph looks like after each pass, for those who ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import fx

from ..conv.linear import Linear
from .effects import name_of
from .labels import described
from .native import Native
from .nn import Block

# in the order of the passes: what each leaves
STAGES = {
    "captured": "the operations of the model's code",
    "normalised": "without what hands on what it is given",
    "fused": "norms folded, what follows a convolution joined to it",
    "laid_out": "channels-last inside",
    "lowered": "operations between convolutions, by kernels where there are some",
    "placed": "parts of concatenations in their places",
    "bound": "kernels with their memory: bytes from the start of the arena",
}

Notes = dict[str, list[str]]
_asked: ContextVar[Notes | None] = ContextVar("stages", default=None)


@contextmanager
def noted() -> Iterator[Notes]:
    """What passes leave while graphs are made here: the texts of each stage."""
    notes: Notes = {stage: [] for stage in STAGES}
    before = _asked.set(notes)
    try:
        yield notes
    finally:
        _asked.reset(before)


def note(stage: str, text: Callable[[], str]) -> None:
    """Keep what a stage looks like, if somebody asked."""
    notes = _asked.get()
    if notes is not None:
        notes[stage].append(text())


def text_of(graph: fx.Graph, step_of: Callable[[fx.Node], Any]) -> str:
    """A line a node."""
    return "\n".join(_line(node, step_of(node)) for node in graph.nodes)


def _line(node: fx.Node, step: Any) -> str:
    read = ", ".join(source.name for source in node.all_input_nodes)
    if node.op == "placeholder":
        return f"{node.name} = input"
    if node.op == "output":
        return f"return {read}"
    return f"{node.name} = {_what(node, step)}({read})"


def _what(node: fx.Node, step: Any) -> str:
    if isinstance(step, Block):
        conv, norm = step.parts
        tail = ["norm" if norm is not None else "", step.activation or "",
                f"pool {step.pool}" if step.pool > 1 else ""]
        return " + ".join([described(conv), *filter(None, tail)])
    if isinstance(step, Linear):
        return described(step.parts[0])
    if isinstance(step, Native):
        return step.name
    if node.op == "get_attr":
        return f"tensor {node.target}"
    return name_of(node) if step is None else type(step).__name__

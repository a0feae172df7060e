"""Where the time of a model goes: every step of its program, timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..conv.checks import arguments_of, check_module
from ..core.errors import TilewiseError
from ..core.target import Target, refuse_times
from ..runtime.program import Program
from .captured import Captured, all_captured
from .programs import Bound, Programs
from .released import Released

ROUNDS = 15
CALLS = 3  # until a model that comes again runs as a program
HEADER = ("step", "layer", "by", "ms", "share", "GFLOP/s", "MB")


@dataclass(frozen=True)
class Line:
    """A step of a program: the least of its times in seconds, products and sums, bytes; and the
    bytes of all values in between that are in use meanwhile."""

    step: str
    layer: str
    by: str
    seconds: float
    flops: int
    bytes: int
    live: int


@dataclass(frozen=True)
class Profile:
    """All steps of a model on one example; prints as a table.

    Steps are timed one by one: each also has what it takes to start it, which a program saves.
    """

    lines: tuple[Line, ...]
    arena: int  # bytes for values in between
    weights: int  # bytes of weights in the kernels' forms

    @property
    def seconds(self) -> float:
        return sum(line.seconds for line in self.lines)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The header, then a row a step."""
        return [HEADER, *(self._row(line) for line in self.lines)]

    def _row(self, line: Line) -> tuple[str, ...]:
        rate = f"{line.flops / line.seconds / 1e9:.0f}" if line.flops else ""
        return (line.step, line.layer, line.by, f"{1e3 * line.seconds:.3f}",
                f"{100 * line.seconds / self.seconds:.1f} %", rate, f"{line.bytes / 1e6:.2f}")

    def __str__(self) -> str:
        rows = self.rows
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
        lines = ["  ".join(f"{cell:<{width}}" if i < 3 else f"{cell:>{width}}" for i, (cell, width)
                           in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]
        return "\n".join([*lines, self.summary])

    @property
    def summary(self) -> str:
        torchs = [line for line in self.lines if line.by == "torch"]
        return (f"{len(self.lines)} steps, {1e3 * self.seconds:.2f} ms one by one, "
                f"{len(torchs)} of them by torch with {1e3 * sum(t.seconds for t in torchs):.2f} "
                f"ms; {memory_text(self.arena, self.weights)}")

    __repr__ = __str__


def profile(model: nn.Module, example: Any) -> Profile:
    """Every step of an optimised model on an example, with its time.

    Args:
        model: What `tilewise.optimize` gave.
        example: Input tensor, or a tuple of arguments, as the model is called with.

    Returns:
        A table of steps: kernels of tilewise, and calls of torch between them.

    >>> import tilewise, torch
    >>> model = tilewise.optimize(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()))
    >>> len(tilewise.profile(model.eval(), torch.randn(1, 3, 32, 32)).lines) > 0
    True
    """
    check_module(model)
    if model.training:
        raise TilewiseError(f"{type(model).__name__} is in training mode, needs model.eval()")
    refuse_times(Target.host())
    bound, tensors, names = _bound(model, arguments_of(example))
    with torch.inference_mode():
        held = bound.program.held()  # weights, as long as kernels read them
        rounds = [bound.program.timed(tensors) for _ in range(ROUNDS)]
        del held
    least = [min(times) for times in zip(*rounds, strict=True)]
    lines = [Line(label.name, names.get(label.module, ""), _who(label.algorithm, kernel),
                  seconds, label.flops, moved, live)
             for label, kernel, seconds, moved, live in zip(
                 bound.labels, bound.program.is_kernel, least, bound.program.moved,
                 bound.program.live, strict=True)]
    return Profile(tuple(lines), bound.program.bytes, bound.program.weight_bytes)


def memory_of(programs: Sequence[Program]) -> tuple[int, int]:
    """Bytes for values in between, of one program at a time, and for weights."""
    return (max((program.bytes for program in programs), default=0),
            sum(program.weight_bytes for program in programs))


def memory_text(arena: int, weights: int) -> str:
    return (f"{arena / 1e6:.1f} MB for values in between, {weights / 1e6:.1f} MB for weights in "
            "the kernels' forms")


def _who(algorithm: str, kernel: bool) -> str:
    return algorithm or "tilewise" if kernel else "torch"


def _bound(model: nn.Module, arguments: tuple[Any, ...]) -> tuple[Bound, list[Tensor], Any]:
    """The program for these arguments; they are called with until there is one."""
    with torch.inference_mode():
        for _ in range(CALLS):
            model(*arguments)
        programs, refusal = _programs(model, arguments)
    tensors = [leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, Tensor)]
    found = None if programs is None else programs.find(tensors)
    if not isinstance(found, Bound):
        raise TilewiseError(f"{type(model).__name__} does not run as a program on this example: "
                            f"{found or refusal or 'it cannot be traced'}")
    return found, tensors, {module: name for name, module in model.named_modules()}


def programs_of(model: nn.Module, arguments: tuple[Any, ...]) -> list[Bound]:
    """Those that a model, or its parts, run as after some calls with these arguments: of each graph
    the last that ran, since others are for other sizes."""
    if model.training:
        return []
    with torch.inference_mode():
        for _ in range(CALLS):
            model(*arguments)
    programs, _ = _programs(model, arguments) if _is_one(model, arguments) else (None, None)
    if programs is not None:
        return programs.bound[-1:]
    return [bound for captured in all_captured(model) for captures in captured.captures.values()
            for capture in captures for graph in capture.graphs
            for bound in graph.programs.bound[-1:]]


def _is_one(model: nn.Module, arguments: tuple[Any, ...]) -> bool:
    """Whether one graph has all of a model: parts may still have those of earlier calls."""
    if isinstance(model, Released):
        return True
    forward = model.__dict__.get("forward")
    capture = forward.find(arguments, {})[0] if isinstance(forward, Captured) else None
    return capture is not None and not capture.opaque


def _programs(model: nn.Module, arguments: tuple[Any, ...]) -> tuple[Programs | None, Any]:
    """Those of a model that was called so, or why there are none."""
    if isinstance(model, Released):
        return model.whole.programs, None
    forward = model.__dict__.get("forward")
    if not isinstance(forward, Captured):
        raise TilewiseError(f"{type(model).__name__} is no model that tilewise.optimize gave, or "
                            "it could not be traced as a whole")
    capture, tensors = forward.find(arguments, {})
    programs = None if capture is None else capture.graph_of(tensors).programs
    return programs, forward.refusals

"""A profile as one picture: where the time goes, and how much memory is in use meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .figures import OURS, PEERS, TORCH, WIDTH
from .svg import FAINT, GRID, INK, Drawing

LEFT, RIGHT = 46.0, WIDTH - 20
TIMES, MEMORY = (34.0, 74.0), (112.0, 232.0)  # top and bottom of the two parts
HEIGHT = 292.0
LARGEST = 0.05  # of the time: what is named in the picture


class Step(Protocol):
    """What is drawn of a step of a profile."""

    @property
    def step(self) -> str: ...
    @property
    def by(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def live(self) -> int: ...


def timeline(steps: Sequence[Step]) -> Drawing:
    """A bar a step, as wide as it takes long; below it the bytes of values that are in use."""
    drawing = Drawing(WIDTH, HEIGHT, "time and memory, step by step")
    whole = sum(step.seconds for step in steps) or 1.0
    most = max((step.live for step in steps), default=0) or 1
    kinds = _kinds(steps)
    _frame(drawing, whole, most)
    x = LEFT
    for step in steps:
        width = (RIGHT - LEFT) * step.seconds / whole
        fill, high = kinds[_kind(step)][0], (MEMORY[1] - MEMORY[0]) * step.live / most
        drawing.rect(x, TIMES[0], width, TIMES[1] - TIMES[0], fill)
        drawing.rect(x, MEMORY[1] - high, width, high, fill)
        if step.seconds >= LARGEST * whole:
            drawing.text(x + width / 2, TIMES[0] - 5, f"{1e3 * step.seconds:.1f}", 9, "middle",
                         FAINT)
        x += width
    _legend(drawing, kinds, whole)
    return drawing


def _kind(step: Step) -> str:
    return "torch" if step.by == "torch" else step.by if step.by != "tilewise" else step.step


def _kinds(steps: Sequence[Step]) -> dict[str, tuple[str, float]]:
    """A colour and the seconds of each kind of step; those that take longest have their own."""
    seconds: dict[str, float] = {}
    for step in steps:
        seconds[_kind(step)] = seconds.get(_kind(step), 0.0) + step.seconds
    ours = iter((OURS, *PEERS))
    order = sorted(seconds, key=lambda kind: -seconds[kind])
    return {kind: (TORCH if kind == "torch" else next(ours, "#ced4da"), seconds[kind])
            for kind in order}


def _frame(drawing: Drawing, whole: float, most: int) -> None:
    drawing.text(LEFT, 14, f"time: {1e3 * whole:.2f} ms, step by step", 12, bold=True)
    drawing.text(LEFT, MEMORY[0] - 10, f"memory: at most {most / 1e6:.1f} MB of values in between",
                 12, bold=True)
    for share in (0.0, 0.5, 1.0):
        y = MEMORY[1] - share * (MEMORY[1] - MEMORY[0])
        drawing.line(LEFT, y, RIGHT, y, GRID)
        drawing.text(LEFT - 6, y + 4, f"{share * most / 1e6:.1f}", 10, "end", FAINT)
        x = LEFT + share * (RIGHT - LEFT)
        drawing.text(x, TIMES[1] + 13, f"{1e3 * share * whole:.1f}", 10, "middle", FAINT)


def _legend(drawing: Drawing, kinds: dict[str, tuple[str, float]], whole: float) -> None:
    """The kinds that take longest, in two rows."""
    for i, (kind, (fill, seconds)) in enumerate(list(kinds.items())[:6]):
        x, y = LEFT + i % 3 * (RIGHT - LEFT) / 3, MEMORY[1] + 24 + i // 3 * 18
        drawing.rect(x, y - 9, 10, 10, fill)
        drawing.text(x + 15, y, f"{kind} {100 * seconds / whole:.0f} %", 11, fill=INK)

"""What a run tells while it runs, as lines of text."""

from __future__ import annotations

from typing import Any, Protocol

AVERAGED = "accuracy of the average"  # of an epoch's summary


class Progress(Protocol):
    """Somebody who is told."""

    def doing(self, what: str, done: int, total: int) -> None:
        """Something besides the steps: planning, testing."""

    def start(self, step: int, steps: int, note: str) -> None:
        """A run of so many steps begins or goes on after `step`."""

    def step(self, epoch: int, step: int, steps: int, loss: float) -> None:
        """A step was made: so many of this epoch's."""

    def epoch(self, epoch: int, summary: dict[str, Any]) -> None:
        """An epoch has ended."""


class Silent:
    """Tells nothing."""

    def doing(self, what: str, done: int, total: int) -> None: ...

    def start(self, step: int, steps: int, note: str) -> None: ...

    def step(self, epoch: int, step: int, steps: int, loss: float) -> None: ...

    def epoch(self, epoch: int, summary: dict[str, Any]) -> None: ...


class Lines:
    """A line now and then.

    >>> lines = Lines(every=2)
    >>> lines.step(1, 1, 4, 2.3)
    >>> lines.step(1, 2, 4, 2.25)
    epoch 1 step 2 of 4: loss 2.2500
    """

    def __init__(self, every: int = 100) -> None:
        self._every = every

    def doing(self, what: str, done: int, total: int) -> None: ...

    def start(self, step: int, steps: int, note: str) -> None:
        print(note, flush=True)

    def step(self, epoch: int, step: int, steps: int, loss: float) -> None:
        if step % self._every == 0 or step == steps:
            print(f"epoch {epoch} step {step} of {steps}: loss {loss:.4f}", flush=True)

    def epoch(self, epoch: int, summary: dict[str, Any]) -> None:
        print(summary_line(epoch, summary), flush=True)


def summary_line(epoch: int, summary: dict[str, Any]) -> str:
    """An epoch in one line."""
    averaged = summary.get(AVERAGED)
    more = "" if averaged is None else f" ({averaged:.4f} by averaged weights)"
    speed = summary["images"] / summary["seconds"]
    return (f"epoch {epoch}: loss {summary['loss']:.4f}, test accuracy "
            f"{summary['accuracy']:.4f}{more}, {speed:.0f} images/s")

"""The decision: which algorithm runs a problem, with which schedule."""

from __future__ import annotations

from dataclasses import dataclass

from .activations import MASKED
from .problem import Problem
from .schedule import Schedule
from .target import Target


@dataclass(frozen=True)
class Plan:
    """Data only: what will run, how long it should take, and how that is known.

    Attributes:
        problem: What was asked for.
        target: The machine it was planned for.
        algorithm: Its name.
        version: The algorithm's version.
        schedule: Tile sizes and the like.
        inner: The problem that the kernel itself solves. Where it differs from `problem`, the
            passes around it are named by `before` and `after`.
        seconds: Time of a call.
        source: How it was chosen: "estimate", "measured", "wisdom", or "family" by wisdom that
            comes with the package. The time of the first and of the last is an estimate.
        error: The bound that the algorithm declares.
        held: Whether a caller's bound holds, whatever precision torch is set to.

    >>> from tilewise import explain
    >>> explain("n1c8h8w8k8r3s3p1_f64_forward").plan.algorithm
    'vendor'
    """

    problem: Problem
    target: Target
    algorithm: str
    version: int
    schedule: Schedule
    inner: Problem
    seconds: float
    source: str  # estimate, measured, wisdom or family
    error: float
    held: bool = False  # a caller's bound holds, whatever precision torch is set to

    @property
    def is_timed(self) -> bool:
        """Whether a clock told how long it takes."""
        return self.source in ("measured", "wisdom")

    @property
    def mirrors(self) -> bool:
        """Whether a gradient of the input is had as a forward convolution."""
        return self.inner.direction != self.problem.direction

    @property
    def before(self) -> tuple[str, ...]:
        """Passes before the kernel."""
        return passes(self.problem, self.inner)[0]

    @property
    def after(self) -> tuple[str, ...]:
        """Passes after the kernel."""
        return passes(self.problem, self.inner)[1]

    def __str__(self) -> str:
        passes = f" then {', '.join(self.after)}" if self.after else ""
        return (f"{self.problem} on {self.target}: {self.algorithm} [{self.schedule}]{passes}, "
                f"{self.seconds * 1e6:.1f} us ({self.source}), error <= {self.error:.1e}")


def passes(p: Problem, inner: Problem) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the passes before and after a kernel that solves `inner` for a problem."""
    if p is inner:
        return (), ()
    fused, turned = inner.epilogue.steps, inner.layout != p.layout
    rest = p.epilogue.steps[len(fused):]
    if "mask" in rest:  # made in one pass with what it tells of
        rest = tuple(step for step in rest if step not in {*MASKED, "pool2"})
    before = ("to_" + inner.layout,) if turned else ()
    if p.direction == "backward_weight":  # always (K, C, R, S)
        return before, ()
    return before, rest + (("to_" + p.layout,) if turned else ())

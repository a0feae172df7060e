"""What explain and tune begin with: the subject that a user named, optimised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.progress import Tell

if TYPE_CHECKING:
    from torch import nn

    from ..bench.subjects import Subject
    from ..core.plan import Plan

SubjectName = Annotated[str, typer.Argument(
    metavar="SUBJECT", help="Name a model, a problem or package.module:factory.")]

Training = Annotated[bool, typer.Option(
    "--training", help="Take a step of training: forward, gradients of images and of weights.")]


@dataclass(frozen=True)
class Optimized:
    """A subject as tilewise runs it."""

    subject: Subject
    model: nn.Module


def optimized(subject: str, batch: int | None, shape: str | None, max_error: float | None,
              tell: Tell) -> Optimized:
    """Nothing is planned yet."""
    import tilewise

    from ..bench.subjects import subject as read

    tell(f"building {subject}", 0, 1)
    what = read(subject, batch, shape)
    return Optimized(what, tilewise.optimize(what.model, max_error=max_error))


def plan_data(plan: Plan) -> dict[str, Any]:
    """A plan for programs."""
    return {"algorithm": plan.algorithm, "seconds": plan.seconds, "source": plan.source,
            "error": plan.error, "schedule": dict(plan.schedule), "before": list(plan.before),
            "after": list(plan.after)}

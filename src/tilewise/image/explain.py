"""Why a filter runs the way it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.plan import Plan
from ..planner.planner import Candidate
from .arrays import ENGINE


def explain(filter: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Run a filter; of each pass, every method with its time and error, or why it was refused.

    >>> import numpy as np
    >>> from tilewise import image
    >>> print(explain(image.median, np.zeros((9, 9), np.uint8), 3).partition(" ")[0])
    n1h9w9c1r3s3a1x1_u8_to_u8_reflect_order_4
    """
    plans: list[Plan] = []
    ENGINE.observers.append(plans.append)
    try:
        filter(*args, **options)
    finally:
        ENGINE.observers.remove(plans.append)
    return "\n".join(map(_told, dict.fromkeys(plans))) or "no generated code ran: it is scipy's"


def _told(plan: Plan) -> str:
    found = ENGINE.planner.candidates(plan.problem, plan.target, max_error=1.0)
    width = max(len(one.algorithm) for one in found)
    return "\n".join([f"{plan.problem} on {plan.target}",
                      *(f"  {one.algorithm:<{width}}  {_answer(one)}" for one in found)])


def _answer(candidate: Candidate) -> str:
    plan = candidate.plan
    if plan is None:
        return "; ".join(candidate.reasons)
    return f"~{plan.seconds * 1e3:.3f} ms, error {plan.error:.0e}, {plan.schedule}"

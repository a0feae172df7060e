"""Why a convolution runs the way it does."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.problem import Problem
from ..core.target import Target
from ..planner.planner import Candidate
from .ops import ENGINE


@dataclass(frozen=True)
class Explanation:
    """Every candidate with its estimate, or the reasons for its refusal; prints as a table."""

    problem: Problem
    target: Target
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        rows = [_row(candidate, first=i == 0) for i, candidate in enumerate(self.candidates)]
        width = max(len(row[0]) for row in rows)
        title = (f"{self.problem} on {self.target}\n"
                 f"{self.problem.flops / 1e9:.3f} GFLOP, {self.problem.bytes / 1e6:.1f} MB")
        return "\n".join([title, *(f"{row[0]:<{width}}  {row[1]}" for row in rows)])

    __repr__ = __str__


def explain(problem: str | Problem, *, target: Target | None = None,
            max_error: float | None = None, effort: str = "estimate") -> Explanation:
    """Every algorithm's answer to a problem, the best first.

    With effort="measure" the candidates are run and timed.

    >>> print(explain("n1c8h8w8k8r3s3p1_f64_forward"))  # doctest: +ELLIPSIS
    n1c8h8w8k8r3s3p1_f64_forward on ...
    """
    p = Problem.parse(problem) if isinstance(problem, str) else problem
    t = target or Target.host()
    found = ENGINE.planner.candidates(p, t, max_error)
    if effort == "measure":
        found = _measured(found)
    return Explanation(p, t, tuple(found))


def _measured(found: list[Candidate]) -> list[Candidate]:
    plans = ENGINE.planner.measure([c.plan for c in found if c.plan])
    timed = [Candidate(plan.algorithm, plan) for plan in plans]
    names = {candidate.algorithm for candidate in timed}
    return timed + [candidate for candidate in found if candidate.algorithm not in names]


def _row(candidate: Candidate, first: bool) -> tuple[str, str]:
    mark = "> " if first and candidate.plan else "  "
    plan = candidate.plan
    if plan is None:
        return mark + candidate.algorithm, "refused: " + "; ".join(candidate.reasons)
    passes = f", then {', '.join(plan.after)}" if plan.after else ""
    rate = plan.problem.flops / plan.seconds / 1e9
    return mark + candidate.algorithm, (
        f"{plan.seconds * 1e6:10.1f} us {plan.source:<8} {rate:8.1f} GF/s  "
        f"error <= {plan.error:.0e}  {plan.schedule}{passes}")

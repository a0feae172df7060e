"""tilewise explain: which algorithm runs what, and why."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .output import Batch, Json, Shape, Threads, print_json, progress, set_threads


def explain(
    subject: Annotated[str, typer.Argument(help="A model, a problem or package.module:factory.")],
    batch: Batch = None,
    shape: Shape = None,
    effort: Annotated[str, typer.Option(
        help="estimate, or measure: run and time every candidate.")] = "estimate",
    max_error: Annotated[float | None, typer.Option(
        help="Bound on the relative rms error; torch's precision setting, if not said.")] = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Every candidate with its time and error, or the reasons against it."""
    import tilewise

    from ..bench.subjects import subject as read

    set_threads(threads)
    with progress(f"explaining {subject}"):
        if subject.startswith("n") and "_" in subject:
            p = tilewise.Problem.parse(subject)
            p = p if batch is None else p.with_(n=batch)
            answer = tilewise.explain(p, max_error=max_error, effort=effort)
        else:
            what = read(subject, batch, shape)
            fast = tilewise.optimize(what.model, max_error=max_error)
            answer = tilewise.explain(fast, what.example, max_error=max_error, effort=effort)
    print_json(_data(answer)) if json else print(answer)


def _data(answer: Any) -> Any:
    if hasattr(answer, "layers"):
        return [{"layer": name, **_data(explanation)} for name, explanation in answer.layers]
    return {"problem": str(answer.problem), "target": str(answer.target),
            "candidates": [_candidate(candidate) for candidate in answer.candidates]}


def _candidate(candidate: Any) -> dict[str, Any]:
    plan = candidate.plan
    if plan is None:
        return {"algorithm": candidate.algorithm, "refused": list(candidate.reasons)}
    return {"algorithm": plan.algorithm, "seconds": plan.seconds, "source": plan.source,
            "error": plan.error, "schedule": dict(plan.schedule), "before": list(plan.before),
            "after": list(plan.after)}

"""tilewise explain: which algorithm runs what, and why."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..core.progress import Tell
from .model import SubjectName, Training, optimized, plan_data
from .output import (
    Batch,
    Json,
    MaxError,
    Shape,
    Threads,
    console,
    fits,
    print_json,
    print_table,
    progress,
    set_threads,
)


def explain(
    subject: SubjectName,
    batch: Batch = None,
    shape: Shape = None,
    effort: Annotated[str, typer.Option(
        help="Choose estimate, or measure to run and time every candidate.")] = "estimate",
    stage: Annotated[str | None, typer.Option(
        help="Show a model's graphs after a pass instead: captured, normalised, fused, laid_out, "
             "lowered, placed or bound.")] = None,
    max_error: MaxError = None,
    training: Training = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """List every candidate with its time and error, or the reasons against it."""
    set_threads(threads)
    with progress(f"explaining {subject}") as tell:
        if stage is not None:
            answer = _stage(subject, batch, shape, stage, max_error, training)
        elif subject.startswith("n") and "_" in subject:
            answer = _problem(subject, batch, max_error, effort, tell, training)
        else:
            answer = _model(subject, batch, shape, max_error, effort, tell, training)
    if json:
        print_json(_data(answer))
    elif stage is not None or fits(str(answer)):
        print(answer)
    else:
        _print_narrow(answer)


def _problem(text: str, batch: int | None, max_error: float | None, effort: str,
             tell: Tell, training: bool) -> Any:
    import tilewise

    p = tilewise.Problem.parse(text)
    p = p if batch is None else p.with_(n=batch)
    return tilewise.explain(p, max_error=max_error, effort=effort, training=training, tell=tell)


def _stage(subject: str, batch: int | None, shape: str | None, stage: str,
           max_error: float | None, training: bool) -> Any:
    import tilewise

    from ..bench.subjects import subject as read

    found = read(subject, batch, shape)
    return tilewise.explain(found.model, found.example, stage=stage, max_error=max_error,
                            training=training)


def _model(subject: str, batch: int | None, shape: str | None, max_error: float | None,
           effort: str, tell: Tell, training: bool) -> Any:
    import tilewise

    what = optimized(subject, batch, shape, max_error, tell)
    return tilewise.explain(what.model, what.subject.example, max_error=max_error, effort=effort,
                            training=training, tell=tell)


def _print_narrow(answer: Any) -> None:
    """Without schedules, which are long; times and errors matter more."""
    if hasattr(answer, "layers"):
        header, *rows = answer.rows
        print_table("", header, rows, left=3, spare=("schedule",))
        for note in answer.notes:
            console.print(note, markup=False)
        return
    for line in str(answer).splitlines()[:2]:
        console.print(line, markup=False)
    print_table("", ("", ""), [(name, told) for name, told, _ in answer.rows], left=2)


def _data(answer: Any) -> Any:
    if hasattr(answer, "graphs"):
        return {"stage": answer.stage, "graphs": [text.splitlines() for text in answer.graphs]}
    if hasattr(answer, "layers"):
        return [{"layer": name, **_data(explanation)} for name, explanation in answer.layers]
    return {"problem": str(answer.problem), "target": str(answer.target),
            "candidates": [_candidate(candidate) for candidate in answer.candidates]}


def _candidate(candidate: Any) -> dict[str, Any]:
    if candidate.plan is None:
        return {"algorithm": candidate.algorithm, "refused": list(candidate.reasons)}
    return plan_data(candidate.plan)

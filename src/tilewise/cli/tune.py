"""tilewise tune: measure a model's layers once, keep the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .model import SubjectName, Training, optimized, plan_data
from .output import (
    Batch,
    Json,
    MaxError,
    Shape,
    Threads,
    milliseconds,
    print_json,
    print_table,
    progress,
    set_threads,
)


def tune(
    subject: SubjectName,
    batch: Batch = None,
    shape: Shape = None,
    effort: Annotated[str, typer.Option(
        help="Choose measure for the default schedules, or exhaustive for many schedules.")]
    = "measure",
    max_error: MaxError = None,
    output: Annotated[Path | None, typer.Option(
        "--output", "-o",
        help="Add the winners to this wisdom file. The default is the user's own.")] = None,
    training: Training = False,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Time the candidates of every convolution and write the winners to a wisdom file."""
    import tilewise

    from ..bench.machine import facts, learn_limits
    from ..bench.run import beside_torch, step_beside_torch
    from ..model.tuning import tune as tune_model

    count = set_threads(threads)
    with progress(f"tuning {subject}") as tell:
        learn_limits(facts(count, tell=tell))  # of what is not tuned, estimates get better too
        what = optimized(subject, batch, shape, max_error, tell)
        layers = tune_model(what.model, what.subject.example, effort, max_error, tell, training)
        place = tilewise.wisdom.save(output)
        whole = step_beside_torch if training else beside_torch
        ours, theirs = whole(what.subject, what.model, tell)
    if json:
        print_json({"wisdom": str(place), "seconds": ours, "torch_seconds": theirs, "layers": [
            {"layer": layer.name, "problem": str(layer.plan.problem), **plan_data(layer.plan)}
            for layer in layers]})
        return
    print_table(what.subject.name, ("layer", "problem", "algorithm", "ms", "from"), [
        (layer.name, str(layer.plan.problem), layer.plan.algorithm,
         milliseconds(layer.plan.seconds), layer.plan.source) for layer in layers], left=3,
        spare=("from",))
    print(f"{'a step' if training else 'as a whole'}: tilewise {milliseconds(ours)} ms, torch "
          f"{milliseconds(theirs)} ms (its fastest form): {theirs / ours:.2f}x as fast")
    print(f"written to {place}")

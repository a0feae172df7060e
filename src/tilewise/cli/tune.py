"""tilewise tune: measure a model's layers once, keep the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .output import (
    Batch,
    Json,
    Shape,
    Threads,
    milliseconds,
    print_json,
    print_table,
    progress,
    set_threads,
)


def tune(
    subject: Annotated[str, typer.Argument(help="A model, a problem or package.module:factory.")],
    batch: Batch = None,
    shape: Shape = None,
    effort: Annotated[str, typer.Option(
        help="measure: the default schedules; exhaustive: many schedules.")] = "measure",
    max_error: Annotated[float | None, typer.Option(
        help="Bound on the relative rms error; torch's precision setting, if not said.")] = None,
    output: Annotated[Path | None, typer.Option(
        "--output", "-o", help="The wisdom file to add to; the user's own, if not said.")] = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Time the candidates of every convolution and write the winners to a wisdom file."""
    import tilewise

    from ..bench.subjects import subject as read
    from ..frontend.tuning import tune as tune_model

    set_threads(threads)
    what = read(subject, batch, shape)
    with progress(f"tuning {what.name}"):
        fast = tilewise.optimize(what.model, max_error=max_error)
        layers = tune_model(fast, what.example, effort, max_error)
        place = tilewise.wisdom.save(output)
    if json:
        print_json({"wisdom": str(place), "layers": [
            {"layer": x.name.rpartition(".")[2], "problem": str(x.plan.problem),
             "algorithm": x.plan.algorithm, "schedule": dict(x.plan.schedule),
             "seconds": x.plan.seconds, "source": x.plan.source} for x in layers]})
        return
    print_table(f"{what.name}", ("layer", "problem", "algorithm", "ms", "from"), [
        (x.name.rpartition(".")[2], str(x.plan.problem), x.plan.algorithm,
         milliseconds(x.plan.seconds), x.plan.source) for x in layers], left=3)
    print(f"written to {place}")

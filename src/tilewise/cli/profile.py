"""tilewise profile: where the time of a model goes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .model import SubjectName, optimized
from .output import (
    Batch,
    Json,
    MaxError,
    Shape,
    Threads,
    console,
    fits,
    in_a_directory,
    print_json,
    print_table,
    progress,
    set_threads,
)


def profile(
    subject: SubjectName,
    batch: Batch = None,
    shape: Shape = None,
    picture: Annotated[Path | None, typer.Option(
        help="Draw time and memory over time to this SVG file.", callback=in_a_directory)] = None,
    max_error: MaxError = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Time every step of a model: convolutions, and all that runs between them."""
    import tilewise

    from ..bench.timeline import timeline

    set_threads(threads)
    with progress(f"profiling {subject}") as tell:
        what = optimized(subject, batch, shape, max_error, tell)
        found = tilewise.profile(what.model, what.subject.example)
    if picture is not None:
        picture.write_text(str(timeline(found.lines)), encoding="utf-8")
    if json:
        print_json({"steps": [asdict(line) for line in found.lines], "arena": found.arena,
                    "weights": found.weights})
        return
    if fits(str(found)):
        print(found)
    else:
        header, *rows = found.rows
        print_table("", header, rows, left=3, spare=("MB", "GFLOP/s"))
        console.print(found.summary, markup=False)
    if picture is not None:
        print(picture)

"""tilewise gpu-audit: what became of the GPU schedules when they were compiled."""

from __future__ import annotations

from typing import Annotated

import typer

from . import NO
from .output import Json, Output, command, progress


def gpu_audit(
    gpu: Annotated[list[str] | None, typer.Option(
        help="Compile for sm_80, sm_90, sm_100 or gfx942. The default is all of them.")] = None,
    defaults_only: Annotated[bool, typer.Option(
        "--defaults", help="Compile only the default of each direction and type.")] = False,
    workers: Annotated[int | None, typer.Option(
        min=1, help="Compile in this many processes.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    output: Output = None,
    json: Json = False,
) -> None:
    """Compile every shipped GPU schedule, without a GPU.

    The exit code is 1 if one breaks its budget.
    """
    from dataclasses import asdict
    from datetime import date

    import tilewise

    from ..bench.machine import versions
    from ..bench.results import Result
    from ..core.gpu import GPUS
    from ..tools.gpu_audit import as_json, as_markdown, as_text

    with progress("compiling") as tell:
        found = tilewise.gpu_audit(gpu or tuple(GPUS), defaults_only, workers, tell)
    if output is not None:
        Result("gpu-audit", command(), date.today().isoformat(), {"versions": versions()}, {},
               [asdict(row) for row in found]).save(output)
    print(as_json(found) if json else as_markdown(found) if markdown else as_text(found))
    broken = [row for row in found if row.complaints]
    for row in broken:
        typer.echo(f"{row.gpu} {row.kernel} {row.dtype} {row.precision} {row.schedule}: "
                   f"{'; '.join(row.complaints)}", err=True)
    if broken:
        raise typer.Exit(NO)

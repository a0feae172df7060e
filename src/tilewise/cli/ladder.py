"""tilewise ladder: what each optimisation gives on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .output import (
    Json,
    Output,
    Threads,
    command,
    console,
    megabytes,
    milliseconds,
    print_json,
    print_table,
    progress,
    set_threads,
)

if TYPE_CHECKING:
    from ..bench.ladder import Line


def ladder(
    problem: Annotated[str, typer.Argument(
        help="A problem such as n8c64h56w56k64r3s3p1_f32_forward+bias+relu.")],
    rounds: Annotated[int, typer.Option(min=2, help="How often everybody takes a turn.")] = 7,
    threads: Threads = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """The optimisations of a convolution, one at a time, each checked and timed."""
    from dataclasses import asdict
    from datetime import date

    import torch

    from ..bench.ladder import climbable
    from ..bench.ladder import ladder as climb
    from ..bench.machine import facts
    from ..bench.results import Result
    from ..core.problem import Problem
    from ..core.target import Target

    p, count = climbable(Problem.parse(problem)), set_threads(threads)
    with progress("measuring limits") as tell, torch.no_grad():
        machine = facts(count, tell=tell)
        lines = climb(p, Target.host(threads=count), machine, rounds, tell)
    result = Result("ladder", command(), date.today().isoformat(), machine,
                    {"problem": str(p), "threads": count, "rounds": rounds},
                    [asdict(line) for line in lines])
    if output is not None:
        result.save(output)
    if json:
        print_json(asdict(result))
    else:
        _print(problem, lines)


def _print(problem: str, lines: list[Line]) -> None:
    columns = ("", "ms", "GFLOP/s", "of peak", "moved", "workspace", "error", "gain")
    print_table(problem, columns, [_row(line) for line in lines],
                styles=[{"torch": "cyan", "limit": "dim"}.get(line.kind) for line in lines])
    console.print()
    for line in lines:
        if line.kind == "rung":
            console.print(f"[bold]{line.name}[/bold]: {line.why}")


def _row(line: Line) -> tuple[str, ...]:
    if line.minimum is None or line.gflops is None:
        return (line.name, *["-"] * 7)
    return (line.name, milliseconds(line.minimum), f"{line.gflops:.1f}",
            "-" if line.share is None else f"{line.share:.0%}",
            "-" if line.bytes is None else megabytes(line.bytes),
            "-" if line.workspace is None else megabytes(line.workspace),
            "-" if line.error is None else f"{line.error:.1e}",
            "-" if line.gain is None else f"{line.gain:.2f}x")

"""tilewise ladder: what each optimisation gives on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from .output import (
    Json,
    Output,
    Rounds,
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

BUSY = 0.5  # a spread that no quiet machine has

if TYPE_CHECKING:
    from ..bench.ladder import Line
    from ..core.problem import Problem


def ladder(
    problem: Annotated[str, typer.Argument(
        help="Name a problem such as n8c64h56w56k64r3s3p1_f32_forward+bias+relu.")],
    rounds: Rounds = 7,
    threads: Threads = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """Add the optimisations of a convolution one at a time, each checked and timed."""
    from dataclasses import asdict
    from datetime import date

    import torch

    from ..bench.ladder import ladder as climb
    from ..bench.ladder import passes_peak, rated
    from ..bench.machine import best_limits, facts
    from ..bench.results import Result
    from ..core.target import Target

    p, count = _layer(problem), set_threads(threads)
    with progress("measuring limits") as tell, torch.no_grad():
        machine = facts(count, tell=tell)
        lines = climb(p, Target.host(threads=count), machine, rounds, tell)
        if passes_peak(lines):  # what disturbed the first measurement may be gone
            machine = best_limits(machine)
            lines = rated(lines, p, machine)
    result = Result("ladder", command(), date.today().isoformat(), machine,
                    {"problem": str(p), "threads": count, "rounds": rounds},
                    [asdict(line) for line in lines])
    if output is not None:
        result.save(output)
    if json:
        print_json(asdict(result))
    else:
        _print(problem, lines)


def _layer(text: str) -> Problem:
    """The problem; models are told apart."""
    from ..bench.ladder import climbable
    from ..core.errors import InvalidProblem
    from ..core.problem import Problem
    from ..models import MODELS

    if text in MODELS or ":" in text.partition("+")[0]:
        raise InvalidProblem(f"{text} is a model, and ladder takes one layer: tilewise explain "
                             f"{text} lists a model's layers")
    return climbable(Problem.parse(text))


def _print(problem: str, lines: list[Line]) -> None:
    columns = ("", "ms", "spread", "GFLOP/s", "of peak", "moved", "workspace", "error", "gain")
    print_table(problem, columns, [_row(line) for line in lines],
                styles=[{"torch": "cyan", "limit": "dim"}.get(line.kind) for line in lines],
                spare=("workspace", "moved", "of peak"))
    console.print()
    for line in lines:
        if line.kind == "rung":
            by = f" ({line.algorithm})" if line.algorithm else ""
            console.print(f"[bold]{line.name}[/bold]{by}: {line.why}")
    for note in _notes(lines):
        console.print(f"\n{note}")


def _notes(lines: list[Line]) -> Iterator[str]:
    """What of the table needs an explanation."""
    from ..bench.ladder import passes_peak

    yield ("ms is the least time of all rounds. spread is how far the rounds lie apart: the range "
           "of their middle half over the median. moved is what is read and written at least, "
           "workspace the scratch memory. gain is the speed relative to the rung before. limit: "
           "memory is the time to read and write everything once.")
    rungs = [line for line in lines if line.kind == "rung" and line.minimum]
    if passes_peak(lines):
        yield ("The peak was measured too low, twice: a rung of the vector units passes it. The "
               "machine is busy. Close other programs and repeat.")
    elif any((line.spread or 0) > BUSY for line in rungs):
        yield ("The spread of some rungs is above 50%: the machine is busy. Close other programs "
               "and repeat.")
    if any(line.share and line.share > 1 and not line.is_plain for line in rungs):
        yield ("of peak counts the operations of the direct method against the measured "
               "multiply-add peak of the vector units. More than 100% is possible: Winograd does "
               "fewer operations than are counted, and the matrix unit has a higher peak.")
    if len(rungs) > 1 and rungs[-1].gain and rungs[-1].gain < 1:
        yield _setback(rungs, [line.minimum for line in lines
                               if line.kind == "torch" and line.minimum])


def _setback(rungs: list[Line], torch: list[float]) -> str:
    """Why the last rung is slower than the one before it."""
    before, last = rungs[-2:]
    why = (f"{before.barred} (max_error admits it, with its error of {before.error:.1e})"
           if before.barred else "the planner estimates times, and tilewise tune measures them")
    beside = f" It is {min(torch) / (last.minimum or 1):.2f}x as fast as torch." if torch else ""
    return (f"{last.name} is {last.gain:.2f}x as fast as the rung before it ({before.name}): "
            f"{why}.{beside}")


def _row(line: Line) -> tuple[str, ...]:
    if line.minimum is None or line.gflops is None:
        return (line.name, *["-"] * 8)
    return (line.name, milliseconds(line.minimum),
            "-" if line.spread is None else f"{line.spread:.0%}", f"{line.gflops:.1f}",
            "-" if line.share is None else f"{line.share:.0%}",
            "-" if line.bytes is None else megabytes(line.bytes),
            "-" if line.workspace is None else megabytes(line.workspace),
            "-" if line.error is None else f"{line.error:.1e}",
            "-" if line.gain is None else f"{line.gain:.2f}x")

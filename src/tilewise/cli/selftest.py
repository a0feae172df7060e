"""tilewise selftest: random problems against float64, for a minute or for as long as one likes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import NO
from .doctor import run_selftest
from .output import Json, Threads, console, print_json, print_table, progress, set_threads

Deep = Annotated[bool, typer.Option(
    "--deep", help="Shards of random problems, networks and filters, each in a process of its "
                   "own, --threads at a time, until --seeds is reached. What the result file "
                   "has is not run again.")]
Seeds = Annotated[str, typer.Option(help="With --deep: the first seed and the one behind the "
                                         "last, such as 0:100.")]
Parts = Annotated[list[str] | None, typer.Option(
    "--part", help="With --deep: problems, networks, learning or filters; all if not given.")]
Rows = Annotated[list[str] | None, typer.Option(
    "--row", help="With --deep: ISA rows; all that this machine has if not given.")]
Checked = Annotated[bool, typer.Option(
    "--check", help="With --deep: code that checks bounds, as TILEWISE_CHECK=1 makes it.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="With --deep: the result file.")]


def selftest(deep: Deep = False, seeds: Seeds = "0:1", part: Parts = None, row: Rows = None,
             check: Checked = False, output: Output = Path("deep.json"), threads: Threads = None,
             json: Json = False) -> None:
    """Run random problems of every algorithm against float64.

    Without --deep it is `tilewise doctor --selftest`. The exit code is 1 if a result is wrong.
    """
    count = set_threads(threads)
    if not deep:
        run_selftest(count, json)
        return
    from ..bench import deep as work
    from ..bench.machine import facts
    from ..bench.results import understood

    wanted = list(work.shards(part or list(work.PARTS), row or work.rows_here(), _range(seeds)))
    words = [output.name if word == str(output) else word for word in sys.argv[1:]]
    command = " ".join(["tilewise", *words])
    with progress("testing") as tell:
        found = work.run(wanted, output, count, check, command, facts(count, limits=False), tell)
    with understood(output):
        wrong = [text for one in found.rows for text in one["wrong"]]
        if json:
            print_json({"totals": {" ".join(key): value for key, value
                                   in work.totals(found.rows).items()}, "wrong": wrong})
        else:
            _print(found.rows, wrong)
    if wrong:
        raise typer.Exit(NO)


def _range(text: str) -> range:
    first, _, end = text.partition(":")
    if not (first.isdigit() and end.isdigit()):
        raise typer.BadParameter(f"seeds is {text!r}, needs two numbers such as 0:100")
    return range(int(first), int(end))


def _print(rows: list[dict[str, Any]], wrong: list[str]) -> None:
    from ..bench.deep import totals

    for text in wrong:
        console.print(text, soft_wrap=True, markup=False)
    print_table("random tests", ("", "name", "ran", "runs", "worst error, of its bound"), [
        (part, name, f"{sum(one['ran'].values()):,}", f"{one['runs']:,}", f"{one['worst']:.2f}")
        for (part, name), one in totals(rows).items()], left=2)
    console.print(f"{len(rows)} shards, {len(wrong)} wrong, "
                  f"{sum(row['seconds'] for row in rows):,.0f} s of processes")

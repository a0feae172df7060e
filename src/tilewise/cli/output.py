"""How commands speak: tables or JSON on stdout, progress and complaints on stderr."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ..core.progress import Tell

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Threads = Annotated[int | None, typer.Option(
    "--threads", min=1, help="Use this many threads, in torch and in every other engine. The "
                             "default is torch's own number.")]
Batch = Annotated[int | None, typer.Option(
    "--batch", min=1, help="Put this many images into a batch. The default is the problem's own "
                           "batch, or 8 for a model.")]
Shape = Annotated[str | None, typer.Option(
    "--shape", help="Use images of this shape: channels x height x width, such as 3x224x224.")]

MaxError = Annotated[float | None, typer.Option(
    help="Admit algorithms up to this relative rms error. The default follows torch's precision "
         "setting.")]

Rounds = Annotated[int, typer.Option(min=2, help="Let every contender take this many turns.")]


def in_a_directory(path: Path | None) -> Path | None:
    """Complain before the work, not after it, about a file that cannot be written."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is no directory: make it first")
    return path


Output = Annotated[Path | None, typer.Option(
    "--output", "-o", help="Write the results to this file.", callback=in_a_directory)]

# a pipe has no width: lines stay whole there
console = Console(highlight=False, width=None if sys.stdout.isatty() else 240)
errors = Console(stderr=True, highlight=False)


def print_json(data: Any) -> None:
    """The answer for programs."""
    print(json.dumps(data, indent=1))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]],
                left: int = 1, styles: Sequence[str | None] = (),
                spare: Sequence[str] = ()) -> None:
    """The answer for people; all columns but the first `left` are numbers.

    Columns named in `spare` go, in that order, where the table is wider than the terminal.
    """
    table = Table(title=title or None, title_justify="left", title_style="bold", box=None,
                  header_style="dim", pad_edge=False,
                  show_header=bool(title) or any(columns))
    kept = fitting(columns, rows, spare, console.width)
    for index in kept:
        table.add_column(columns[index], justify="left" if index < left else "right",
                         overflow="fold", no_wrap=index >= left)
    for index, row in enumerate(rows):
        table.add_row(*(escape(row[i]) for i in kept),
                      style=styles[index] if index < len(styles) else None)
    console.print(table)


def fitting(columns: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str],
            width: int) -> list[int]:
    """The columns that stay; spare ones go until a line fits into the width.

    >>> fitting(("name", "ms", "schedule"), [("a", "1.0", 30 * "x")], ["schedule"], 20)
    [0, 1]
    """
    widths = [max(len(line[i]) for line in (columns, *rows)) for i in range(len(columns))]
    kept = [i for i, wide in enumerate(widths) if wide or not rows]
    for name in spare:
        if sum(widths[i] for i in kept) + 2 * len(kept) - 2 <= width:
            break
        kept.remove(columns.index(name))
    return kept


def bars() -> Progress:
    """Bars on stderr, so many of so many, which go when they are done."""
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                    TimeElapsedColumn(), TimeRemainingColumn(), console=errors, transient=True,
                    disable=not errors.is_terminal)


@contextmanager
def progress(what: str) -> Iterator[Tell]:
    """A bar; the function inside says what is done now, how much of it is done, and of how much."""
    bar = bars()
    with bar, _stdout_for_answers():
        task = bar.add_task(escape(what), total=None)

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=escape(what), completed=done, total=total)

        yield tell


def fits(text: str) -> bool:
    """Whether lines can be printed whole: in a pipe they always can."""
    return not console.is_terminal or max(map(len, text.splitlines())) <= console.width


@contextmanager
def _stdout_for_answers() -> Iterator[None]:
    """Libraries that print while they work do so on stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def milliseconds(seconds: float) -> str:
    """Three digits that matter, or thereabouts."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def megabytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def command() -> str:
    """What was typed."""
    return shlex.join(["tilewise", *sys.argv[1:]])


def set_threads(threads: int | None) -> int:
    """Set torch's number of threads, which is everybody's; returns it.

    If none is said, there are as many as before, but no more than cores.
    """
    import torch

    from ..core.cores import cores

    torch.set_num_threads(threads or min(torch.get_num_threads(), cores()))
    return int(torch.get_num_threads())

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
    "--threads", min=1, help="Threads of everybody; torch's own number, if not said.")]
Batch = Annotated[int | None, typer.Option(
    "--batch", min=1, help="Images in a batch; a problem's own, if not said, else 8.")]
Shape = Annotated[str | None, typer.Option(
    "--shape", help="Channels x height x width of an image, as 3x224x224.")]

MaxError = Annotated[float | None, typer.Option(
    help="Bound on the relative rms error; torch's precision setting, if not said.")]



def in_a_directory(path: Path | None) -> Path | None:
    """Complain before the work, not after it, about a file that cannot be written."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is no directory: make it first")
    return path


Output = Annotated[Path | None, typer.Option(
    "--output", "-o", help="Write a result file.", callback=in_a_directory)]

# a pipe has no width: lines stay whole there
console = Console(highlight=False, width=None if sys.stdout.isatty() else 240)
errors = Console(stderr=True, highlight=False)


def print_json(data: Any) -> None:
    """The answer for programs."""
    print(json.dumps(data, indent=1))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]],
                left: int = 1, styles: Sequence[str | None] = (), caption: str = "") -> None:
    """The answer for people; all columns but the first `left` are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None,
                  header_style="dim", pad_edge=False, caption=caption or None,
                  caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right",
                         overflow="fold")
    for index, row in enumerate(rows):
        table.add_row(*map(escape, row), style=styles[index] if index < len(styles) else None)
    console.print(table)


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


def print_lines(text: str) -> None:
    """Wide lines: cut at the width of a terminal, whole in a pipe."""
    if sys.stdout.isatty():
        console.print(text, markup=False, no_wrap=True, overflow="ellipsis")
    else:
        print(text)


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
    """Set torch's number of threads, which is everybody's; returns it."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    return int(torch.get_num_threads())

"""tilewise wisdom: plans that outlive the process, as files."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from . import NO
from .output import (
    Json,
    errors,
    in_a_directory,
    milliseconds,
    print_json,
    print_table,
    progress,
    set_threads,
)

app = typer.Typer(no_args_is_help=True,
                  help="Show, merge, export, import, check and ship wisdom files.")

File = Annotated[Path | None, typer.Argument(
    help="Give a wisdom file. The default is the user's own.")]


@app.command()
def show(file: File = None, json: Json = False) -> None:
    """Show every plan of a file."""
    entries = _entries(file)
    if json:
        print_json({name: entry.to_json() for name, entry in entries.items()})
        return
    print_table(f"{_place(file)}: {len(entries)} plans",
                ("problem and machine", "algorithm", "schedule", "ms"),
                [(name, entry.algorithm, str(entry.schedule), milliseconds(entry.seconds))
                 for name, entry in sorted(entries.items())], left=3, spare=("schedule",))


@app.command()
def merge(into: Annotated[Path, typer.Argument(help="Add to this file.")],
          sources: Annotated[list[Path], typer.Argument(help="Add the plans of these files.")],
          json: Json = False) -> None:
    """Add the plans of some files to another. Of two for one problem the faster stays."""
    from ..tools import wisdom

    _must_exist(*sources)
    count = wisdom.merge(into, *sources)
    _say({"file": str(into), "plans": count}, f"{into}: {count} plans", json)


@app.command()
def export(file: Annotated[Path, typer.Argument(help="Write to this file.",
                                                 callback=in_a_directory)],
           json: Json = False) -> None:
    """Copy the user's own wisdom to a file, to be shipped with a model."""
    place = _place(None)
    _must_exist(place)
    file.unlink(missing_ok=True)  # its mode would stay
    # others may read it, as the umask says; wisdom that they could write is not read
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as copy:
        copy.write(place.read_bytes())
    count = len(_entries(file))
    _say({"file": str(file), "plans": count}, f"{file}: {count} plans", json)


@app.command("import")
def import_(file: Annotated[Path, typer.Argument(help="Give a wisdom file.")],
            json: Json = False) -> None:
    """Add a file's plans to the user's own wisdom."""
    merge(_place(None), [file], json)


@app.command()
def check(file: File = None, json: Json = False) -> None:
    """Check whether every plan can still be used here. The exit code is 1 if one cannot."""
    verdicts = {name: _verdict(name, entry) for name, entry in sorted(_entries(file).items())}
    stale = {name: why for name, why in verdicts.items() if why}
    if json:
        print_json(verdicts)
    else:
        usable = len(verdicts) - len(stale)
        print(f"{_place(file)}: {usable} of {len(verdicts)} plans can be used here")
        if stale:
            print_table("", ("problem and machine", "why not"), list(stale.items()), left=2)
    if stale:
        raise typer.Exit(NO)


@app.command()
def ship(file: File = None,
         directory: Annotated[Path, typer.Option(
             "--directory", "-d", file_okay=False, callback=in_a_directory,
             help="Write to the file of this processor's family in here.")] = Path(),
         gain: Annotated[float, typer.Option(
             help="Take plans that are so many times as fast as the estimate's.", min=1.0)] = 1.03,
         json: Json = False) -> None:
    """Time tuned plans beside estimates; write those that gain, for the processor's family."""
    from ..tools import families

    _must_exist(_place(file))
    set_threads(2)  # choices are made for two, whatever the number
    with progress("timing") as tell:
        place, trials, count = families.ship(directory, _place(file), gain, tell)
    if json:
        print_json({"file": str(place), "plans": count,
                    "gains": {trial.name: trial.gain for trial in trials}})
        return
    print_table(f"{place}: {count} plans", ("problem and machine", "algorithm", "gain"),
                [(trial.name, trial.tuned.algorithm, f"{trial.gain:.2f}x") for trial in trials],
                left=2)


def _verdict(name: str, entry: Any) -> str:
    """Why a plan cannot be used; empty means that it can."""
    import torch

    from ..conv.running import ENGINE
    from ..core.problem import Problem
    from ..core.target import Target
    from ..planner.planner import inner_problem
    from ..planner.wisdom import WITHIN, key

    if entry.versions != ENGINE.planner.wisdom.versions:
        return _difference(dict(entry.versions), dict(ENGINE.planner.wisdom.versions))
    name = name.partition(WITHIN)[0]
    text, _, machine = name.partition(" on ")
    threads = machine.split(" ")[0].rpartition(":t")[2]
    is_number = threads.isdecimal() and len(threads) < 6
    target = Target.host(threads=int(threads) if is_number else torch.get_num_threads())
    try:
        problem = Problem.parse(text)
        algorithm = ENGINE.planner.algorithm(entry.algorithm)
    except (ValueError, KeyError) as error:
        return str(error)
    if key(problem, target) != name:
        return f"made for {machine}, here is {key(problem, target).partition(' on ')[2]}"
    if algorithm.version != entry.version:
        return f"{entry.algorithm} is version {algorithm.version}, needs {entry.version}"
    inner = inner_problem(algorithm, problem)
    reasons = algorithm.reject(inner, target)
    if reasons:
        return "; ".join(reasons)
    return "" if entry.schedule in algorithm.space(inner, target) else (
        f"schedule {entry.schedule} is not in the space of {entry.algorithm}")


def _difference(made: dict[str, str], here: dict[str, str]) -> str:
    """Which versions are not those of a plan; the equal ones would hide them."""
    other = [name for name in sorted(made.keys() | here.keys()) if made.get(name) != here.get(name)]
    told = (", ".join(f"{name} {versions.get(name, 'unknown')}" for name in other)
            for versions in (made, here))
    return "made with {}, here is {}".format(*told)


def _place(file: Path | None) -> Path:
    from ..planner.wisdom import default_path

    return default_path() if file is None else file


def _entries(file: Path | None) -> dict[str, Any]:
    from ..planner.wisdom import Wisdom

    found = Wisdom()
    if file is not None:
        _must_exist(file)
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        found.load(_place(file))
    for complaint in complaints:
        errors.print(str(complaint.message), style="yellow", markup=False, soft_wrap=True)
    return found.entries


def _must_exist(*files: Path) -> None:
    from ..core.errors import TilewiseError

    for file in files:
        if not file.exists():
            raise TilewiseError(f"{file} does not exist; tilewise tune MODEL makes wisdom")


def _say(data: dict[str, Any], text: str, json: bool) -> None:
    print_json(data) if json else print(text)

"""Writing a bundle: one process for each row of instructions, then the manifest."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..conv.checks import arguments_of, check_module
from ..core.errors import TilewiseError
from ..core.files import held
from ..core.isa import available
from ..core.platforms import HERE
from ..core.progress import Tell, silent
from ..core.target import Target
from .files import MANIFEST, PARAMETERS, Writer, bytes_of, hashes, stated
from .forms import named_tensors
from .manifest import Manifest, names, versions
from .row import TASK, collect, facts_of
from .tensors import DTYPES, name_of, written


class Saved(NamedTuple):
    """A bundle that was written."""

    path: Path
    digest: str  # SHA-256 of its manifest
    bytes: int
    rows: tuple[str, ...]
    objects: int  # of all rows
    forms: int


def save(model: nn.Module, examples: Any, directory: str | PathLike[str], *,
         isas: Sequence[str] = (), effort: str = "estimate", max_error: float | None = None,
         tell: Tell = silent) -> Saved:
    """Write what workers need of a model: code, plans, and weights as they are and as prepared.

    Each row of instructions is run in a new process, so the model must be one that pickle can
    handle, and a script needs its `if __name__ == "__main__":`.

    Args:
        model: A model in eval mode.
        examples: An example of the input as in `optimize`, or a list of several: for sizes and
            batches whose plans and code are to be in the bundle.
        directory: Where to write. A bundle that is there is replaced as a whole.
        isas: Rows of instructions such as "avx512" and "avx2", all of which this machine must
            have; its own, if none is said.
        effort: As in `optimize`; the layers are tuned with the first example.
        max_error: As in `optimize`.
        tell: A function `(what, done, total)` that is told how far it is.

    Returns:
        What was written; its `digest` can be given to `load`.

    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
    >>> save(model, torch.randn(1, 3, 16, 16), "/srv/bundle")  # doctest: +SKIP
    """
    check_module(model)
    given = examples if isinstance(examples, list) else [examples]
    arguments = [arguments_of(example) for example in given]
    place, rows = Path(directory).resolve(), _rows(isas)
    _check(model, arguments, place)
    place.parent.mkdir(parents=True, exist_ok=True)
    with _workplace(place) as work:
        found = _written(work, model, arguments, rows, effort, max_error, tell)
        _publish(work, place)
        return found._replace(path=place)


@contextmanager
def _workplace(place: Path) -> Iterator[Path]:
    """A directory beside a bundle, for what is not whole yet; those of killed processes go."""
    with ExitStack() as until_saved:
        with held(place.parent):  # between the next two steps it is nobody's
            for left in _left(place):
                with suppress(OSError), held(left, wait=False):
                    shutil.rmtree(left, ignore_errors=True)
            work = _beside(place)
            until_saved.callback(shutil.rmtree, work, ignore_errors=True)
            until_saved.enter_context(held(work))
        yield work


def _prefix(place: Path) -> str:
    """Of this machine alone: others that share a disk may not see its locks."""
    host = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
    return f".{place.name}.saving-{host}-"


def _beside(place: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=_prefix(place), dir=place.parent))


def _left(place: Path) -> list[Path]:
    """Directories that `_beside` made; none where nobody can tell whether they are in use."""
    made = re.compile(re.escape(_prefix(place)) + r"\w{8}")
    found = [path for path in place.parent.iterdir() if made.fullmatch(path.name)]
    return found if hasattr(os, "O_DIRECTORY") else []


def _rows(isas: Sequence[str]) -> list[str]:
    here = [row.name for row in available()]
    wrong = [name for name in isas if name not in here]
    if wrong or not here:
        raise TilewiseError(f"isa is {', '.join(wrong) or 'none'}, this machine has "
                            f"{', '.join(here) or 'none'}: a row is run where it is made")
    own = Target.host().isa
    if not isas and own not in here:
        raise TilewiseError(f"isa is {own}, which no machine has: TILEWISE_ISA named it; needs one "
                            f"of {', '.join(here)}")
    return list(dict.fromkeys(isas)) or [own]


def _check(model: nn.Module, arguments: list[Any], place: Path) -> None:
    if model.training:
        raise TilewiseError("the model is in training mode, needs model.eval(): a bundle is for "
                            "inference")
    if not arguments:
        raise TilewiseError("examples is empty, needs at least one: its plans and code are kept")
    wrong = [name for name, tensor in named_tensors(model).items()
             if tensor.device.type != "cpu" or name_of(tensor) not in DTYPES]
    if wrong:
        raise TilewiseError(f"{wrong[0]} is on another device or of another type, needs "
                            f"a plain tensor on the CPU: model.cpu()")
    if place.exists() and not (place / MANIFEST).is_file() and (
            not place.is_dir() or any(place.iterdir())):
        raise TilewiseError(f"{place} is there and is no bundle: name another directory")


def _written(work: Path, model: nn.Module, arguments: list[Any], rows: list[str], effort: str,
             max_error: float | None, tell: Tell) -> Saved:
    """All files in a directory of their own."""
    parameters = _parameters(model, work / PARAMETERS)
    tables: dict[str, Any] = {}
    for i, row in enumerate(rows):
        tell(f"bundling for {row}", i, len(rows))
        tables[row] = _row(work, model, {"row": row, "examples": arguments, "effort": effort,
                                         "max_error": max_error,
                                         "threads": torch.get_num_threads(),
                                         "precision": torch.get_float32_matmul_precision()})
    tell("bundled", len(rows), len(rows))
    files = {name: stated(work / name) for name in names(rows)}
    text = Manifest(versions(), files, parameters, tables).to_json().encode()
    (work / MANIFEST).write_bytes(text)
    return Saved(work, hashlib.sha256(text).hexdigest(),
                 len(text) + sum(file.bytes for file in files.values()), tuple(rows),
                 sum(len(table["objects"]) for table in tables.values()),
                 sum(len(table["forms"]) for table in tables.values()))


def _parameters(model: nn.Module, path: Path) -> dict[str, Any]:
    """All tensors of a model, each of them once, under all their names."""
    own, known = named_tensors(model), dict[int, Any]()
    plain = {name: tensor.detach().contiguous() for name, tensor in own.items()}
    digests = hashes([bytes_of(tensor) for tensor in plain.values()])
    with open(path, "xb") as raw:
        file = Writer(raw)
        for tensor, digest in zip(own.values(), digests):
            if id(tensor) not in known:
                known[id(tensor)] = {**written(tensor.detach(), file), "digest": digest}
    return {name: known[id(tensor)] for name, tensor in own.items()}


def _row(work: Path, model: nn.Module, task: dict[str, Any]) -> Any:
    """The files of one row, made by a process that has compiled nothing yet."""
    path = work / TASK
    try:
        torch.save({**task, "model": model}, path)
    except Exception as problem:  # whatever pickle cannot
        raise TilewiseError(f"{type(model).__name__} cannot be pickled ({problem}): needs a model "
                            "whose class can be imported by name") from problem
    process = multiprocessing.get_context("spawn").Process(target=collect, args=(str(work),))
    process.start()
    process.join()
    facts = facts_of(work, task["row"])
    path.unlink()
    if process.exitcode != 0 or not facts.is_file():
        raise TilewiseError(f"the process for {task['row']} ended with code {process.exitcode}; "
                            "what it printed says why")
    table = json.loads(facts.read_text())
    facts.unlink()
    return table


def _publish(work: Path, place: Path) -> None:
    """The new directory in the place of the old one, whose files stay as long as they are used."""
    for file in work.iterdir():
        file.chmod(0o644)
    work.chmod(0o755)
    if HERE.exchange(work, place):  # a process that is killed leaves one of the two
        return
    if place.exists():
        old = _beside(place)
        os.replace(place, old)
        os.replace(work, place)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.replace(work, place)

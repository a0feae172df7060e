"""Result files: what was measured, where, with what, and the command that repeats it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import TilewiseError, cut
from ..core.files import read_json, write_atomically

FORMAT = 1
DEVICES = (("/", "dev"), ("/", "proc"))


@dataclass(frozen=True)
class Row:
    """One contender on one subject; without times where none may be told."""

    subject: str
    contender: str
    family: str  # torch, tilewise or a peer
    error: float | None = None
    minimum: float | None = None
    median: float | None = None
    spread: float | None = None
    ratio: float | None = None  # torch's least time over this one's
    paired: float | None = None  # the same by rounds, their median
    images: int = 1
    note: str = ""


@dataclass(frozen=True)
class Result:
    """A run of `tilewise bench` or `tilewise ladder`."""

    kind: str  # bench or ladder
    command: str
    date: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    plans: list[dict[str, Any]] = field(default_factory=list)
    format: int = FORMAT

    def save(self, path: Path) -> None:
        """A kill leaves the old file or the new one."""
        text = json.dumps(asdict(self), indent=1) + "\n"
        place = path.resolve()
        # a terminal, a pipe or an open file is not replaced, and no directory is made
        special = path.parts[:2] in DEVICES or (path.exists() and not place.is_file())
        if special or not place.parent.is_dir():
            path.write_text(text)
            return
        try:
            write_atomically(place, text.encode(), mode=0o666)
        except PermissionError:  # a file that may be written where none may be made
            path.write_text(text)

    @staticmethod
    def load(path: Path) -> Result:
        try:
            data = read_json(path)
            if data["format"] != FORMAT:
                raise ValueError(f"format is {data['format']}, needs {FORMAT}")
            return _typed(Result(**data))
        except FileNotFoundError:
            raise TilewiseError(f"{path} does not exist; tilewise bench ... -o FILE makes one, and "
                                "so does tilewise ladder") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TilewiseError(f"{path} is not a result file of tilewise: {cut(str(error))}"
                                ) from error

    def of(self, *kinds: str, path: Path | None = None) -> Result:
        """Itself; complains if it is of another kind."""
        if self.kind not in kinds:
            raise TilewiseError(f"{path or 'a result file'} is of {cut(self.kind)} "
                                f"({cut(self.command)}), needs one of {' or '.join(kinds)}")
        return self


def _typed(result: Result) -> Result:
    """Itself; complains if a part of it is of another type."""
    texts, tables = (result.kind, result.command, result.date), (result.machine, result.settings)
    lists = (result.rows, result.plans)
    if not (all(isinstance(text, str) for text in texts)
            and all(isinstance(one, list) for one in lists)
            and all(isinstance(one, dict) for one in (*tables, *result.rows, *result.plans))):
        raise TypeError("a part of it is of another type")
    return result


@contextmanager
def understood(*paths: Path) -> Iterator[None]:
    """Rows of files are used: complains of what they lack, since anybody may have written them."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError,
            RecursionError) as problem:
        raise TilewiseError(f"{' or '.join(map(str, paths))} is not as tilewise wrote it: "
                            f"{cut(repr(problem))}") from problem


@dataclass(frozen=True)
class Change:
    """How a subject fared from one file to another; above one is faster."""

    subject: str
    time: float  # old least time over new
    against_torch: float  # the same of the ratios to torch, which a slower machine cannot change
    regression: bool


def compare(old: Result, new: Result, threshold: float = 0.15) -> list[Change]:
    """Subjects of both files; a regression is one that lost more than the threshold to torch.

    >>> rows = [{"subject": "a", "contender": "tilewise", "minimum": 1.0, "ratio": 2.0}]
    >>> slow = [{"subject": "a", "contender": "tilewise", "minimum": 2.0, "ratio": 1.0}]
    >>> def result(rows): return Result("bench", "", "", {}, {}, rows)
    >>> [change.regression for change in compare(result(rows), result(slow))]
    [True]
    """
    before, after = _ours(old.rows), _ours(new.rows)
    changes = []
    for subject in [name for name in before if name in after]:
        a, b = before[subject], after[subject]
        relative = b["ratio"] / a["ratio"]
        changes.append(Change(subject, a["minimum"] / b["minimum"], relative,
                              relative < 1 - threshold))
    if not changes:
        raise TilewiseError("the files have no subject in common")
    return changes


def _ours(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["subject"]: row for row in rows
            if row["contender"] == "tilewise" and row.get("minimum")}

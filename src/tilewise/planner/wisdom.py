"""Plans that outlive the process: readable, mergeable, validated one by one.

A corrupt, foreign or stale file costs a warning and nothing else.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.files import (
    NotPrivate,
    cache_directory,
    locked,
    read_private,
    remove_leftovers,
    write_atomically,
)
from ..core.plan import Plan
from ..core.platforms import HERE
from ..core.problem import Problem
from ..core.schedule import Schedule
from ..core.target import Target
from .classes import representative, share

FORMAT = 2
WITHIN = " within "  # what a key says of the error admitted comes after it


@dataclass(frozen=True)
class Entry:
    """What was decided for a problem on a machine, and by which versions."""

    algorithm: str
    version: int
    schedule: Schedule
    seconds: float  # for the representative of its class
    versions: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        return {"algorithm": self.algorithm, "version": self.version,
                "schedule": dict(self.schedule), "seconds": self.seconds,
                "versions": dict(self.versions)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Entry:
        """Raises ValueError, KeyError or TypeError for what no entry can hold."""
        schedule, versions = data["schedule"], data["versions"]
        seconds = float(_checked(data["seconds"], int, float))
        if not 0 <= seconds < math.inf:
            raise ValueError(seconds)
        for value in schedule.values():
            _checked(value, int, str, bool)
        for value in versions.values():
            _checked(value, str)
        return Entry(_checked(data["algorithm"], str), _checked(data["version"], int),
                     Schedule(**schedule), seconds, tuple(sorted(versions.items())))


def _checked(value: Any, *types: type) -> Any:
    """A value that is exactly of one of the types: to Python, True is also a 1, and 3.0 a 3."""
    if type(value) not in types:
        raise TypeError(f"{value!r} is not of {types}")
    return value


def key(p: Problem, t: Target, max_error: float | None = None, bits: int = 0) -> str:
    """Problem, machine and what was asked of the result: who admits more has other answers.

    Batch and image size are those of the problem's class, since no kernel compiles them in.
    """
    return f"{representative(p)} on {t} l2={t.l2 >> 10}k{asked(max_error, bits)}"


def asked(max_error: float | None, bits: int) -> str:
    """The end of a key: what was asked of the result."""
    return "" if max_error is None else f"{WITHIN}{max_error:.1e} {bits} bits"


def asked_by(name: str) -> tuple[str, float | None, int]:
    """The rest of a key, and what was asked: the inverse.

    Raises ValueError for what no key ends with.
    """
    rest, found, end = name.partition(WITHIN)
    if not found:
        return rest, None, 0
    max_error, bits, _ = end.split(" ")
    return rest, float(max_error), int(bits)


class Wisdom:
    """Entries by key, in memory; `load` and `save` move them from and to files."""

    def __init__(self, versions: Mapping[str, str] | None = None) -> None:
        self.versions = tuple(sorted((versions or {}).items()))
        self.entries: dict[str, Entry] = {}

    def name_of(self, p: Problem, t: Target, max_error: float | None, bits: int) -> str:
        return key(p, t, max_error, bits)

    def find(self, p: Problem, t: Target, max_error: float | None = None,
             bits: int = 0) -> Entry | None:
        """What is known of a problem, if the versions are still those that learned it."""
        entry = self.entries.get(self.name_of(p, t, max_error, bits))
        return entry if entry and entry.versions == self.versions else None

    def record(self, plan: Plan, max_error: float | None = None, bits: int = 0) -> None:
        """The answer to who asked for so much."""
        self.entries[self.name_of(plan.problem, plan.target, max_error, bits)] = Entry(
            plan.algorithm, plan.version, plan.schedule,
            plan.seconds / (share(plan.problem) or 1.0), self.versions)

    def merge(self, other: Wisdom) -> None:
        """Take what is new; of two entries of the same versions the faster stays."""
        for name, entry in other.entries.items():
            mine = self.entries.get(name)
            stale = mine is not None and mine.versions != self.versions
            if mine is None or stale or (entry.versions == mine.versions
                                         and entry.seconds < mine.seconds):
                self.entries[name] = entry

    def about(self, problems: Iterable[tuple[Problem, Target]]) -> Wisdom:
        """What is known of these, whatever was asked of the results."""
        names = tuple(f"{key(p, t)}" for p, t in problems)
        found = Wisdom(dict(self.versions))
        found.entries = {name: entry for name, entry in self.entries.items()
                         if name.partition(WITHIN)[0] in names}
        return found

    def read(self, text: str, origin: Path) -> int:
        """Merge entries as text; returns how many there were."""
        found = _parse(text, origin)
        self.merge(found)
        return len(found.entries)

    def forget(self) -> None:
        self.entries.clear()

    def to_json(self) -> str:
        entries = {name: entry.to_json() for name, entry in sorted(self.entries.items())}
        return json.dumps({"format": FORMAT, "entries": entries}, indent=1) + "\n"

    def load(self, path: Path, or_roots: bool = False) -> int:
        """Merge a file; returns how many entries it had. Never raises for what is in it."""
        try:
            text = read_private(path, or_roots).decode()
        except FileNotFoundError:
            return 0
        except NotPrivate as problem:
            warnings.warn(f"wisdom {path} is ignored: {problem}", stacklevel=2)
            return 0
        except (OSError, UnicodeDecodeError) as problem:
            warnings.warn(f"wisdom {path} cannot be read: {problem}", stacklevel=2)
            return 0
        return self.read(text, path)

    def save(self, path: Path) -> None:
        """Add the entries to a file, whatever other processes add meanwhile."""
        with locked(path):
            remove_leftovers(path.parent, path.name)
            joined = Wisdom(dict(self.versions))
            joined.load(path)
            joined.merge(self)
            write_atomically(path, joined.to_json().encode())


class Decided(Wisdom):
    """Decisions made elsewhere: they hold for any number of threads, sizes of caches, and error
    that they keep to."""

    def name_of(self, p: Problem, t: Target, max_error: float | None, bits: int) -> str:
        return f"{representative(p)} on {t.device}:{t.isa}"


def default_path() -> Path:
    """The user's own wisdom."""
    return cache_directory() / "wisdom.json"


def system_path() -> Path | None:
    """Wisdom of a machine or a container image, for all users; it is only read."""
    return None if HERE.for_all is None else HERE.for_all / "wisdom.json"


def _int(digits: str) -> int | None:
    """None for numbers that no entry holds; Python itself refuses those of some thousand digits."""
    return int(digits) if len(digits) < 20 else None


def _parse(text: str, path: Path) -> Wisdom:
    """The entries of a file; what is not an entry is left out and counted."""
    found, wrong = Wisdom(), 0
    try:
        data = json.loads(text, parse_int=_int, parse_constant=lambda name: None)
        if data["format"] != FORMAT:
            raise ValueError(data["format"])
        items = list(data["entries"].items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        warnings.warn(f"wisdom {path} is ignored: it is not a wisdom file of format {FORMAT}",
                      stacklevel=3)
        return found
    for name, entry in items:
        try:
            found.entries[name] = Entry.from_json(entry)
        except (ValueError, KeyError, TypeError, AttributeError):
            wrong += 1
    if wrong:
        warnings.warn(f"wisdom {path}: {wrong} of {len(items)} entries are left out, they cannot "
                      "be read", stacklevel=3)
    return found

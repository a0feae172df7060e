"""Limits of this machine, measured once and kept: its clock under load, its memory's speed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeGuard

from .files import cache_directory, locked, read_private, remove_leftovers, write_atomically
from .platforms import HERE

FILE = "limits.json"
CLOCKS = (0.2e9, 10e9)  # what a clock can be, half a core included
SPEEDS = (0.5e9, 10e12)
SHARE = 0.42  # of a copy's speed that is left to kernels: costs were fitted with it


@dataclass(frozen=True)
class Limits:
    """What some threads of a machine reach together.

    Attributes:
        hertz: Cycles a second of a thread that multiplies and adds.
        copied: Bytes a second that a copy reads and writes.
    """

    hertz: float
    copied: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second to and from memory that a kernel may count on."""
        return SHARE * self.copied

    def better(self, other: Limits | None) -> Limits:
        """Of two measurements, the quieter moment counts."""
        if other is None:
            return self
        return Limits(max(self.hertz, other.hertz), max(self.copied, other.copied))


def kept(isa: str, threads: int) -> Limits | None:
    """What was measured here before, if it can be true."""
    return _limits(_read().get(_name(isa, threads)))


def keep(isa: str, threads: int, limits: Limits) -> bool:
    """For all processes of this user from now on; whether the disk took it."""
    path, written = cache_directory() / FILE, {"hertz": limits.hertz, "copied": limits.copied}
    if _limits(written) is None:  # nobody would believe it
        return False
    try:
        with locked(path):
            remove_leftovers(path.parent, path.name)
            found, name = _read(), _name(isa, threads)
            best = limits.better(_limits(found.get(name)))
            found[name] = {"hertz": best.hertz, "copied": best.copied}
            write_atomically(path, json.dumps(found, indent=1).encode())
    except OSError:
        return False
    return True


def _name(isa: str, threads: int) -> str:
    return f"{HERE.processor()} {isa} t{threads}"


def _read() -> dict[str, Any]:
    """Nothing where there is no file, or not a private one, or none of ours."""
    try:
        found = json.loads(read_private(cache_directory() / FILE))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _limits(entry: Any) -> Limits | None:
    if not isinstance(entry, dict):
        return None
    hertz, copied = entry.get("hertz"), entry.get("copied")
    if not (_is_within(hertz, CLOCKS) and _is_within(copied, SPEEDS)):
        return None
    return Limits(float(hertz), float(copied))


def _is_within(value: Any, bounds: tuple[float, float]) -> TypeGuard[float]:
    """Whether it is a number between them, which no NaN is."""
    return type(value) in (int, float) and bounds[0] <= value <= bounds[1]

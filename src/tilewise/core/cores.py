"""How many cores a process may use: the set it is bound to, and its control groups' quotas."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")  # tests have a tree of their own


def cores() -> int:
    """Whole cores that this process gets, at least one."""
    return max(1, min(visible(), int(min(quota(), 1 << 16))))


def visible() -> int:
    """Cores that the process may run on, whatever share of their time it gets."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def quota() -> float:
    """Cores' worth of time that control groups allow; infinite where nothing bounds it."""
    return min(map(_allowed, _groups()), default=math.inf)


def _groups() -> Iterator[Path]:
    """The directories of the group of this process, and of all groups around it."""
    names = dict(_names())
    for kind, root, place in _mounts():
        name = names.get(kind)
        if name is None:
            continue
        inside = name.relative_to(root) if name.is_relative_to(root) else Path()
        group = place / inside
        while group.is_relative_to(place):
            yield group
            group = group.parent


def _names() -> Iterator[tuple[str, Path]]:
    """The group of this process by the kind of its hierarchy."""
    for line in _lines("proc/self/cgroup"):
        _, controllers, name = line.split(":", 2)
        if not controllers:
            yield "cgroup2", Path(name)
        elif "cpu" in controllers.split(","):
            yield "cgroup", Path(name)


def _mounts() -> Iterator[tuple[str, Path, Path]]:
    """Hierarchies that bound time: kind, the group that is mounted, and where."""
    for line in _lines("proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, (kind, *_, options) = before.split(), after.split()
        if kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.split(",")):
            yield kind, Path(fields[3]), ROOT / fields[4].lstrip("/")


def _allowed(group: Path) -> float:
    """Cores' worth of time of one group."""
    text = (_text(group / "cpu.max")  # version 2
            or f"{_text(group / 'cpu.cfs_quota_us')} {_text(group / 'cpu.cfs_period_us')}")
    try:
        time, period = map(int, text.split())
        return time / period if time > 0 and period > 0 else math.inf
    except ValueError:  # "max", or no such files
        return math.inf


def _lines(name: str) -> list[str]:
    return _text(ROOT / name).splitlines()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""

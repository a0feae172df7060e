"""Work where something is scarce: a full or read-only disk, little memory, no home.

It is done, or refused with a message; what was on the disk before stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tilewise
from tilewise.core.errors import TilewiseError
from tilewise.core.files import cache_directory
from tilewise.models import lenet_b

from .children import Ended, Moment, Say, forked
from .hostile_files import LONGEST, on_command_line
from .killed import Bundle, Compile, Infer, Plans, Train, Work

MEMORY = 600 << 20  # bytes beyond what the process has
REMOUNT, READ_ONLY = 32, 1
WORKS: dict[str, type[Work]] = {"compile": Compile, "save wisdom": Plans, "save a bundle": Bundle,
                                "infer": Infer, "train": Train}


# what would have nothing left to do is stopped before
HALFWAY = {"infer": Moment(touches=30), "train": Moment(touches=30)}


class Scarce(NamedTuple):
    """A limit: how a directory gets it, and what a process does to itself."""

    name: str
    around: Callable[[Path], Any]
    inside: Callable[[], None]


def _libc(name: str, *arguments: Any) -> bool:
    return ctypes.CDLL(None).__getattr__(name)(*arguments) == 0


def _mount(path: Path, flags: int, options: bytes) -> bool:
    return _libc("mount", b"tmpfs", os.fsencode(path), b"tmpfs", ctypes.c_ulong(flags), options)


def can_mount(path: Path) -> bool:
    """Whether this process may have file systems of its own."""
    if not _mount(path, 0, b"size=1m"):
        return False
    return _libc("umount2", os.fsencode(path), 2)


@contextmanager
def _disk(path: Path, flags: int = 0) -> Iterator[None]:
    """A file system of its own, read-only from now on, or without flags full to the last byte."""
    free = os.statvfs(path)
    if not flags:
        with open(path / "ballast", "wb") as file:
            file.write(bytes(free.f_bavail * free.f_bsize))
    if flags and not _mount(path, flags, b""):
        raise OSError(f"{path} cannot be made read-only")
    try:
        yield
    finally:
        if flags:
            _mount(path, REMOUNT, b"")
        (path / "ballast").unlink(missing_ok=True)


def _little_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def _no_home() -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "TILEWISE_CACHE_DIR"):
        os.environ.pop(name, None)


def nothing() -> None:
    """No limit."""


SCARCE = (
    Scarce("a full disk", _disk, nothing),
    Scarce("a read-only disk", lambda path: _disk(path, REMOUNT | READ_ONLY), nothing),
    Scarce("little memory", lambda path: contextlib.nullcontext(), _little_memory),
)


def told(work: Callable[[], Any], say: Say) -> None:
    """`done` or `refused`; anything else is a fault."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            work()
            say("done")
        except (TilewiseError, OSError, MemoryError, RuntimeError) as problem:
            text = str(problem)
            memory = isinstance(problem, MemoryError) or "alloc" in text or "thread" in text
            if isinstance(problem, RuntimeError) and not (
                    memory or isinstance(problem, TilewiseError)):
                raise
            say(f"refused: {text}" if memory or 0 < len(text) < LONGEST else repr(problem))


def scarce_work(scarce: Scarce, name: str, root: Path) -> dict[str, Any]:
    """One kind of work under one limit, after it was done once; and again without the limit."""
    place, start, ends = root / "disk", time.monotonic(), list[Ended]()
    place.mkdir(parents=True)
    if not _mount(place, 0, b"size=64m"):
        return {"what": f"{name} with {scarce.name}", "ended": "not tried: no right to mount"}
    try:
        work, home = WORKS[name](place), place / "home"
        work.cache = root.parent / "cache"
        home.mkdir()
        ends.append(forked(lambda say: work.begin(home)))
        first = forked(lambda say: work.run(home, 1, say), HALFWAY.get(name), str(place))
        if name not in HALFWAY:
            ends.append(first)
        with scarce.around(place):
            ends.append(forked(lambda say: (scarce.inside(), told(
                lambda: work.run(home, 2, lambda text: None), say))))
        ended = (ends[-1].said or [""])[-1].partition(":")[0] if ends[-1].well else "wrong"
        said = [line for line in first.said if line != "touch"]  # it is still there
        ends.append(forked(lambda say: _stays(work, home, said, ended == "done")))
        ends.append(forked(lambda say: work.run(home, 3, say)))
        ends.append(forked(lambda say: work.finish(home, 3)))
    finally:
        _libc("umount2", os.fsencode(place), 2)
    wrong = [end.why for end in ends if not end.well]
    return {"what": f"{name} with {scarce.name}", "ended": ended, "faults": wrong,
            "seconds": round(time.monotonic() - start, 1)}


def _stays(work: Work, home: Path, said: list[str], again: bool) -> None:
    if isinstance(work, Bundle) and again:
        work.check(home, 2, ["2"])
    else:
        work.check(home, 1, said)


# a process without a limit of a disk


def convolved(size: int) -> None:
    x, weight = torch.ones(1, 8, size, size), torch.ones(8, 8, 3, 3)
    y = tilewise.conv2d(x, weight, padding=1)
    assert float(y[0, 0, 3, 3]) == 72.0
    del x, y


def _small_after_large() -> None:
    """A call that is too large for the memory does not spoil the next one."""
    convolved(20)  # LLVM is loaded
    with contextlib.suppress(MemoryError, RuntimeError):
        convolved(4000)
        raise AssertionError("it fits: the limit does not hold")
    convolved(30)
    model, x = lenet_b().eval(), torch.ones(1, 1, 70, 70)
    with torch.inference_mode():
        assert torch.allclose(tilewise.optimize(model)(x), model(x), atol=1e-4)


def _homeless() -> None:
    """It works, and says where it keeps things."""
    convolved(20)
    assert cache_directory().is_absolute()
    tilewise.wisdom.save()


def alone(name: str, inside: Callable[[], None], work: Callable[[], None]) -> dict[str, Any]:
    start = time.monotonic()
    ended = forked(lambda say: (inside(), told(work, say)))
    good = ended.well and ended.said[-1:] == ["done"]
    return {"what": name, "ended": "done" if good else "wrong",
            "faults": [] if good else [f"{ended.said} {ended.why}"],
            "seconds": round(time.monotonic() - start, 1)}


def _commands(place: Path) -> None:
    """Commands that write where nothing can be written."""
    for words in (("wisdom", "merge", "/proc/nowhere/w.json", place / "wisdom.json"),
                  ("report", place / "none.json"),
                  ("wisdom", "merge", place, place / "wisdom.json"),
                  ("infer", place, "lenet_b", "-o", "/proc/nowhere"),
                  ("train", place, "-o", "/proc/nowhere")):
        with contextlib.suppress(TilewiseError):  # with a message
            on_command_line(*words)


def campaign(place: Path) -> list[dict[str, Any]]:
    """All limits with all kinds of work."""
    rows = [scarce_work(scarce, name, place / f"{i}{j}") for i, scarce in enumerate(SCARCE)
            for j, name in enumerate(WORKS)]
    (place / "wisdom.json").write_text('{"format": 2, "entries": {}}')
    return [*rows,
            alone("a large call and then a small one with little memory", _little_memory,
                  _small_after_large),
            alone("a user without a home", _no_home, _homeless),
            alone("commands that write where nothing can be written", nothing,
                  lambda: _commands(place))]

"""Files that outlive the process: only the user's own are read, and they are replaced whole."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .platforms import HERE

TEMPORARY = re.compile(r"(.*)\.(\d+)\.\d+\.tmp", re.DOTALL)  # of a file that is being written
OLD = 3600.0  # seconds after which nobody still writes a file
_serial = itertools.count()


def cache_directory() -> Path:
    """TILEWISE_CACHE_DIR, else the user's cache directory."""
    chosen = os.environ.get("TILEWISE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return HERE.cache_home()


class NotPrivate(PermissionError):
    """Somebody else could have written it."""


def is_private(path: Path) -> bool:
    """Owned by this user and not writable by any other, and so is the directory around it."""
    return HERE.is_ours(path.lstat()) and HERE.is_ours(path.parent.stat())


def is_shared(directory: Path) -> bool:
    """Whether it is there and others could write to it."""
    try:
        return directory.is_dir() and not HERE.is_ours(directory.stat())
    except OSError:
        return False


def read_private(path: Path, or_roots: bool = False) -> bytes:
    """A file's content; NotPrivate if others can write it, OSError if it is no file at all.

    Root's files may be links, as those are that a container is given.
    """
    path = path.resolve() if or_roots else path
    descriptor = os.open(path, os.O_RDONLY | HERE.open_flags)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if not (HERE.is_ours(status, or_roots) and HERE.is_ours(path.parent.stat(), or_roots)):
            whose = "root's or the user's own" if or_roots else "the user's own"
            raise NotPrivate(f"it, or its directory, can be written by others; needs to be {whose} "
                             "(chmod go-w)")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def open_regular(path: Path) -> BinaryIO:
    """To read a file that somebody named; OSError for pipes and devices, which may never end."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
                         | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_json(path: Path) -> Any:
    """What a file says that may be anybody's; OSError, or ValueError if it is no JSON."""
    with open_regular(path) as file:
        content = file.read()
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_atomically(path: Path, content: bytes | memoryview, durable: bool = False,
                     mode: int = 0o600) -> None:
    """Readers see the old file or the new one; raises OSError where the disk refuses.

    A durable file is on the disk on return: a power cut later does not cost it.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{next(_serial)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            HERE.sync_directory(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def remove_leftovers(directory: Path, *names: str) -> None:
    """What killed writers of some files left; not while another may write them."""
    for path in directory.iterdir() if directory.is_dir() else ():
        found = TEMPORARY.fullmatch(path.name)
        if found and found[1] in names:
            with contextlib.suppress(OSError):  # it is in nobody's way
                path.unlink()


def remove_orphans(directory: Path, suffix: str) -> None:
    """What killed writers of files with a suffix left, while others write theirs: the old ones
    whose process is gone."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            found = TEMPORARY.fullmatch(entry.name)
            if found and found[1].endswith(suffix) and not _is_running(int(found[2])):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > OLD:
                        os.unlink(entry.path)


def _is_running(process: int) -> bool:
    """Not known on Windows, where to ask is to end it: there, age decides."""
    if os.name == "nt":
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        return True
    return True


@contextlib.contextmanager
def held(directory: Path, wait: bool = True) -> Iterator[None]:
    """A directory as a lock, which leaves no file; BlockingIOError as in `locked`."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no directories
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        HERE.lock(descriptor, wait)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """One process at a time; the lock is a file beside `path`.

    Without `wait`, BlockingIOError says that another process has it.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        HERE.lock(descriptor, wait)
        yield
    finally:
        os.close(descriptor)

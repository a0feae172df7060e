"""Files that outlive the process: only the user's own are read, and they are replaced whole."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from .platforms import HERE

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


def write_atomically(path: Path, content: bytes | memoryview, durable: bool = False) -> None:
    """Readers see the old file or the new one; raises OSError where the disk refuses.

    A durable file is on the disk on return: a power cut later does not cost it.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{next(_serial)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
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


def remove_leftovers(path: Path) -> None:
    """Files that killed writers of `path` left beside it; not while another may be writing."""
    for leftover in path.parent.glob(f"{path.name}.*.*.tmp"):
        leftover.unlink(missing_ok=True)


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

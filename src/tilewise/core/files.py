"""Files that outlive the process: only the user's own are read, and they are replaced whole."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_serial = itertools.count()


def cache_directory() -> Path:
    """TILEWISE_CACHE_DIR, else the user's cache directory."""
    chosen = os.environ.get("TILEWISE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if base.startswith("~"):  # a user without a home
        return Path(tempfile.gettempdir()) / f"tilewise-{os.getuid()}"
    return Path(base) / "tilewise"


class NotPrivate(PermissionError):
    """Somebody else could have written it."""


def is_private(path: Path) -> bool:
    """Owned by this user and not writable by any other, and so is the directory around it."""
    return _is_ours(path.lstat()) and _is_ours(path.parent.stat())


def is_shared(directory: Path) -> bool:
    """Whether it is there and others could write to it."""
    try:
        return directory.is_dir() and not _is_ours(directory.stat())
    except OSError:
        return False


def read_private(path: Path, or_roots: bool = False) -> bytes:
    """A file's content; NotPrivate if others can write it, OSError if it is no file at all."""
    # a pipe would wait for its writer, a link may point elsewhere the next time
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if not (_is_ours(status, or_roots) and _is_ours(path.parent.stat(), or_roots)):
            raise NotPrivate("it, or its directory, can be written by others; needs to be the "
                             "user's own (chmod go-w)")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _is_ours(status: os.stat_result, or_roots: bool = False) -> bool:
    others = stat.S_IWGRP | stat.S_IWOTH
    owners = (os.getuid(), 0) if or_roots else (os.getuid(),)
    return status.st_uid in owners and not status.st_mode & others


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
            _sync_directory(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def remove_leftovers(path: Path) -> None:
    """Files that killed writers of `path` left beside it; not while another may be writing."""
    for leftover in path.parent.glob(f"{path.name}.*.*.tmp"):
        leftover.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    """The rename itself is on the disk only when the directory is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """One process at a time; the lock is a file beside `path`.

    Without `wait`, BlockingIOError says that another process has it.
    """
    import fcntl  # not on every platform, and only needed here

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)

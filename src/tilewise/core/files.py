"""Files that outlive the process: only the user's own are read, and they are replaced whole."""

from __future__ import annotations

import contextlib
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


def is_private(path: Path) -> bool:
    """Owned by this user and not writable by any other, and so is the directory around it."""
    return _is_ours(path.lstat()) and _is_ours(path.parent.stat())


def _is_ours(status: os.stat_result) -> bool:
    others = stat.S_IWGRP | stat.S_IWOTH
    return status.st_uid == os.getuid() and not status.st_mode & others


def write_atomically(path: Path, content: bytes) -> None:
    """Readers see the old file or the new one; raises OSError where the disk refuses."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{next(_serial)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock is a file beside `path`."""
    import fcntl  # not on every platform, and only needed here

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

"""Files of a bundle: opened once, checked against the manifest, and used as they were checked.

A file is never opened a second time by its name: what is hashed is what is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..core.cores import cores
from ..core.platforms import HERE

PIECE = 4 << 20  # bytes that are hashed at a time; pieces are hashed side by side
PAGE = 4096
MANIFEST, PARAMETERS = "manifest.json", "parameters.bin"
MOST = 256 << 20  # bytes of a manifest
ROW = {"objects": "{}.objects", "plans": "{}.plans.json", "prepared": "{}.prepared"}


class Refused(Exception):
    """Why a bundle cannot be used."""


class Stated(NamedTuple):
    """A file as the manifest has it."""

    bytes: int
    digests: tuple[str, ...]  # one for each piece


class Folder:
    """A bundle's directory, held by a descriptor: a path could lead elsewhere the next time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not hasattr(os, "O_DIRECTORY"):
            raise Refused(f"{path} cannot be opened safely on {HERE.name}, needs Linux or macOS")
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as problem:
            raise Refused(f"{path} cannot be opened: {problem.strerror}") from None
        self._pool = ThreadPoolExecutor(cores())
        try:
            _check_owner(os.fstat(self._descriptor), str(path))
        except Refused:
            self.close()
            raise

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        os.close(self._descriptor)

    def open(self, name: str) -> int:
        """A descriptor of a regular file that nobody else can write."""
        try:
            descriptor = os.open(name, os.O_RDONLY | HERE.open_flags, dir_fd=self._descriptor)
        except OSError as problem:
            raise Refused(f"{name} cannot be opened: {problem.strerror}") from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Refused(f"{name} is not a regular file")
            _check_owner(status, name)
        except Refused:
            os.close(descriptor)
            raise
        return descriptor

    def read(self, name: str, most: int) -> bytes:
        """A file's content, as it is now."""
        descriptor = self.open(name)
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise Refused(f"{name} has more than {most} bytes")
        return content

    def verified(self, name: str, stated: Stated) -> bytes:
        """A file's content, which is what the manifest says."""
        content = self.read(name, stated.bytes)
        check(name, content, stated)
        return content

    def mapped(self, name: str, stated: Stated, writable: bool = False) -> Hashed:
        """A file's content as memory that all processes share; it is hashed in the meantime.

        A writable one is copied page by page where it is written to: the file never changes.
        """
        descriptor = self.open(name)
        try:
            size = os.fstat(descriptor).st_size
            if size != stated.bytes:
                raise Refused(f"{name} has {size} bytes, needs {stated.bytes}")
            if size == 0:
                return Hashed(name, b"", stated, self._pool)
            kind = mmap.MAP_PRIVATE if writable else mmap.MAP_SHARED
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            return Hashed(name, mmap.mmap(descriptor, size, kind, access), stated, self._pool)
        except OSError as problem:
            raise Refused(f"{name} cannot be mapped: {problem.strerror}") from None
        finally:
            os.close(descriptor)


class Hashed:
    """Mapped memory that is being hashed by other threads: nobody sees it before they are done."""

    def __init__(self, name: str, memory: Any, stated: Stated, pool: ThreadPoolExecutor) -> None:
        self._name, self._memory, self._stated = name, memory, stated
        self._digests: Iterable[str] = map(digest_of, _pieces(memory))
        with contextlib.suppress(RuntimeError):  # no thread can be started: then here, later
            self._digests = pool.map(digest_of, _pieces(memory))

    def verified(self) -> Any:
        """The memory, which has what the manifest says."""
        self._digests = list(self._digests)
        compare(self._name, self._digests, self._stated)
        return self._memory


def _check_owner(status: os.stat_result, name: str) -> None:
    """Root's files are as good as one's own: whoever is root can do anything anyway."""
    if status.st_uid not in (0, os.getuid()):
        raise Refused(f"{name} belongs to user {status.st_uid}, needs to be root's or the user's "
                      "own: copy the bundle")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Refused(f"{name} can be written by others: chmod go-w")


def check(name: str, content: Any, stated: Stated) -> None:
    """Raise where content is not what the manifest says."""
    if len(content) != stated.bytes:
        raise Refused(f"{name} has {len(content)} bytes, needs {stated.bytes}")
    compare(name, hashes(_pieces(content)), stated)


def compare(name: str, found: list[str], stated: Stated) -> None:
    """Raise where digests of pieces are not what the manifest says."""
    wrong = [i for i, (a, b) in enumerate(zip(found, stated.digests)) if a != b]
    if len(found) != len(stated.digests) or wrong:
        where = f" (first in byte {wrong[0] * PIECE} and following)" if wrong else ""
        raise Refused(f"{name} has another checksum than the manifest says{where}: it was changed "
                      "or damaged")


def digest_of(piece: Any) -> str:
    """BLAKE2b of 256 bits: nobody can make a second content, and it takes less than SHA-256."""
    return hashlib.blake2b(piece, digest_size=32).hexdigest()


def _pieces(content: Any) -> list[Any]:
    view = memoryview(content).cast("B")
    return [view[start:start + PIECE] for start in range(0, len(view), PIECE)]


def hashes(pieces: Sequence[Any]) -> list[str]:
    """Digests of some memories, on all cores: hashlib does not hold Python's lock."""
    if sum(map(len, pieces)) < PIECE:
        return list(map(digest_of, pieces))
    with ThreadPoolExecutor(cores()) as pool:
        return list(pool.map(digest_of, pieces))


def stated(path: Path) -> Stated:
    """What a manifest is to say of a file."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        found = [digest_of(piece) for piece in iter(lambda: file.read(PIECE), b"")]
    return Stated(size, tuple(found))


def address_of(memory: Any) -> int:
    """Where mapped memory lies, also if it cannot be written."""
    import numpy as np

    return int(np.frombuffer(memory, np.uint8).ctypes.data)


class Writer:
    """A file of tensors, each at the beginning of a page."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def add(self, memory: Any) -> int:
        """Where the bytes went."""
        place = -(-self._file.tell() // PAGE) * PAGE
        self._file.seek(place)
        self._file.write(memory)
        return place


def bytes_of(tensor: Any) -> Any:
    """The memory of a dense tensor on a CPU."""
    count = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B") \
        if count else memoryview(b"")

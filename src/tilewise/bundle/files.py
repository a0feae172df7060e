"""Files of a bundle: opened once, checked against the manifest, and used as they were checked.

A file is never opened a second time by its name: what is hashed is what is used.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import stat
from collections.abc import Sequence
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
    sha256: tuple[str, ...]  # one for each piece


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
        _check_owner(os.fstat(self._descriptor), str(path))

    def close(self) -> None:
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

    def mapped(self, name: str, stated: Stated, writable: bool = False) -> Any:
        """A file's content as memory that all processes share, verified as it is mapped.

        A writable one is copied page by page where it is written to: the file never changes.
        """
        descriptor = self.open(name)
        try:
            size = os.fstat(descriptor).st_size
            if size != stated.bytes:
                raise Refused(f"{name} has {size} bytes, needs {stated.bytes}")
            if size == 0:
                return memoryview(b"")
            kind = mmap.MAP_PRIVATE if writable else mmap.MAP_SHARED
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            memory = mmap.mmap(descriptor, size, kind, access)
        except OSError as problem:
            raise Refused(f"{name} cannot be mapped: {problem.strerror}") from None
        finally:
            os.close(descriptor)
        check(name, memory, stated)
        return memory


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
    found = sums(content)
    wrong = [i for i, (a, b) in enumerate(zip(found, stated.sha256)) if a != b]
    if len(found) != len(stated.sha256) or wrong:
        where = f" (first in byte {wrong[0] * PIECE} and following)" if wrong else ""
        raise Refused(f"{name} has another SHA-256 than the manifest says{where}: it was changed "
                      "or damaged")


def sums(content: Any) -> list[str]:
    """SHA-256 of every piece, on all cores."""
    with memoryview(content) as whole, whole.cast("B") as view:
        pieces = [view[start:start + PIECE] for start in range(0, len(view), PIECE)]
        try:
            return hashes(pieces)
        finally:
            for piece in pieces:
                piece.release()


def hashes(pieces: Sequence[Any]) -> list[str]:
    """SHA-256 of some memories, on all cores: hashlib does not hold Python's lock."""
    if sum(map(len, pieces)) < PIECE:
        return [hashlib.sha256(piece).hexdigest() for piece in pieces]
    with ThreadPoolExecutor(cores()) as pool:
        return list(pool.map(lambda piece: hashlib.sha256(piece).hexdigest(), pieces))


def stated(path: Path) -> Stated:
    """What a manifest is to say of a file."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        found = [hashlib.sha256(piece).hexdigest() for piece in iter(lambda: file.read(PIECE), b"")]
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

"""Windows: calls of its kernel. Nobody has run it there yet."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

from .base import Platform

_AVX2 = 40  # a number of IsProcessorFeaturePresent
_CACHE = 2  # a kind of SYSTEM_LOGICAL_PROCESSOR_INFORMATION
_INSTRUCTIONS = 1  # a kind of cache
_RECORD = struct.Struct("<QIxxxxBBHIIxxxx")  # mask, kind; level, ways, line, size, kind of cache


class Windows(Platform):
    """x86-64 and Arm."""

    name = "Windows"
    objects = "-elf"  # objects in COFF need symbols of a C library that no process has
    for_all = None  # modes say nothing there, see is_ours
    openmp = ()  # torch's libraries there do not have GOMP_parallel
    can_start_openmp = False
    open_flags = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)

    def cpu_flags(self, machine: str) -> frozenset[str]:
        """AVX2 and no wider: of AVX-512 the system does not tell all that code needs."""
        kernel = _kernel()
        if kernel is None or not kernel.IsProcessorFeaturePresent(_AVX2):
            return frozenset()
        return frozenset({"avx2", "fma"})  # every processor that has one has both

    def cache_bytes(self, level: int) -> int:
        records = _RECORD.iter_unpack(_processors())
        return max((size for _, kind, at, _, _, size, sort in records
                    if kind == _CACHE and at == level and sort != _INSTRUCTIONS), default=0)

    def processor(self) -> str:
        return os.environ.get("PROCESSOR_IDENTIFIER") or super().processor()

    def huge_pages(self) -> str:
        return "never"  # they need a right that users do not have

    def map(self, size: int) -> mmap.mmap:
        return mmap.mmap(-1, size)

    def cache_home(self) -> Path:
        base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
        return Path(base) / "tilewise" if base else self.no_home()

    def no_home(self) -> Path:
        return Path(tempfile.gettempdir()) / "tilewise"  # a directory of the user's

    def is_ours(self, status: os.stat_result, or_roots: bool = False) -> bool:
        """Modes say nothing there: the user's own directory is what keeps others out."""
        return True

    def lock(self, descriptor: int, wait: bool) -> None:
        """The file's first byte; while waiting, the call gives up every ten seconds."""
        import msvcrt

        locking: Any = msvcrt
        while True:
            try:
                locking.locking(descriptor, locking.LK_LOCK if wait else locking.LK_NBLCK, 1)
                return
            except OSError as problem:
                if not wait:
                    raise BlockingIOError(errno.EAGAIN, "another process has it") from problem
                if problem.errno != errno.EDEADLK:
                    raise

    def sync_directory(self, path: Path) -> None:
        """A directory cannot be opened, and is written with its files."""

    def lacks(self, machine: str) -> list[str]:
        found = ["OpenMP's threads cannot be used: Python threads are started for every call",
                 "bundles cannot be opened"]
        wide = ["AVX-512 is not looked for: vectors of 256 bits are used"]
        return found + (wide if machine == "AMD64" else [])


def _kernel() -> Any:
    loader: Any = getattr(ctypes, "windll", None)
    return None if loader is None else loader.kernel32


def _processors() -> bytes:
    """Records of all processors and caches; empty where the system has none to give."""
    kernel = _kernel()
    if kernel is None:
        return b""
    length = ctypes.c_uint32(0)
    kernel.GetLogicalProcessorInformation(None, ctypes.byref(length))  # how many there are
    room = ctypes.create_string_buffer(length.value)
    if not kernel.GetLogicalProcessorInformation(room, ctypes.byref(length)):
        return b""
    return room.raw[:length.value // _RECORD.size * _RECORD.size]

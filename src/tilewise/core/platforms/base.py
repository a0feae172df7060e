"""A Unix of which nothing else is known; the other platforms say where they have more."""

from __future__ import annotations

import mmap
import os
import platform
import stat
import tempfile
from pathlib import Path


class Platform:
    """What tilewise asks of an operating system."""

    name = "this system"
    objects = ""  # what LLVM's name of a machine needs at its end, for the format of objects
    is_tested = False  # whether anybody has run it there
    openmp: tuple[str, ...] = ("libtorch_cpu.so",)  # beside torch; may lead to GOMP_parallel
    can_start_openmp = True  # whether there is such a function
    for_all: Path | None = Path("/etc/tilewise")  # files for all users, which only root can write
    huge_pages_advice = ""  # how to get huge pages
    # a pipe would wait for its writer, a link may point elsewhere the next time
    open_flags = (getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
                  | getattr(os, "O_CLOEXEC", 0))

    can_emulate = False  # whether a thread can be told from others as emulated tiles do it

    def cpu_flags(self, machine: str) -> frozenset[str]:
        """Flags of the processor; empty where the system reports none."""
        return frozenset()

    def may_use_tiles(self) -> bool:
        """Whether the system admits a process to the matrix unit."""
        return False

    def cache_bytes(self, level: int) -> int:
        """Bytes of a cache; 0 where the system does not say."""
        return 0

    def part(self) -> str:
        """Arm's number of the processor, in hexadecimal; empty where the system does not say."""
        return ""

    def family(self) -> str:
        """Vendor, family and model of the processor, as in GenuineIntel-6-85; empty where the
        system does not say."""
        return ""

    def processor(self) -> str:
        """The processor's name."""
        return platform.processor() or platform.machine()

    def huge_pages(self) -> str:
        """How huge pages are given out: always, madvise, never, or unknown."""
        return "unknown"

    def huge_page(self) -> int:
        """Where blocks of memory begin: multiples of it."""
        return mmap.PAGESIZE

    def map(self, size: int) -> mmap.mmap:
        """New memory of this process alone; pages that nobody touches cost nothing."""
        # private, or a forked child would write into it
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def ask_for_huge_pages(self, region: mmap.mmap, start: int, size: int) -> None:
        """Fewer page faults for these bytes, where the system has larger pages."""

    def cache_home(self) -> Path:
        """Where programs keep what they can make again."""
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return self.no_home() if base.startswith("~") else Path(base) / "tilewise"

    def no_home(self) -> Path:
        """For a user without a home."""
        return Path(tempfile.gettempdir()) / f"tilewise-{os.getuid()}"

    def is_ours(self, status: os.stat_result, or_roots: bool = False) -> bool:
        """Whether a file is the user's and no other's; or the administrator's, where that will
        do."""
        others = stat.S_IWGRP | stat.S_IWOTH
        owners = (os.getuid(), 0) if or_roots else (os.getuid(),)
        return status.st_uid in owners and not status.st_mode & others

    def lock(self, descriptor: int, wait: bool) -> None:
        """Until the descriptor is closed; BlockingIOError if another has it and `wait` is not."""
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))

    def exchange(self, one: Path, other: Path) -> bool:
        """Each under the name of the other, at once; False where the system cannot."""
        return False

    def sync_directory(self, path: Path) -> None:
        """A rename itself is on the disk only when the directory is."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lacks(self, machine: str) -> list[str]:
        """What there is not, and what is used instead."""
        return ["processor flags are not known: the narrowest vectors are used",
                "cache sizes are not known: usual ones are assumed"]

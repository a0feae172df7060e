"""Outputs, scratch and prepared weights come from one bounded pool with huge pages.

Page faults of a fresh 100 MB output cost as much as the convolution that fills it; a block goes
back to the pool when the last tensor that uses it dies.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import OrderedDict, deque
from functools import lru_cache
from typing import Any

import torch

from ...core.errors import OutOfMemory
from ...core.locks import fork_safe_lock
from ...core.platforms import HERE
from ...core.watching import watcher

MB = 1 << 20
SMALL = 512 << 10  # below this, torch's own allocator is as good
HUGE_PAGE = HERE.huge_page()
DEFAULT_LIMIT = 2 << 30
ROOM = 1.5  # a free block may be this much larger than what is asked for
PATIENCE = 512  # a block goes when so many others were taken since it came back
SWEEP = 64  # takes between two looks for such blocks
ALWAYS = 1 << 30  # bytes, in use and free, that a process may hold whatever it uses


class Pool:
    """Free blocks by size; `limit` bounds the bytes it keeps for later.

    With those in use they are no more than were in use at once, or ALWAYS: a training step ends
    with other sizes than it began with, and would hold both.

    Blocks that nobody takes any more go. Where their size is asked for again, it was too early:
    the patience with that size doubles.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self._limit, self.kept = limit, 0
        self.used = self.most_used = 0  # bytes of blocks that are out
        self._free: OrderedDict[int, list[tuple[mmap.mmap, int]]] = OrderedDict()  # and since when
        self._takes, self._gone = 0, set[int]()
        self._patience: dict[int, int] = {}  # of sizes for which it is more than usual
        self._returned: deque[tuple[mmap.mmap, int]] = deque()
        self._lock = fork_safe_lock()

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        with self._lock:
            self._limit = limit
            self._sort_in()

    def take(self, size: int) -> Any:
        """A block of at least `size` bytes, as a buffer that comes back by itself."""
        size = _size_class(size)
        with self._lock:
            self._sort_in()
            fitting = size if self._free.get(size) else min(
                (kept for kept, regions in self._free.items()
                 if size <= kept <= size * ROOM and regions), default=0)
            region = self._pull(fitting, -1) if fitting else None
            if not fitting and size in self._gone:
                self._gone.discard(size)
                self._patience[size] = 2 * self._patience.get(size, PATIENCE)
            self._takes += 1
            idle = self._pull_idle() if self._takes % SWEEP == 0 else []
            self.used, most = self.used + (fitting or size), self.most_used
            self.most_used = max(self.most_used, self.used)
            idle += self._pull_until(max(ALWAYS, self.most_used) - self.used)
        del idle  # unmapped outside of the lock
        return _block_type(fitting or size).on(region or self._mapped(size, most), self)

    def _mapped(self, size: int, most: int) -> mmap.mmap:
        """Counted already: what the system refuses is taken off again; `most` was used before."""
        try:
            return self._map(size)
        except OutOfMemory:
            with self._lock:
                self.used -= size
                self.most_used = max(self.used, most)
            raise

    def give(self, region: mmap.mmap, size: int) -> None:
        """A tensor can die in the middle of anything, even of `take`: then that sorts it in."""
        self._returned.append((region, size))
        if not self._lock.locked():
            with self._lock:
                self._sort_in()

    def give_back(self) -> int:
        """Free blocks return to the system; how many bytes they had."""
        with self._lock:
            self._sort_in()
            freed = self._count()
            self._free.clear()
            self.kept = 0
        return freed

    def _map(self, size: int) -> mmap.mmap:
        try:
            return _map(size)
        except (OSError, MemoryError):
            freed = self.give_back()
        try:
            return _map(size)
        except (OSError, MemoryError) as problem:
            raise OutOfMemory(
                f"{size / MB:.0f} MB asked for, which the system refuses ({problem}), also after "
                f"{freed / MB:.0f} MB of free blocks were given back; needs a smaller batch, "
                "tilewise.set_memory_limit(weights=...) with less for prepared weights, or a "
                "higher limit of the process (ulimit -v) or container") from problem

    def _sort_in(self) -> None:
        """What was returned joins the free blocks; the least recently used above the limit go."""
        while self._returned:
            region, size = self._returned.popleft()
            self.used -= size
            self.kept += size  # first: an interrupt may leave it too high, which _count mends
            self._free.setdefault(size, []).append((region, self._takes))
            self._free.move_to_end(size)
        self._pull_until(self._limit)

    def _pull_until(self, most: int) -> list[mmap.mmap]:
        """The least recently used, until no more than `most` bytes are kept."""
        found = []
        if self.kept > most:
            self._count()
            while self.kept > most:
                found.append(
                    self._pull(next(size for size, regions in self._free.items() if regions), 0))
        return found

    def _pull_idle(self) -> list[mmap.mmap]:
        """Blocks that were free for too long; of each size the first came back first."""
        found = []
        for size in list(self._free):
            last = self._takes - self._patience.get(size, PATIENCE)
            while self._free[size] and self._free[size][0][1] < last:
                found.append(self._pull(size, 0))
                self._gone.add(size)
        return found

    def _pull(self, size: int, place: int) -> mmap.mmap:
        region, _ = self._free[size].pop(place)
        self.kept -= size
        return region

    def _count(self) -> int:
        """The bytes that are kept, counted anew."""
        for size in [size for size, regions in self._free.items() if not regions]:
            del self._free[size]
        self.kept = sum(size * len(regions) for size, regions in self._free.items())
        return self.kept


def _size_class(size: int) -> int:
    """Rounded up to one of eight steps a power of two, so that near sizes share blocks."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def _map(size: int) -> mmap.mmap:
    region = HERE.map(size + HUGE_PAGE)
    # a last page that is used by less than half would take more memory than it saves time
    pages = (size + HUGE_PAGE // 2) // HUGE_PAGE
    HERE.ask_for_huge_pages(region, _start(region), pages * HUGE_PAGE)
    return region


def _start(region: mmap.mmap) -> int:
    """Where its first huge page begins."""
    return -ctypes.addressof(ctypes.c_char.from_buffer(region)) % HUGE_PAGE


@lru_cache(maxsize=1024)
def _block_type(size: int) -> Any:
    class Block(ctypes.c_char * size):  # type: ignore[misc]
        @classmethod
        def on(cls, region: mmap.mmap, pool: Pool) -> Block:
            block = cls.from_buffer(region, _start(region))
            block.home = (region, pool)
            return block

        def __del__(self) -> None:
            region, pool = self.home
            pool.give(region, size)

    return Block


POOL = Pool()


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An uninitialised tensor, contiguous in the order of `shape`."""
    count = 1
    for size in shape:
        count *= size
    size = count * dtype.itemsize
    if size < SMALL:
        return noted(torch.empty(shape, dtype=dtype))
    values = torch.frombuffer(POOL.take(size), dtype=dtype, count=count)
    return noted(values if len(shape) == 1 else values.view(shape))


def noted(tensor: torch.Tensor, pooled: bool = True) -> torch.Tensor:
    """New memory, of which a watcher is told."""
    if (told := watcher()) is not None:
        told.took(tensor, pooled)
    return tensor


def keep(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pool memory, for what is read often."""
    if (told := watcher()) is not None:
        told.cannot_repeat("torch copies a tensor")
    if tensor.dtype == torch.float32 and tensor.is_cpu:
        return empty(*tensor.shape).copy_(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

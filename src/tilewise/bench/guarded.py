"""Memory between unmapped pages, for code that checks no bounds.

Every buffer touches a page that cannot be read, once with its end and once with its start, and
the rest of its own pages is NaN that must stay.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import torch

from ..core.places import Place
from .judged import Mismatch

PAGE = mmap.PAGESIZE
PROT_NONE = 0
UNTOUCHED = 0x7FC0_DEAD  # a NaN that no arithmetic makes


class Region:
    """Writable pages with an unmapped one on either side."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.memory = mmap.mmap(-1, (pages + 2) * PAGE)
        self.floats = torch.frombuffer(self.memory, dtype=torch.float32, offset=PAGE,
                                       count=pages * PAGE // 4)
        self.bytes = self.floats.view(torch.uint8)
        self.untouched = torch.full((pages * PAGE // 4,), UNTOUCHED, dtype=torch.int32).view(
            torch.uint8)
        for guard in (self.floats.data_ptr() - PAGE, self.floats.data_ptr() + pages * PAGE):
            _unmap(guard)


def _unmap(page: int) -> None:
    """Make a page one that kills who touches it; not on Windows, where only writes are noticed."""
    if os.name == "nt":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect failed")


class Buffer:
    """Some values of a region, flush with the unmapped page at its "start" or its "end"."""

    def __init__(self, region: Region, count: int, side: str,
                 dtype: torch.dtype = torch.float32) -> None:
        self.region, values = region, region.bytes.view(dtype)
        self.first = values.numel() - count if side == "end" else 0
        self.last = self.first + count
        self.values = values[self.first:self.last]
        start = values.data_ptr() + dtype.itemsize * self.first
        self.address = Place.of(start, start, dtype.itemsize * count)  # for checked code
        region.bytes.copy_(region.untouched)

    def around_untouched(self) -> bool:
        """Whether nothing was written beside the buffer."""
        region, size = self.region, self.values.element_size()
        return all(torch.equal(region.bytes[part], region.untouched[part])
                   for part in (slice(self.first * size), slice(self.last * size, None)))


class Arena:
    """Guarded buffers; regions are used again, since mapping them is slow."""

    def __init__(self) -> None:
        self._free: dict[int, list[Region]] = defaultdict(list)
        self._held: list[Buffer] = []

    def around(self, address: int) -> Buffer | None:
        """The buffer that is in use at an address, or ends there."""
        return next((buffer for buffer in self._held if 0 <= address
                     - buffer.region.floats.data_ptr() <= buffer.region.pages * PAGE), None)

    @contextmanager
    def buffers(self, counts: Iterable[int], side: str,
                dtypes: Iterable[torch.dtype] = ()) -> Iterator[list[Buffer]]:
        """Buffers of floats, or of the types that are told."""
        held = [Buffer(self._region(count * dtype.itemsize), count, side, dtype)
                for count, dtype in zip(counts, chain(dtypes, repeat(torch.float32)))]
        self._held += held
        try:
            yield held
        finally:
            self._held = [buffer for buffer in self._held if buffer not in held]
            for buffer in held:
                self._free[buffer.region.pages].append(buffer.region)

    def _region(self, size: int) -> Region:
        pages = max(1, -(-size // PAGE))
        return self._free[pages].pop() if self._free[pages] else Region(pages)


ARENA = Arena()


WORDS = ("x", "weight", "bias", "residual", "y", "scratch", "mask")  # what a kernel is called with


def launch_guarded(kernel: Any, given: dict[str, torch.Tensor | None], made: dict[str, int],
                   n: int, threads_: int, side: str,
                   images: torch.dtype = torch.float32,
                   wanted: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
    """What a kernel makes, as so many values, of what it is given and may not change.

    All of it, or what is wanted: scratch can be large.
    """
    sources = {name: source for name, source in given.items() if source is not None}
    counts = {name: source.numel() for name, source in sources.items()} | made
    made_of = {"mask": torch.uint8, "y": images}
    dtypes = {name: made_of.get(name, torch.float32) for name in made} | {
        name: source.dtype for name, source in sources.items()}
    with ARENA.buffers(counts.values(), side, [dtypes[name] for name in counts]) as held:
        buffers = dict(zip(counts, held))
        for name, source in sources.items():
            buffers[name].values.copy_(source)
        x, weight, bias, residual, y, scratch, mask = (
            buffers[name].address if name in buffers else 0 for name in WORDS)
        kernel(x, weight, bias, residual, y, scratch, n, threads_, mask)
        _check_memory(buffers, sources)
        return {name: buffers[name].values.clone() for name in wanted or made}


def _check_memory(buffers: dict[str, Buffer], sources: dict[str, torch.Tensor]) -> None:
    for name, buffer in buffers.items():
        if not buffer.around_untouched():
            raise Mismatch(f"wrote beside {name}")
        if name in sources and not _same_bytes(buffer.values, sources[name]):
            raise Mismatch(f"wrote to {name}")


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also of what is NaN, because nobody may read it."""
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """As they lie in memory; the stride of a single one may be anything."""
    whole = values.contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


# slices of channels


def extent(pixels: int, channels: int, pitch: int) -> int:
    """Values from the first to the last, without the gap behind them; a pitch of 0: no gaps."""
    return max(0, pixels * pitch - (pitch - channels)) if pitch else pixels * channels


def among(values: torch.Tensor, channels: int, pitch: int) -> torch.Tensor:
    """The channels of pixels between others, which are NaN."""
    if not pitch or not values.numel():
        return values
    pixels = values.view(-1, channels)
    whole = values.new_full((pixels.shape[0], pitch), float("nan"))
    whole[:, :channels] = pixels
    return whole.flatten()[:extent(pixels.shape[0], channels, pitch)]


def taken_from(values: torch.Tensor, channels: int, pitch: int) -> torch.Tensor:
    """The channels of pixels, if what lies between was not written to."""
    if not pitch or not values.numel():
        return values
    whole = torch.cat((values, values.new_empty(pitch - channels))).view(-1, pitch)
    words, first = whole.view(torch.int16), channels * values.element_size() // 2
    pattern = torch.full((words.numel() // 2 + 1,), UNTOUCHED, dtype=torch.int32).view(torch.int16)
    # halves may begin with either half of it
    if not any(torch.equal(words[:-1, first:], pattern[shift:shift + words.numel()].view_as(
            words)[:-1, first:]) for shift in (0, 1)):
        raise Mismatch("wrote between pixels")
    return whole[:, :channels].reshape(-1)


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Something else under a name, for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class GuardedMemory:
    """Memory for a program's call that ends, or begins, at a page that cannot be touched."""

    def __init__(self) -> None:
        self.taken = 0

    def empty(self, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self.taken += 1
        size = count * dtype.itemsize
        region = Region(max(1, -(-size // PAGE)))
        whole = region.floats.fill_(float("nan")).view(torch.uint8)
        start = whole.numel() - size if self.taken % 2 and size % 64 == 0 else 0
        return whole[start:start + size].view(dtype)

"""Tables that tell checked code what memory it may touch, and what it says it found there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....core.errors import OutOfBounds
from .checks import CHECKS, MIDDLE, REPORT, ROWS, SHIFT, WORDS, Site

NAMES = ("x", "weight", "bias", "residual", "y", "scratch", *[""] * 6, "mask")  # words of a frame
LINE = 64  # bytes: what the largest vectors are aligned to


class Guard:
    """The table of one launch; it must live until that has ended."""

    def __init__(self, memories: Mapping[int, tuple[int, int]]) -> None:
        """Start and bytes of the memory at each word of a frame that is an address."""
        self._held = ctypes.create_string_buffer(8 * WORDS + LINE)
        start = ctypes.addressof(self._held)
        self.address = start + -start % LINE
        self._words = (ctypes.c_int64 * WORDS).from_address(self.address)
        self._memories = dict(memories)
        for word, memory in memories.items():
            self._words[ROWS + 2 * word:ROWS + 2 * word + 2] = list(memory)

    def judge(self, request: Any) -> None:
        """Raises what the code of a request found."""
        report, start = self._words[REPORT:REPORT + 2]
        if report == 0:
            return
        sites: list[Site] = request.module().sites  # the same as when it was compiled
        site = sites[(report >> SHIFT) - 1]
        offset = (report & ((1 << SHIFT) - 1)) - MIDDLE
        raise OutOfBounds(
            f"{_kernel(request)}, in {site.function}, written by {site.line}: {site.verb} up to "
            f"{site.bytes} bytes at byte {offset} of {self._memory(start)}; needs to stay inside. "
            "The access was left out, and the result is not valid. Please report this message "
            "with the output of `tilewise doctor`.")

    def _memory(self, start: int) -> str:
        for word, memory in self._memories.items():
            if memory[0] == start:
                return f"{NAMES[word]}, which has {memory[1]}"
        return "a memory that is not of its frame" if start else "an operand that it was not given"


def _kernel(request: Any) -> str:
    make = request.make
    return f"{make.__module__.rpartition('.')[2]} {request.name} on {request.isa.name}"


def run_guarded(request: Any, run: Callable[[], None], frame: Any,
                addresses: Mapping[int, int]) -> None:
    """Run checked code; of an address that is no `Place` nothing may be touched."""
    guard = Guard({word: (getattr(address, "start", int(address)), getattr(address, "bytes", 0))
                   for word, address in addresses.items()})
    frame[CHECKS] = guard.address
    run()
    guard.judge(request)


def judge_all(guards: Sequence[Guard], requests: Sequence[Any]) -> None:
    for number, (guard, request) in enumerate(zip(guards, requests, strict=True)):
        try:
            guard.judge(request)
        except OutOfBounds as found:
            raise OutOfBounds(f"kernel {number + 1} of {len(guards)} in a row: {found}") from None

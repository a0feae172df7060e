"""Scratch of calls that take microseconds: a few small blocks wait for the next call.

Taking memory from torch or from the pool takes 3 to 9 us, and its pages may be cold.
"""

from __future__ import annotations

from typing import Any

from ..core.places import address
from ..core.watching import watcher
from ..kernels.cpu import memory

LARGEST = 2 << 20  # bytes of a block that may wait; larger ones are the pool's
SIZES, EACH = 8, 2  # so many sizes of blocks wait, and so many blocks of each

Block = tuple[int, Any]  # where it begins, and what keeps it alive


class Spare:
    """Blocks by the number of their floats; what is not given back is nobody's."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Block]] = {}

    def take(self, floats: int) -> Block:
        waiting = self._waiting.get(floats)
        if waiting and watcher() is None:
            try:
                return waiting.pop()
            except IndexError:
                pass  # another thread was faster
        block = memory.empty(floats)
        return address(block), block

    def give(self, floats: int, block: Block) -> None:
        """For others, unless a program that is recorded goes on with it."""
        if 4 * floats > LARGEST or watcher() is not None:
            return
        waiting = self._waiting.get(floats)
        if waiting is None:
            if len(self._waiting) >= SIZES:
                self._waiting.clear()
            waiting = self._waiting.setdefault(floats, [])
        if len(waiting) < EACH:
            waiting.append(block)

    def clear(self) -> None:
        self._waiting.clear()


SPARE = Spare()

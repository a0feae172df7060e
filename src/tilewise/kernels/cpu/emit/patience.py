"""A line for people who wait: kernels are compiled, and will not be the next time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress

LONG = 2.0  # seconds before it is told
PAUSE = 1.0  # seconds without a kernel that end a burst


class Patience:
    """Counts the kernels of a burst; tells once of one that lasts, on a terminal."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._told = clock, False
        self._since = self._last = -PAUSE
        self._kernels = 0

    def begins(self) -> None:
        """A kernel is about to be compiled."""
        now = self._clock()
        if now - self._last > PAUSE:
            self._since, self._kernels, self._told = now, 0, False

    def ends(self, where: str) -> None:
        """It is there; the next process finds it in `where`."""
        self._last, self._kernels = self._clock(), self._kernels + 1
        if self._last - self._since > LONG and not self._told:
            self._told = True
            with suppress(AttributeError, OSError, ValueError):  # a program without a terminal
                self._tell(where)

    def _tell(self, where: str) -> None:
        if sys.stderr.isatty():
            print(f"tilewise: compiling for this machine, {self._kernels} kernels in "
                  f"{self._last - self._since:.0f} s so far; they are kept in {where}",
                  file=sys.stderr, flush=True)


PATIENCE = Patience()

"""Where outputs lie that are not all of a result: every so many rows and columns of it."""

from __future__ import annotations

from typing import NamedTuple


class Grid(NamedTuple):
    """Every `down`-th row and `across`-th column of a result of `h` rows and `w` columns.

    The first output lies where the kernel's result begins: an offset is added to its address.
    """

    down: int
    across: int
    h: int
    w: int

    def __str__(self) -> str:
        return f"grid{self.down}x{self.across}of{self.h}x{self.w}"

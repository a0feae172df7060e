"""Where outputs lie that are not all of a result: every so many rows, columns and channels."""

from __future__ import annotations

from typing import NamedTuple


class Grid(NamedTuple):
    """Every `down`-th row and `across`-th column of a result of `h` rows and `w` columns.

    The first output lies where the kernel's result begins: an offset is added to its address.
    The result may have more channels than the outputs: `pitch` is their number, 0 the same.
    """

    down: int
    across: int
    h: int
    w: int
    pitch: int = 0

    def __str__(self) -> str:
        among = f"x{self.pitch}" if self.pitch else ""
        return f"grid{self.down}x{self.across}of{self.h}x{self.w}{among}"

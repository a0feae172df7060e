"""What was made once is there again, as long as there is not too much of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Remembered(dict[Any, T]):
    """remembered[a, b] is make(a, b), made once; all of it goes when there is too much.

    A dict: what it has is found without any Python of ours. Several threads may share it.
    """

    def __init__(self, make: Callable[..., T], most: int = 256) -> None:
        super().__init__()
        self._make, self._most = make, most

    def __missing__(self, key: tuple[Any, ...]) -> T:
        made = self._make(*key)
        if len(self) >= self._most:
            self.clear()
        self[key] = made
        return made

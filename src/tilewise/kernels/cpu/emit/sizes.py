"""Sizes that generated code does not know: words of its frame, by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .function import Function
from .threads import SIZES


class InCode:
    """A geometry inside a function: sizes named in `names` are emitted, all others constants.

    The function has an argument `frame`. The words lie there in the order of the names.
    """

    def __init__(self, f: Function, geometry: Any, names: Sequence[str]) -> None:
        self._f, self._geometry, self._names = f, geometry, names

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            return self._f.frame.load_index(SIZES + self._names.index(name))
        return getattr(self._geometry, name)

"""Variables of the functions around a model's functions, as decorators have them."""

from __future__ import annotations

import types
from functools import partial
from typing import Any

from .contents import CODE, FIXED, Refused
from .guards import Guards


class Closures:
    """Functions that were met, which have the cells of what a frame only has the values of."""

    def __init__(self, guards: Guards) -> None:
        self._guards = guards
        self._functions: dict[types.CodeType, list[types.FunctionType]] = {}
        self._guarded: dict[int, Any] = {}  # cells

    def meets(self, value: Any) -> None:
        """What a module has under the name of a method, and all that it calls by its cells."""
        open_ = [value]
        while open_:
            method = open_.pop()
            function = getattr(method, "__func__", method)
            if not isinstance(function, types.FunctionType):
                continue
            known = self._functions.setdefault(function.__code__, [])
            if all(one is not function for one in known):
                known.append(function)
                open_ += map(_held, function.__closure__ or ())

    def guard(self, frame: types.FrameType) -> None:
        """What a function reads of those around it."""
        values = frame.f_locals
        for name in frame.f_code.co_freevars:
            self._guards.fills(values.get(name))
            if isinstance(values.get(name), CODE):
                continue
            cells = self._cells(frame.f_code, values, name)
            if not cells or not isinstance(values.get(name), FIXED):
                raise Refused(f"{frame.f_code.co_name} reads {name} of the function around it")
            for cell in cells:
                if id(cell) not in self._guarded:
                    self._guarded[id(cell)] = cell
                    self._guards.asks(partial(_told, cell))

    def _cells(self, code: types.CodeType, values: dict[str, Any], name: str) -> list[Any]:
        """Of all functions that were met and have these values: any of them may run."""
        found = []
        for function in self._functions.get(code, ()):
            cells = dict(zip(code.co_freevars, function.__closure__ or ()))
            if all(_held(cell) is values.get(one) for one, cell in cells.items()):
                found.append(cells[name])
        return found


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _told(cell: Any) -> Any:
    return type(_held(cell)), _held(cell)

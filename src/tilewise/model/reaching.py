"""Functions of a model that hold what a graph cannot repeat: refused where they come to it.

Lines are refused if they run, comparisons if they are of what is not known. Functions that catch
exceptions are refused if there is one, or an operator: what raises while it is traced might not
with tensors, and the other way round.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import fx

from .bytecode import Facts
from .contents import Refused


class Followed(NamedTuple):
    """What counts in a function.

    Args:
        facts: Of its code.
        lines: Those that are refused, and why.
        is_unsure: Whether stand-ins stand for what may be equal to something by `is`.
        knows_class: Guards the class of an object; refuses that of a stand-in.
    """

    facts: Facts
    lines: dict[int, str]
    is_unsure: Callable[[], bool]
    knows_class: Callable[[Any], None]


class Reaching:
    """Those that run now, followed by Python's own hook for debuggers."""

    def __init__(self, follow: Callable[[], None]) -> None:
        """`follow` lets calls be seen again."""
        self._follow = follow
        self._frames: list[types.FrameType] = []
        self._catching: list[types.FrameType] = []  # of these
        self._refusal: Refused | None = None  # the first, kept, as it might be caught itself

    def is_free(self) -> bool:
        """Whether no debugger has that hook, and nothing that measures coverage."""
        return sys.gettrace() in (None, _nothing)

    def enters(self, frame: types.FrameType, what: Followed) -> None:
        frame.f_trace = partial(self._notes, what)
        frame.f_trace_lines = bool(what.lines or what.facts.compared_locals or what.facts.classes)
        self._frames.append(frame)
        if what.facts.catches:
            self._catching.append(frame)
        sys.settrace(_nothing)

    def leaves(self, frame: types.FrameType) -> None:
        if not self._frames or self._frames[-1] is not frame:
            return
        self._frames.pop()
        if self._catching[-1:] == [frame]:
            self._catching.pop()
        # what it refused may be on its way through others, whose `finally` is followed, too
        sys.settrace(_nothing if self._frames else None)
        if _returns(frame):
            self.check()

    def creates(self) -> None:
        """An operator, which may raise when the graph runs: nothing would catch that."""
        self.check()
        if self._catching:
            self._refuse(Refused(_text(self._catching[-1])))

    def check(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def ends(self) -> None:
        self._frames, self._catching = [], []
        if sys.gettrace() is _nothing:
            sys.settrace(None)

    def _notes(self, what: Followed, frame: types.FrameType, event: str, found: Any) -> None:
        if event == "line":
            self._comes(what, frame)
        if event == "exception" and isinstance(found[1], Refused):
            self._refusal = self._refusal or found[1]  # and not what is run by `finally`
            self._follow()  # Python drops the hook that raised
        elif event == "exception" and what.facts.catches:
            self._refusal = self._refusal or Refused(_text(frame))

    def _comes(self, what: Followed, frame: types.FrameType) -> None:
        """To a line, which was not run yet."""
        if frame.f_lineno in what.lines:
            self._refuse(Refused(what.lines[frame.f_lineno]))
        try:
            for name in what.facts.classes.get(frame.f_lineno, ()):
                what.knows_class(frame.f_locals.get(name))
        except Refused as reason:  # which the model's code might catch
            self._refuse(reason)
        names = what.facts.compared_locals.get(frame.f_lineno)
        if names and what.is_unsure() and any(
                issubclass(type(frame.f_locals.get(name)), fx.Proxy) for name in names):
            self._refuse(Refused(f"{frame.f_code.co_name} compares what is not known"))

    def _refuse(self, reason: Refused) -> None:
        self._refusal = self._refusal or reason
        self.check()


def _text(frame: types.FrameType) -> str:
    return f"{frame.f_code.co_name} catches exceptions"


def _returns(frame: types.FrameType) -> bool:
    """Whether a function ends otherwise than by an exception."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def _nothing(*_: Any) -> None:
    """Functions that are entered are not looked at."""

"""One kernel to compile, as a line of text that another process can read."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

from ....core import places
from ....core.code import Code
from ....core.isa import ISA, Isa
from ....core.schedule import Schedule
from .checks import checking
from .function import Module


class Request(NamedTuple):
    """All that code is made from; `any_size`: its kernel finds image sizes in its frame."""

    make: Callable[..., Module]
    p: Any
    s: Schedule
    isa: Isa
    more: tuple[int, ...]
    any_size: bool

    @property
    def name(self) -> str:
        """Of all in a problem that code depends on."""
        return self.p.code if self.any_size else str(self.p.compiled)

    @property
    def key(self) -> str:
        """Under which the code is kept, for its row of ISA."""
        make = f"{self.make.__module__}.{self.make.__qualname__}"
        mode = ["checked"] if places.CHECKED else []
        return "|".join([make, self.name, self.s.to_json(), *map(str, self.more), *mode])

    def module(self) -> Module:
        """The code as IR."""
        seen: Any = Code(self.p) if self.any_size else self.p.compiled
        with checking(places.CHECKED):
            return self.make(seen, self.s, self.isa, *self.more)

    @property
    def can_travel(self) -> bool:
        """Whether another process can make the same."""
        return "<" not in self.make.__qualname__ and ISA.get(self.isa.name) == self.isa

    def to_line(self) -> bytes:
        """For a process of this one's own, which imports the same modules."""
        parts = (self.make, self.p, self.s.to_json(), self.isa.name, self.more, self.any_size)
        return base64.b64encode(pickle.dumps(parts)) + b"\n"

    @staticmethod
    def from_line(line: bytes) -> Request:
        make, p, s, isa, more, any_size = pickle.loads(base64.b64decode(line))
        return Request(make, p, Schedule.from_json(s), ISA[isa], more, any_size)

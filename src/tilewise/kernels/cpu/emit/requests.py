"""One kernel to compile, as a line of text that another process can read."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from ....core.code import Code
from ....core.isa import ISA, Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
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
        return "|".join([make, self.name, self.s.to_json(), *map(str, self.more)])

    def module(self) -> Module:
        """The code as IR."""
        seen: Any = Code(self.p) if self.any_size else self.p.compiled
        return self.make(seen, self.s, self.isa, *self.more)

    @property
    def can_travel(self) -> bool:
        """Whether another process can make the same."""
        return isinstance(self.p, Problem) and ISA.get(self.isa.name) == self.isa

    def to_json(self) -> str:
        return json.dumps([self.make.__module__, self.make.__qualname__, str(self.p),
                           self.s.to_json(), self.isa.name, self.more, self.any_size])

    @staticmethod
    def from_json(text: str) -> Request:
        module, name, p, s, isa, more, any_size = json.loads(text)
        return Request(getattr(importlib.import_module(module), name), Problem.parse(p),
                       Schedule.from_json(s), ISA[isa], tuple(more), any_size)

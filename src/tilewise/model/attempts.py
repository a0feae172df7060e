"""Tracing a module again and again, each time with one more of its parts called as it is."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from .contents import Refused
from .guards import Passing
from .tracer import Tracer

ATTEMPTS = 12  # modules that are left out of a graph before the whole is given up
ALIKE = 3  # of one class, after which all of it are left out


def traced(module: nn.Module, leaves: list[Any], spec: Any,
           sized: bool = False) -> tuple[Tracer, tuple[fx.Graph, list[Any], Any]]:
    """The graph of a module; parts that cannot be traced are called as they are."""
    opaque: dict[nn.Module, Refused] = {}
    for _ in range(ATTEMPTS):
        tracer = Tracer(module, opaque, sized)
        try:
            return tracer, tracer.run(leaves, spec)
        except (Refused, Exception) as reason:  # whatever a model's Python does with a proxy
            part = tracer.stack[-1] if tracer.stack else module
            passing = any(isinstance(why, Passing) for why in (reason, *opaque.values()))
            if part is module:
                kind = Passing if passing else Refused
                raise kind(f"{type(module).__name__}: {reason}") from reason
            kind = Passing if isinstance(reason, Passing) else Refused
            opaque = {**opaque, part: kind(str(reason))}  # without what it was raised in
            if sum(type(other) is type(part) for other in opaque) == ALIKE:
                opaque = {**{other: opaque[part] for other in module.modules()
                             if type(other) is type(part) and other is not module}, **opaque}
    kind = Passing if any(isinstance(why, Passing) for why in opaque.values()) else Refused
    raise kind(f"{type(module).__name__}: {ATTEMPTS} of its parts cannot be traced")

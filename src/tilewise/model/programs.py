"""The programs of a graph: one for each form of its inputs that comes again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ..conv.again import can_repeat, form, settings
from ..conv.running import ENGINE
from ..runtime.program import Program, Stale
from ..runtime.stamps import ATTEMPTS, Stamps, dicts_count, of_dict, of_tensors
from .binding import Binder, NotNow
from .placing import Places, slots, told
from .stages import note
from .structure import filled

MOST = 16  # programs of one graph
MORE = 1.05  # times as much memory as a program without places may take
SEEN = "seen once"  # what comes once only is not worth a program


class Bound:
    """A program, and what it takes for granted besides what it is made from."""

    def __init__(self, program: Program, binder: Binder) -> None:
        self.program, self._form, self._guards = program, binder.form, binder.guards
        self.labels = binder.labels
        self._cleared = ENGINE.executables.times_cleared
        unique = {(id(module), name): (module, name, tensor)
                  for module, name, tensor in binder.named}
        self._homes = [_home(module, name) for module, name, _ in unique.values()]
        self._names = [name for _, name, _ in unique.values()]
        self._tensors = [tensor for *_, tensor in unique.values()]
        self._read = [tensor for tensor in self._tensors if tensor is not None]
        self._places = [tensor.data_ptr() for tensor in self._read]
        self._stamps: Stamps | None = None
        self._attempts = ATTEMPTS

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Any] | None:
        found = self.program(tensors)
        results: Sequence[Any] | None = None if found is None else filled(self._form, iter(found))
        return results

    def text(self) -> str:
        """Its steps and where they read and write, a line each."""
        places = self.program.places
        lines = [f"{label.name or 'step'}: {place}"
                 for label, place in zip(self.labels, places, strict=True)]
        return "\n".join([*lines, f"{self.program.bytes} bytes in all"])

    def held(self) -> object:
        """What a call must hold on to; None where the program no longer stands for its model."""
        if self._cleared != ENGINE.executables.times_cleared or not self._guards.hold():
            return None
        if self._stamps is not None and self._stamps.same():
            self._attempts = ATTEMPTS
            return self.program.held(steady=True)
        self._stamps = None
        stamps = self._stamped()  # before the look, which might miss what comes after it
        held = self.program.held() if self._are_there() else None
        if held is not None:
            self._stamps = stamps
        return held

    def _are_there(self) -> bool:
        try:
            return (all(map(is_, map(dict.get, self._homes, self._names), self._tensors))
                    and list(map(Tensor.data_ptr, self._read)) == self._places)
        except RuntimeError:  # of a tensor that has no memory any more
            return False

    def _stamped(self) -> Stamps | None:
        """Of all tensors, and where modules have them; they are kept here."""
        self._attempts -= 1
        if self._attempts < 0 or not dicts_count():
            return None
        known = set(map(id, self._read))
        tensors = of_tensors(self._read)
        if tensors is None or any(id(source) not in known for source in self.program.sources()):
            return None
        homes = {id(home): home for home in self._homes}
        stamps = Stamps([*map(of_dict, homes.values()), *tensors])
        return stamps if of_tensors(self._read) == tensors else None  # or moved by another thread


class Programs:
    """run(tensors): results by a program, or None where the graph is to be run as it is.

    Several threads may share it: each step is one operation of a dict.
    """

    def __init__(self, capture: Any) -> None:
        self._capture = capture
        self._known: dict[Hashable, Bound | str] = {}

    @property
    def bound(self) -> list[Bound]:
        return [found for found in list(self._known.values()) if isinstance(found, Bound)]

    def find(self, tensors: Sequence[Tensor]) -> Bound | str | None:
        """The program for such tensors, or why there is none."""
        return self._known.get(_key(tensors))

    def run(self, tensors: Sequence[Tensor]) -> Sequence[Any] | None:
        if ENGINE.observers or not tensors or not can_repeat(*tensors):
            return None
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return None
        if len({tensor.data_ptr() for tensor in tensors}) < len(tensors):
            return None  # which of them a kernel reads could not be told
        key = _key(tensors)
        found = self._known.pop(key, None)
        held = found.held() if isinstance(found, Bound) else None  # during the call
        if isinstance(found, Bound) and held is None:
            found = SEEN
        if found is None or (isinstance(found, str) and found != SEEN):
            self._keep(key, found or SEEN)
            return None
        if found == SEEN:
            return self._bind(key, tensors)
        assert isinstance(found, Bound)
        try:
            results = found(tensors)
        except Stale:
            self._keep(key, "a step of torch's gives something else in every call")
            return None
        self._keep(key, found)
        return results

    def _keep(self, key: Hashable, found: Bound | str) -> None:
        self._known[key] = found
        while len(self._known) > MOST:
            self._known.pop(next(iter(self._known.copy())), None)

    def _bind(self, key: Hashable, tensors: Sequence[Tensor]) -> Sequence[Any]:
        """The call itself, recorded."""
        binder, results, program = self._bound(tensors)
        if program is not None:
            binder, results, program = self._with_places(tensors, binder, results, program)
            bound = Bound(program, binder)
            note("bound", bound.text)
            self._keep(key, bound)
        else:
            note("bound", lambda: f"no program: {binder.refused}")
            self._keep(key, SEEN if isinstance(binder.refused, NotNow) else str(binder.refused))
        return results


    def _bound(self, tensors: Sequence[Tensor],
               places: Places | None = None) -> tuple[Binder, Sequence[Any], Program | None]:
        capture = self._capture
        binder = Binder(capture.graph, capture.steps, capture.tensors, capture.module_of, places)
        return binder, *binder.run(tensors)

    def _with_places(self, tensors: Sequence[Tensor], binder: Binder, results: Sequence[Any],
                     program: Program) -> tuple[Binder, Sequence[Any], Program]:
        """The same with parts of concatenations in their places, unless that takes more memory.

        It runs the graph once more, so that nothing in it may be unknown.
        """
        capture, before = self._capture, (binder, results, program)
        found = slots(capture.graph, capture.module_of, binder.forms, binder.by_torch)
        note("placed", lambda: told(found, binder.forms))
        if not found or any(capture.module_of(node) is None for node in capture.graph.nodes
                            if node.op == "call_module"):
            return before
        binder, results, other = self._bound(tensors, Places(found, binder.forms))
        return before if other is None or other.bytes > MORE * program.bytes else (
            binder, results, other)


def _key(tensors: Sequence[Tensor]) -> Hashable:
    return (settings(), *map(form, tensors))


def _home(module: Any, name: str) -> dict[str, Any]:
    """The dictionary in which a module has a tensor: an attribute would be searched for."""
    homes: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    return next((home for home in homes if name in home), vars(module))

"""A model bound to sizes: kernels with their frames over one memory, run in one native call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..core import places
from ..kernels.cpu import memory
from ..kernels.cpu.emit.checks import CHECKS
from ..kernels.cpu.emit.guarding import Guard, judge_all
from ..kernels.cpu.emit.threads import FOUND, PARALLEL, Frame, parallel_address, uses_openmp
from ..kernels.cpu.emit.walk import walk
from . import arena
from .recording import (
    ARENA,
    CONSTANT,
    FRESH,
    INPUT,
    STEP,
    WRITTEN,
    Launch,
    Place,
    Recorder,
    Root,
    address_of,
)
from .weights import Together

WORDS = len(Frame())


class View(NamedTuple):
    """A tensor in a root's memory; `offset` counts its elements."""

    root: Root
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    is_own: bool  # whether it is the tensor that the root is, and no view of it
    wants: bool  # whether it says that it wants a gradient, as views of what wants one do

    @property
    def is_whole(self) -> bool:
        return self.is_own and (self.offset, self.shape, self.stride) == (
            0, self.root.shape, self.root.stride)


class Alias(NamedTuple):
    """A view of what a model holds, or an empty tensor: a new one in every call."""

    tensor: Tensor


Value: TypeAlias = View | Alias | Tensor  # the last is the same in every call


class Step(NamedTuple):
    """What torch runs between kernels: call(tensors), where it reads values and leaves new ones."""

    call: Callable[[list[Tensor]], Sequence[Tensor]]
    reads: tuple[Value, ...]
    makes: tuple[Root, ...]


class Stale(Exception):
    """A step of torch's gives something else than it did."""


class NotFinite(Exception):
    """A kernel saw a result that is not finite, which another might not have."""


class _Kernels:
    """`count` frames from the `first` on, and which of their words are addresses."""

    def __init__(self, first: int, launches: Sequence[Launch], numbers: dict[int, int],
                 places: dict[int, int]) -> None:
        self.first, self.count, self.launches = first, len(launches), launches
        found = [((first + i) * WORDS + place.word, numbers[place.root.number],
                  place.offset + places.get(place.root.number, 0))
                 for i, launch in enumerate(launches) for place in launch.places
                 if place.root.kind != CONSTANT]
        found += [((first + i) * WORDS + PARALLEL, 1, 0) for i in range(self.count)]
        at, base, offset = (np.array(column, dtype=np.int64) for column in zip(*found, strict=True))
        self.at, self.base, self.offset = at, base, offset


class Program:
    """program(inputs): the results as tensors, or None where it cannot be run here and now.

    Every call has frames and memory of its own, so that threads may share a program.
    """

    def __init__(self, recorder: Recorder, steps: Sequence[Launch | Step], inputs: Sequence[Root],
                 results: Sequence[Value], same: Sequence[int]) -> None:
        self._steps, self._inputs = steps, tuple(inputs)
        self._results, self._same = tuple(results), tuple(same)  # the first that a result is
        self._made = Together(list(recorder.made.values()))
        self._tables = recorder.tables
        launches = [step for step in steps if isinstance(step, Launch)]
        self._entries = [launch.entry for launch in launches]  # which keep their code
        self._addresses = np.array([address_of(entry) for entry in self._entries], dtype=np.int64)
        self._template = np.array([launch.words for launch in launches],
                                  dtype=np.int64).reshape(-1, WORDS)
        self._template[:, FOUND] = 0
        self._plan_memory(recorder.roots)
        self._parts = self._cut()

    @property
    def is_kernel(self) -> list[bool]:
        """Of each step, or whether it is torch's."""
        return [isinstance(step, Launch) for step in self._steps]

    @property
    def kernels(self) -> int:
        return len(self._entries)

    @property
    def steps_of_torch(self) -> int:
        return sum(isinstance(step, Step) for step in self._steps)

    @property
    def weight_bytes(self) -> int:
        """Of all that was made from weights, and is still there."""
        return self._made.bytes()

    def _plan_memory(self, roots: Sequence[Root]) -> None:
        """Numbers of addresses: the arena's, the function that starts threads, then the rest."""
        moving = [root for root in roots if root.kind == ARENA and root.first is not None]
        self._stays = [arena.Stay(root.bytes, root.first or 0, root.last) for root in moving]
        places, self.bytes = arena.placed(self._stays)
        self._places = {root.number: place for root, place in zip(moving, places, strict=True)}
        others = [root for root in roots if root.kind in (INPUT, FRESH, STEP)]
        self._numbers = {root.number: 0 for root in moving}
        self._numbers |= {root.number: i for i, root in enumerate(others, 2)}
        self._fresh = [root for root in others if root.kind == FRESH]
        self._count = 2 + len(others)

    def _cut(self) -> list[_Kernels | Step]:
        parts: list[_Kernels | Step] = []
        run: list[Launch] = []
        done = 0
        for step in (*self._steps, None):
            if isinstance(step, Launch):
                run.append(step)
                continue
            if run:
                parts.append(_Kernels(done, run, self._numbers, self._places))
                done, run = done + len(run), []
            if step is not None:
                parts.append(step)
        return parts

    def held(self, steady: bool = False) -> object:
        """What was made from tensors, to be held during a call; None if it stands for others."""
        return self._made.held(steady)

    def sources(self) -> list[Tensor]:
        """Tensors that it was made from."""
        return self._made.sources()

    def timed(self, inputs: Sequence[Tensor]) -> list[float]:
        """Seconds that each step takes in one call, with what it takes to start it alone."""
        call, times, kernels = _Call(self, inputs), list[float](), 0
        for step in self._steps:
            part: _Kernels | Step
            if isinstance(step, Launch):
                part = _Kernels(kernels, [step], self._numbers, self._places)
                kernels += 1
            else:
                part = step
            start = perf_counter()
            call.run(part)
            times.append(perf_counter() - start)
        return times

    @property
    def live(self) -> list[int]:
        """Bytes of the arena's values that are in use during each step."""
        return [sum(stay.bytes for stay in self._stays if stay.first <= i <= stay.last)
                for i in range(len(self._steps))]

    @property
    def places(self) -> list[str]:
        """What each step reads and writes, and where that lies in the arena."""
        return [" ".join(f"{'writes' if place.word in WRITTEN else 'reads'} {self._place(place)}"
                         for place in step.places if place.root.kind != CONSTANT)
                if isinstance(step, Launch) else "by torch" for step in self._steps]

    def _place(self, place: Place) -> str:
        root = place.root
        at = self._places.get(root.number)
        return f"{root.kind} {root.number}" if at is None else f"@{at + place.offset}"

    @property
    def moved(self) -> list[int]:
        """Bytes of the memories that each step reads or writes, constants included."""
        found = []
        for step in self._steps:
            roots = ([place.root for place in step.places] if isinstance(step, Launch) else
                     [*step.makes, *(v.root for v in step.reads if isinstance(v, View))])
            found.append(sum({root.number: root.bytes for root in roots}.values()))
        return found

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        if not uses_openmp():
            return None
        call = _Call(self, inputs)
        try:
            for part in self._parts:
                call.run(part)
        except NotFinite:
            return None
        found: list[Tensor] = []
        for i, (result, first) in enumerate(zip(self._results, self._same, strict=True)):
            found.append(call.tensor(result) if first == i else found[first])
        return found


class _Call:
    """One run of a program."""

    def __init__(self, program: Program, inputs: Sequence[Tensor]) -> None:
        self.program = program
        self.frames = program._template.copy()
        self._words = self.frames.reshape(-1)
        self.bases = np.empty(program._count, dtype=np.int64)
        self.memories: dict[int, Tensor] = {}
        self.arena = memory.empty(max(1, program.bytes // 4))
        self.bases[0], self.bases[1] = self.arena.data_ptr(), parallel_address()
        for root, x in zip(program._inputs, inputs, strict=True):
            self.has(root, x)
        for root in program._fresh:
            self.has(root, _fresh(root))

    def has(self, root: Root, tensor: Tensor) -> None:
        """A root's memory in this call."""
        self.memories[root.number] = tensor
        self.bases[self.program._numbers[root.number]] = tensor.data_ptr()

    def run(self, part: _Kernels | Step) -> None:
        if isinstance(part, _Kernels):
            self._words[part.at] = part.offset + self.bases[part.base]
            guards = self._guards(part) if places.CHECKED else []
            addresses = self.program._addresses
            walk(addresses.ctypes.data + 8 * part.first,
                 self.frames.ctypes.data + 8 * WORDS * part.first, part.count)
            judge_all(guards, [launch.entry.request for launch in part.launches[:len(guards)]])
            if self.frames[part.first:part.first + part.count, FOUND].any():
                raise NotFinite  # before a step of torch's has effects
            return
        made = part.call([self.tensor(view) for view in part.reads])
        for root, tensor in zip(part.makes, made, strict=True):
            if (tensor.shape, tensor.stride(), tensor.dtype) != (root.shape, root.stride,
                                                                 root.dtype):
                raise Stale
            self.has(root, tensor)

    def _guards(self, part: _Kernels) -> list[Guard]:
        """Tables for checked code, in the frames."""
        guards = [Guard({place.word: (self._start(place.root), place.root.bytes)
                         for place in launch.places}) for launch in part.launches]
        self.frames[part.first:part.first + part.count, CHECKS] = [g.address for g in guards]
        return guards

    def _start(self, root: Root) -> int:
        """Where a root's memory begins in this call."""
        if root.kind == CONSTANT:
            return root.start
        number = self.program._numbers[root.number]
        return int(self.bases[number]) + self.program._places.get(root.number, 0)

    def tensor(self, view: Value) -> Tensor:
        if isinstance(view, Tensor):
            return view
        if isinstance(view, Alias):
            return alias_of(view.tensor)
        root = view.root
        if root.kind == ARENA:
            place = self.program._places[root.number] // root.itemsize
            arena = self.arena if root.dtype == torch.float32 else self.arena.view(root.dtype)
            start = arena.storage_offset() + place
            return arena.as_strided(view.shape, view.stride, start + view.offset)
        whole = self.memories[root.number]
        if view.is_whole:
            return whole
        if whole.requires_grad and not view.wants:
            whole = whole.detach()
        return whole.as_strided(view.shape, view.stride, whole.storage_offset() + view.offset)


def alias_of(tensor: Tensor) -> Tensor:
    """Another tensor in the same memory."""
    return tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _fresh(root: Root) -> Tensor:
    """Memory that outlives the call."""
    if not root.pooled:
        return torch.empty_strided(root.shape, root.stride, dtype=root.dtype)
    flat = memory.empty(root.bytes // root.itemsize, dtype=root.dtype)
    return flat.as_strided(root.shape, root.stride, flat.storage_offset())

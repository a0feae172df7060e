"""What runs while a model is called once: launches, with every address traced to its memory."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from torch import Tensor

from ..kernels.cpu.emit.threads import BIAS, MASK, RESIDUAL, SCRATCH, WEIGHT, X, Y
from .executable import Ready
from .images import extent

READ, WRITTEN = (X, WEIGHT, BIAS, RESIDUAL), (Y, SCRATCH, MASK)
# where memory comes from in a later call
ARENA, INPUT, FRESH, STEP, CONSTANT = "arena", "input", "fresh", "step", "constant"


class Root:
    """A memory that values lie in; `tensor` keeps it alive while it is recorded."""

    def __init__(self, number: int, kind: str, tensor: Tensor, pooled: bool = True) -> None:
        self.number, self.kind, self.pooled = number, kind, pooled
        self.tensor: Tensor | None = tensor
        self.start, self.bytes = tensor.data_ptr(), extent(tensor)
        self.dtype, self.itemsize = tensor.dtype, tensor.element_size()
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.is_written = kind != ARENA
        self.first: int | None = None  # the steps between which it is used
        self.last = 0

    def has(self, address: int) -> bool:
        return self.start <= address < self.start + self.bytes

    def is_used(self, step: int) -> None:
        self.first = step if self.first is None else self.first
        self.last = step


class Place(NamedTuple):
    """A word of a frame that is an address."""

    word: int
    root: Root
    offset: int  # bytes


class Launch(NamedTuple):
    """Code that ran, with its frame."""

    entry: Any
    words: tuple[int, ...]
    places: tuple[Place, ...]


class Recorder:
    """A watcher that knows all memory a model may touch; `problem` says why a step is not its."""

    def __init__(self) -> None:
        self.roots: list[Root] = []
        self.made: dict[int, Any] = {}  # by identity
        self.tables: list[Tensor] = []
        self._constants: dict[int, Root] = {}  # by address
        self._live: list[Root] = []
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self.launches: list[Launch] = []
        self.problem: str | None = None
        self._before = len(self.roots)

    def add(self, kind: str, tensor: Tensor, pooled: bool = True) -> Root:
        root = Root(len(self.roots), kind, tensor, pooled)
        self.roots.append(root)
        if kind != CONSTANT:
            self._live.append(root)
        return root

    def find(self, address: int) -> Root | None:
        """The memory that an address lies in."""
        known = self._constants.get(address)
        if known is not None:
            return known
        for root in (*reversed(self._live), *self._constants.values()):
            if root.has(address):
                return root
        return None

    def drop_new(self) -> None:
        """Forget the memory that the step took: it is torch's."""
        self._live = [root for root in self._live if root.number < self._before]

    def is_ambiguous(self) -> bool:
        """Whether an address may have been one input's or another's, or a constant's."""
        given = [root for root in self.roots if root.kind == INPUT]
        fixed = [root for root in self.roots if root.kind == CONSTANT]
        return any(a.start < b.start + b.bytes and b.start < a.start + a.bytes
                   for i, a in enumerate(given) for b in (*given[:i], *fixed))

    def let_go(self) -> None:
        """Of all memory: what a program reads is kept alive by others."""
        for root in self.roots:
            root.tensor = None

    def release(self, alive: set[int]) -> None:
        """Let go of all memory but that with these numbers; constants stay."""
        for root in self._live:
            if root.number not in alive:
                root.tensor = None
        self._live = [root for root in self._live if root.number in alive]

    # as a watcher

    def launched(self, entry: Any, frame: Any) -> None:
        words = tuple(frame)
        places = []
        for word in (*READ, *WRITTEN):
            if words[word] == 0:
                continue
            root = self.find(words[word])
            if root is None:
                self.problem = f"word {word} of a frame is memory of torch's"
                return
            if word in READ and not root.is_written:
                self.problem = f"word {word} of a frame is read, and no kernel wrote it"
            places.append(Place(word, root, words[word] - root.start))
        for place in places:
            if place.word in WRITTEN:
                place.root.is_written = True
        self.launches.append(Launch(entry, words, tuple(places)))

    def took(self, tensor: Tensor, pooled: bool) -> None:
        if tensor.numel():
            self.add(ARENA, tensor, pooled)

    def relies_on(self, made: Any) -> None:
        self.made[id(made)] = made
        for tensor in _tensors(made.value):
            self.knows(tensor)

    def keeps(self, tensor: Tensor) -> None:
        self.tables.append(tensor)
        self.knows(tensor)

    def knows(self, tensor: Tensor) -> None:
        """A tensor whose address counts as a constant."""
        if tensor.numel() and tensor.data_ptr() not in self._constants:
            self._constants[tensor.data_ptr()] = self.add(CONSTANT, tensor)

    def loads(self, request: Any) -> None:
        """Code that is needed is there from then on."""

    def cannot_repeat(self, why: str) -> None:
        self.problem = why


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Ready):
        return _tensors(value.values)
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return [value] if isinstance(value, Tensor) else []


def address_of(entry: Any) -> int:
    return ctypes.cast(entry, ctypes.c_void_p).value or 0

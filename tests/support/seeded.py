"""Seeded faults that make kernels leave their memory, for a process with TILEWISE_CHECK=1.

A seed draws a call, one of its launches and what goes wrong there. Whether code then really leaves
its memory is told by unmapped pages around every operand, without checks; whether checks find it,
by a second run. Each run is a copy of the process.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import tilewise
from tilewise.bench import selftest
from tilewise.bench.guarded import PAGE, Buffer, Region
from tilewise.bench.judged import Mismatch
from tilewise.core import Problem, Target
from tilewise.core.errors import OutOfBounds
from tilewise.core.places import Place
from tilewise.kernels.cpu.emit import Pointer, launch, requests
from tilewise.kernels.cpu.emit.guarding import NAMES
from tilewise.kernels.cpu.emit.threads import BATCH, SIZES
from tilewise.planner.planner import inner_problem
from tilewise.runtime import concatenation, norms, pointwise, pools, resampling, softmax

from . import faults

KINDS = ("offset", "mask", "word", "extent")
ACCESSES = ("load", "store", "broadcast", "gather", "load_bits", "store_bits", "load_where")
LIMIT = 60  # seconds of a run
HARMS = ("SIGSEGV", "SIGBUS")


def _convolution(name: str, problem: str, **tunables: int) -> Callable[[], object]:
    def call() -> object:
        t, p = Target.host(threads=2), Problem.parse(problem)
        a = next(a for a in selftest.ALGORITHMS if a.name == name)
        s = a.default(inner_problem(a, p), t).with_(**tunables)
        return selftest._check(a, p, t, s, 0)
    return call


def _images(n: int, c: int, h: int, w: int) -> torch.Tensor:
    return torch.ones(n, h, w, c).permute(0, 3, 1, 2)


def _bytes() -> Any:
    return np.arange(37 * 41, dtype=np.uint8).reshape(37, 41)


CALLS: dict[str, Callable[[], object]] = {
    "cpu_direct, padded": _convolution(
        "cpu_direct", "n2c5h9w19k21r3s3p1_f32_forward+bias+residual+relu"),
    "cpu_direct, strided": _convolution("cpu_direct", "n2c33h17w19k37r3s3u2p1_f32_forward+bias"),
    "cpu_pointwise": _convolution("cpu_pointwise", "n2c24h9w9k40r1s1_f32_forward+bias"),
    "cpu_pixels": _convolution("cpu_pixels", "n2c3h9w34k21r3s3_f32_forward+bias"),
    "cpu_winograd": _convolution("cpu_winograd", "n2c5h9w19k21r3s3p1_f32_forward+bias+relu"),
    "cpu_depthwise": _convolution("cpu_depthwise", "n2c21h9w19k21r3s3p1g21_f32_forward+bias"),
    "gradient of the input": _convolution("cpu_direct", "n2c5h9w19k21r3s3p1_f32_backward_data"),
    "cpu_direct_weight": _convolution(
        "cpu_direct_weight", "n2c5h9w19k21r3s3p1_f32_backward_weight"),
    "cpu_winograd_weight": _convolution(
        "cpu_winograd_weight", "n2c5h9w19k21r3s3p1_f32_backward_weight"),
    "cpu_depthwise_weight": _convolution(
        "cpu_depthwise_weight", "n2c21h9w19k21r3s3p1g21_f32_backward_weight"),
    "max-pooling": lambda: pools.max_pool2d(_images(2, 21, 9, 19), 3, 2, 1),
    "resampling": lambda: resampling.upsample(_images(1, 21, 9, 7), scale_factor=2.0,
                                              mode="bilinear"),
    "layer norm": lambda: norms.layer_norm(torch.ones(9, 37), 37, torch.ones(37), torch.ones(37)),
    "group norm": lambda: norms.group_norm(_images(2, 24, 5, 7), 4, torch.ones(24)),
    "softmax": lambda: softmax.softmax(torch.ones(9, 37), 1),
    "elementwise": lambda: pointwise.pointwise(
        (("mul", 0, 1), ("relu", 2)), [_images(2, 21, 5, 7), torch.ones(1, 21, 1, 1)]),
    "concatenation": lambda: concatenation.concatenated(
        [_images(2, 21, 5, 7), _images(2, 18, 5, 7)]),
    "filter2d": lambda: tilewise.filter2d(_bytes(), np.ones((3, 5)) / 15),
    "median": lambda: tilewise.image.median(_bytes(), 5),
    "gaussian": lambda: tilewise.image.gaussian(_bytes().astype(np.float32), 1.5),
    "minimum": lambda: tilewise.image.minimum(_bytes(), 9),
}


class Fault(NamedTuple):
    """What a seed draws: a call, its launch, and random numbers for what goes wrong in it."""

    seed: int

    @property
    def call(self) -> str:
        return list(CALLS)[self.seed % len(CALLS)]

    @property
    def kind(self) -> str:
        return KINDS[self.seed // len(CALLS) % len(KINDS)]

    @property
    def rng(self) -> random.Random:
        return random.Random(self.seed)


class Seen(NamedTuple):
    """A launch of a call without faults: its kernel, accesses, words that count, memories."""

    key: str
    accesses: int
    masked: int
    words: list[int]
    memories: list[int]


@lru_cache(maxsize=len(CALLS))
def launches(call: str) -> list[Seen]:
    """In their order, as a copy of this process sees them: this one compiles nothing."""
    def tell(_: Any) -> None:
        raise Mismatch(json.dumps(_launches(call)))

    said = faults._in_fork(tell, None)[-1]
    assert said.startswith("noticed: "), said
    return [Seen(*one) for one in json.loads(said.removeprefix("noticed: "))]


def _launches(call: str) -> list[Seen]:
    found: list[Seen] = []

    def note(request: Any, run: Any, frame: Any, given: dict[int, int]) -> None:
        counts = _Counting()
        with pytest.MonkeyPatch.context() as patch:
            counts.apply(patch)
            request.module()
        words = [BATCH, *(i for i in range(SIZES, len(frame)) if frame[i])]
        memories = [word for word, at in given.items() if getattr(at, "bytes", 0)]
        found.append(Seen(request.key, counts.all, counts.masked, words, memories))
        run()

    with faults.patched(_unchecked(note)):
        CALLS[call]()
    return found


class _Counting:
    """Counts the accesses that a generator writes; one of them may go wrong."""

    def __init__(self, kind: str = "", number: int = -1, by: int = 0) -> None:
        self.kind, self.number, self.by = kind, number, by
        self.all = self.masked = 0

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        for name in ACCESSES:
            patch.setattr(Pointer, name, self._wrapped(getattr(Pointer, name)))

    def _wrapped(self, original: Any) -> Any:
        def access(at: Pointer, *args: Any, **options: Any) -> Any:
            masked = options.get("count") is not None
            if self.kind == "offset" and self.all == self.number:
                at = at + self.by
            if self.kind == "mask" and masked and self.masked == self.number:
                options["count"] = None
            self.all += 1
            self.masked += masked
            return original(at, *args, **options)
        return access


class Wrong(NamedTuple):
    """A fault in a launch: what is said of it, its generator's fault, and its frame's."""

    text: str
    launch: int
    key: str  # of its kernel
    counting: tuple[str, int, int] | None = None
    word: tuple[int, int] | None = None  # added to it
    extent: tuple[int, int] | None = None  # bytes that a memory has less


def drawn(fault: Fault) -> Wrong | None:
    """None where the launch has nothing of that kind."""
    rng, seen = fault.rng, launches(fault.call)
    number = rng.randrange(len(seen))
    one, where = seen[number], f"{fault.call}, launch {number}"
    if fault.kind == "offset":
        which, by = rng.randrange(one.accesses), rng.choice((-4096, -64, -16, -1, 1, 16, 64, 4096))
        return Wrong(f"{where}: access {which} is {by} elements off", number, one.key,
                     ("offset", which, by))
    if fault.kind == "mask":
        if not one.masked:
            return None
        which = rng.randrange(one.masked)
        return Wrong(f"{where}: masked access {which} is not masked", number, one.key,
                     ("mask", which, 0))
    if fault.kind == "word":
        word, by = rng.choice(one.words), rng.choice((-1, 1, 1, 2, 16))
        return Wrong(f"{where}: word {word} of the frame is {by:+d}", number, one.key,
                     word=(word, by))
    word, by = rng.choice(one.memories), rng.choice((1, 4, 64))
    return Wrong(f"{where}: {NAMES[word]} has {by} bytes less", number, one.key,
                 extent=(word, by))


# running a fault


def _unchecked(hook: Any) -> faults.Patch:
    """Code without checks, and a hook that runs it."""
    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(requests, "checking", lambda on: nullcontext())
        patch.setattr(launch, "run_guarded", hook)
    return apply


def ran(fault: Fault, wrong: Wrong | None, checked: bool) -> str:
    """What a call with a fault ended with: "passed", a signal, or what was found."""
    said = faults._in_fork(lambda _: _run(fault, wrong, checked), None)
    return said[-1] if said else "nothing"


def _run(fault: Fault, wrong: Wrong | None, checked: bool) -> None:
    signal.alarm(LIMIT)
    try:
        with faults.patched(_applied(wrong, checked)):
            CALLS[fault.call]()
    except OutOfBounds as found:
        raise Mismatch(f"out of bounds: {found}") from None
    except Mismatch as mismatch:
        if str(mismatch).startswith("wrote beside"):
            raise
    # a wrong result is not what is asked for here


def _applied(wrong: Wrong | None, checked: bool) -> faults.Patch:
    count = itertools.count()
    judge, module = launch.run_guarded, requests.Request.module

    def hook(request: Any, run: Any, frame: Any, given: dict[int, int]) -> None:
        if next(count) == (wrong.launch if wrong else -1):
            assert wrong is not None
            given = _spoil(wrong, frame, given)
        (judge if checked else _between_pages)(request, run, frame, given)

    def apply(patch: pytest.MonkeyPatch) -> None:
        if checked:
            patch.setattr(launch, "run_guarded", hook)
        else:
            _unchecked(hook)(patch)
        if wrong and wrong.counting:
            patch.setattr(requests.Request, "module", _spoilt(module, wrong))
    return apply


def _spoilt(module: Any, wrong: Wrong) -> Any:
    """The generator of one launch's code goes wrong."""
    def write(request: Any) -> Any:
        if request.key != wrong.key:
            return module(request)
        with pytest.MonkeyPatch.context() as patch:
            _Counting(*(wrong.counting or ())).apply(patch)
            return module(request)
    return write


def _spoil(wrong: Wrong, frame: Any, given: dict[int, int]) -> dict[int, int]:
    if wrong.word:
        word, by = wrong.word
        frame[word] += by
    if wrong.extent:
        word, by = wrong.extent
        at: Any = given[word]
        return {**given, word: Place.of(int(at), at.start, max(0, at.bytes - by))}
    return given


def _between_pages(request: Any, run: Any, frame: Any, given: dict[int, int]) -> None:
    """Every operand at the end of pages that are followed by one that is not there, then at the
    start of such."""
    kept = list(frame)
    for side in ("end", "start"):
        frame[:] = kept
        buffers: dict[tuple[int, int], Buffer] = {}
        for word, at in given.items():
            size = getattr(at, "bytes", 0)
            if not size:
                continue
            memory = (at.start, size)
            if memory not in buffers:
                buffers[memory] = Buffer(Region(-(-size // PAGE)), size, side, torch.uint8)
                ctypes.memmove(buffers[memory].address, at.start, size)
            frame[word] = buffers[memory].address + (int(at) - at.start)
        run()
        for (start, size), buffer in buffers.items():
            if not buffer.around_untouched():
                raise Mismatch("wrote beside its memory")
            ctypes.memmove(start, buffer.address, size)


def is_real(said: str) -> bool:
    """Whether code left its memory."""
    return said in HARMS or said.startswith("noticed: wrote beside")


def is_found(said: str) -> bool:
    return said.startswith("noticed: out of bounds")


def prove(seed: int) -> dict[str, Any]:
    """What became of a seed; `found` is None where the fault is not real."""
    fault = Fault(seed)
    wrong = drawn(fault)
    row: dict[str, Any] = {"seed": seed, "kind": fault.kind, "call": fault.call}
    if wrong is None:
        return {**row, "fault": "none of this kind", "without": "", "found": None}
    without = ran(fault, wrong, checked=False)
    row |= {"fault": wrong.text, "without": without}
    if not is_real(without):
        return {**row, "found": None}
    said = ran(fault, wrong, checked=True)
    return {**row, "found": is_found(said), "said": said}


if os.environ.get("TILEWISE_CHECK", "0") in ("", "0"):
    raise ImportError("TILEWISE_CHECK is not set, needs 1 before tilewise is imported")

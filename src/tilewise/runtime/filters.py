"""Filters made ready to run: plans with their code, tables of borders, packed kernels."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..core import places
from ..core.algorithm import Algorithm
from ..core.borders import CONSTANT, sources
from ..core.filter import ELEMENTS, Filter
from ..core.lowrank import rank_of
from ..core.lru import Lru
from ..core.places import placed
from ..core.plan import Plan
from ..core.schedule import Schedule
from ..core.target import Target
from ..kernels.cpu import memory
from ..kernels.cpu.emit.tiling import ceil_div
from ..kernels.cpu.image import common as words
from .engine import Engine
from .spare import SPARE

DTYPES: dict[str, Any] = {
    "u8": np.dtype(np.uint8), "u16": np.dtype(np.uint16), "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}
LOOK_FOR_RANK = 4  # rows and columns
ALONE = 1 << 14  # values of an output that one thread makes
CALL_BYTES = 64 << 20  # of prepared kernels that are kept
WORDS = 18  # that a table begins with
OVERHEAD = 4096  # bytes of a call beside its kernel, generously
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class View:
    """How (N, H, W, C) images lie in memory, in bytes."""

    strides: tuple[int, ...]
    planes: int = 1  # channels that lie apart, each a plane of its own


class FilterExecutable:
    """Ready to run: executable(image, out, prepared kernel, value) with (N, H, W, C) arrays."""

    def __init__(self, plan: Plan, algorithm: Algorithm, x: View, y: View) -> None:
        self.plan, self.algorithm = plan, algorithm
        built = algorithm.build(plan.inner, plan.target, plan.schedule)
        self.at: Callable[[int, int, int, int], None] | None = None
        if algorithm.takes == "tensors":
            self.run: Callable[..., None] = built
        else:
            self.at = at = self._with_addresses(built, x, y)
            self.run = lambda image, out, kernel, value: at(
                address(image), address(out), address(kernel), bits_of(value))

    def _with_addresses(self, launch: Callable[..., None], x: View,
                        y: View) -> Callable[[int, int, int, int], None]:
        generated: Any = self.algorithm
        p, t, s = _parts(self.plan)
        table = Table(p, generated.geometry(p, t, s), t, x, y)
        floats = ceil_div(generated.workspace(p, t, s), 4)
        # a region of one thread starts no other, which takes longer than a small image
        threads = min(t.threads, p.n * table.tasks) if p.pixels > ALONE else 1

        def at(image: int, out: int, kernel: int, bits: int) -> None:
            scratch = SPARE.take(floats)
            launch(image, kernel, table.address, bits, out, scratch[0], p.n, threads)
            SPARE.give(floats, scratch)

        return at

    def prepare(self, kernel: Any) -> Any:
        """The kernel as the code wants it."""
        plan = self.plan
        return self.algorithm.prepare(plan.inner, plan.target, plan.schedule, kernel)

    def __call__(self, image: Any, out: Any, kernel: Any, value: float) -> None:
        self.run(image, out, kernel, value)


@dataclass(frozen=True)
class FilterCall:
    """What calls with the same arguments share; without `run`, there is nothing to compute."""

    dtype: Any
    run: FilterExecutable | None = None
    kernel: Any = None  # prepared
    through_another: bool = False  # the output cannot be written by kernels

    @cached_property
    def weight(self) -> int:
        """Where the prepared kernel begins."""
        return address(self.kernel)

    @property
    def bytes(self) -> int:
        return OVERHEAD + getattr(self.kernel, "nbytes", 0)


class Step(NamedTuple):
    """A call that was made before, and where its arrays begin, in bytes after the given ones."""

    call: FilterCall
    x: int
    y: int
    bits: int  # of the border's constant


Passes = tuple[tuple[Step, ...], ...]  # the steps of each


def _parts(plan: Plan) -> tuple[Any, Target, Schedule]:
    return plan.inner, plan.target, plan.schedule


class Table:
    """The words that a kernel reads: sizes, strides, and where what lies beyond an edge comes from.

    Byte offsets of rows and of the elements left and right of a row, NOWHERE for the constant.
    """

    def __init__(self, p: Filter, g: Any, t: Target, x: View, y: View) -> None:
        rows = _offsets(sources(p.h, p.anchor[0], p.r - 1 - p.anchor[0], p.border), x.strides[1])
        left, right = p.anchor[1], p.s - 1 - p.anchor[1]
        columns = sources(p.w, left, right, p.border)
        outside = np.concatenate([columns[:left], columns[left + p.w:]])
        across = _offsets(outside, x.strides[2])[:, None]
        channels = np.arange(p.c) * x.strides[3]
        edges = np.where(across == words.NOWHERE, across, across + channels).ravel()
        band = g.band(p.h, t.l2, t.threads)
        row = p.w * p.c
        strip = _strip(row, g.s.strip, words.LINE // ELEMENTS[p.out])
        self.tasks = ceil_div(p.h, band) * ceil_div(row, strip)  # of a plane
        # one memory: addresses in it point into it
        self.words = np.concatenate([np.zeros(WORDS, np.int64), rows, edges])
        self.address = address(self.words)
        for name, value in {
                words.HEIGHT: p.h, words.ROW: row, words.PLANES: x.planes,
                words.X_IMAGE: x.strides[0], words.X_PLANE: x.strides[3],
                words.X_COLUMN: x.strides[2], words.X_CHANNEL: x.strides[3],
                words.Y_IMAGE: y.strides[0], words.Y_PLANE: y.strides[3],
                words.Y_ROW: y.strides[1], words.BAND: band, words.BANDS: ceil_div(p.h, band),
                words.STRIP: strip, words.STRIPS: ceil_div(row, strip),
                words.LEFT: left * p.c, words.ROWS: self.address + 8 * WORDS,
                words.EDGES: self.address + 8 * (WORDS + len(rows)),
                words.WORKER_BYTES: g.worker_bytes(band)}.items():
            self.words[name] = value


def _offsets(indices: Any, stride: int) -> Any:
    return np.where(indices == CONSTANT, words.NOWHERE, indices * stride)


def _strip(row: int, most: int, line: int) -> int:
    """Parts of a row: equal, at most `most` elements, of whole cache lines of output."""
    parts = ceil_div(row, most)
    return ceil_div(ceil_div(row, parts), line) * line


def address(array: Any) -> int:
    first = int(array.ctypes.data)
    if places.CHECKED:
        return placed(first, array.shape, array.strides, array.itemsize)
    return first


def bits_of(value: float) -> int:
    """A double as an integer word."""
    return int(struct.unpack("q", struct.pack("d", value))[0])


def token(kernel: Any) -> bytes:
    """What stands for a kernel's values in keys; caches do not keep large ones."""
    values: bytes = kernel.tobytes()
    return values if len(values) <= OVERHEAD else hashlib.blake2b(values, digest_size=32).digest()


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """An uninitialised array; large ones from the pool, which spares their page faults."""
    size = int(np.prod(shape)) * dtype.itemsize
    if size < memory.SMALL:
        return np.empty(shape, dtype)
    floats = memory.empty(ceil_div(size, 4)).numpy()
    return floats.view(np.uint8)[:size].view(dtype).reshape(shape)


class FilterEngine(Engine):
    """Plans filters and keeps what was built."""

    def __init__(self, algorithms: Sequence[Algorithm], limit: int = 256) -> None:
        super().__init__(algorithms, limit)
        self.ready: Lru[FilterExecutable] = Lru(limit)
        self.calls: Lru[FilterCall] = Lru(CALL_BYTES, weigh=lambda call: call.bytes)
        # by passes over arrays of any shape; none where each must look again
        self.steps: Lru[Passes] = Lru(CALL_BYTES, weigh=lambda passes: OVERHEAD + sum(
            step.call.bytes for steps in passes for step in steps))
        self._ranks: Lru[int] = Lru(limit)

    def plan_filter(self, p: Any, t: Target, algorithm: str | None = None) -> Plan:
        """The best plan; no filter errs by more than rounding, so none is left out for it."""
        return self.plan(p, t, algorithm=algorithm, max_error=1.0)

    def build_for(self, plan: Plan, x: View, y: View) -> FilterExecutable:
        return FilterExecutable(plan, self.planner.algorithm(plan.algorithm), x, y)

    def start(self, plan: Plan) -> Callable[[], object]:
        """The plan on random images, ready to be timed."""
        p, rng = _parts(plan)[0], np.random.default_rng(0)
        x = (255 * rng.random((p.n, p.h, p.w, p.c))).astype(DTYPES[p.dtype])
        y = empty(x.shape, DTYPES[p.out])
        run = self.build_for(plan, View(x.strides), View(y.strides))
        terms = rng.random((p.r, p.rank or p.r)) @ rng.random((p.rank or p.r, p.s))
        kernel = run.prepare(terms / terms.sum())
        return lambda: run(x, y, kernel, 0.0)

    def rank(self, kernel: Any, work: str) -> int:
        """The rank of a kernel's values; 0 for those too small to gain by it."""
        if min(kernel.shape) < LOOK_FOR_RANK:
            return 0
        key = (work, kernel.shape, token(kernel))
        return self._ranks.get(key) or self._ranks.put(key, rank_of(kernel, work))

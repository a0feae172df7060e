"""Random filters between unmapped pages, judged by the definition in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.borders import BORDERS, CONSTANT, SYNONYMS, meaning, sources
from ..image import arrays
from ..image.filter2d import filter2d
from ..runtime import filters
from ..runtime.spare import SPARE
from .guarded import PAGE, Region, swapped
from .judged import Mismatch

TYPES = ("uint8", "uint16", "int16", "int32", "float32", "float64")
SIZES = ((1, 1), (1, 5), (2, 2), (3, 3), (3, 3), (4, 3), (5, 5), (5, 5), (7, 7), (6, 9), (9, 2),
         (11, 13), (20, 17))
FILL = 0xFF  # all bits set is a NaN in both float types
LAYOUTS = ("plain", "plain", "rows back", "columns back", "every other", "planes", "turned")


@dataclass(frozen=True)
class Case:
    """One call of filter2d."""

    image: Any
    kernel: Any
    border: str
    value: float | None
    anchor: tuple[int, int] | None
    flip: bool
    dtype: str
    text: str


class Format(NamedTuple):
    """What code is compiled for."""

    kind: str
    dtype: str
    channels: int
    size: tuple[int, int]
    rank: int


def random_format(rng: random.Random, sizes: Any = SIZES) -> Format:
    kind = rng.choice(TYPES)
    return Format(kind, kind if rng.random() < 0.7 else rng.choice(TYPES),
                  rng.choice((1, 1, 3, 4)), rng.choice(sizes), rng.choice((0, 0, 1, 2)))


def random_case(rng: random.Random, format: Format, largest: int = 300) -> Case:
    """Any image of a format, any border and anchor."""
    data, (kind, dtype, c, (r, s), rank) = np.random.default_rng(rng.randrange(1 << 32)), format
    h, w = (rng.choice((rng.randint(1, 9), rng.randint(1, 40), rng.randint(1, 70),
                        rng.randint(1, largest) if rng.random() < 0.3 else 33))
            for _ in range(2))
    shape = rng.choice(((h, w), (h, w, c), (rng.randint(1, 3), h, w, c)))
    layout, integers = rng.choice(LAYOUTS), rng.random() < 0.4
    image = laid_out(shape, kind, layout, data)
    kernel = random_kernel(data, r, s, integers, rank)
    anchor = None if rng.random() < 0.5 else (rng.randrange(r), rng.randrange(s))
    border = rng.choice((*BORDERS, *SYNONYMS))
    value = rng.choice((0.0, 1.0, -2.5, 40.0)) if border == "constant" else None
    flip = rng.random() < 0.3
    return Case(image, kernel, border, value, anchor, flip, dtype,
                f"{kind} {shape} {layout}, {r}x{s} at {anchor}, {border} {value}, flip={flip}, "
                f"to {dtype}")


def random_kernel(data: Any, r: int, s: int, integers: bool, rank: int) -> Any:
    def draw(*shape: int) -> Any:
        return (data.integers(-3, 4, shape).astype(float) if integers
                else data.standard_normal(shape) / np.sqrt(r * s))

    return draw(r, rank) @ draw(rank, s) if rank else draw(r, s)


def random_pixels(shape: tuple[int, ...], kind: str, data: Any) -> Any:
    if kind.startswith("float"):
        return data.standard_normal(shape).astype(kind)
    bounds = np.iinfo(kind)
    return data.integers(bounds.min, bounds.max, shape, kind, endpoint=True)


def laid_out(shape: tuple[int, ...], kind: str, layout: str, data: Any) -> Any:
    """Random pixels as a view: both ends of its memory touch an unmapped page in turn."""
    rows, columns = (1, 2) if len(shape) == 4 else (0, 1)
    stored = list(shape)
    if layout == "every other":
        stored[columns] = 2 * stored[columns] - 1
    axes = tuple(range(len(shape)))
    if layout == "planes" and len(shape) > 2:
        axes = (*axes[:-3], axes[-1], axes[-3], axes[-2])
    if layout == "turned":
        axes = tuple({rows: columns, columns: rows}.get(a, a) for a in axes)
    memory = guarded(tuple(stored[a] for a in axes), kind, data.choice(("start", "end")))
    view = memory.transpose(np.argsort(axes))
    if layout == "rows back":
        view = np.flip(view, rows)
    if layout == "columns back":
        view = np.flip(view, columns)
    if layout == "every other":
        view = view[(slice(None),) * columns + (slice(None, None, 2),)]
    view[...] = random_pixels(shape, kind, data)
    return view


REGIONS: dict[int, list[Region]] = {}
MAPPED: list[tuple[int, Region]] = []  # handed out since the last `released`


def guarded(shape: tuple[int, ...], kind: str, side: str) -> Any:
    """An array of which one end touches an unmapped page; all around it is FILL."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    pages = max(1, -(-size // PAGE))
    spare = REGIONS.setdefault(pages, [])
    region = spare.pop() if spare else Region(pages)
    MAPPED.append((pages, region))
    content = np.frombuffer(region.memory, np.uint8, pages * PAGE, PAGE)
    content[:] = FILL
    start = pages * PAGE - size if side == "end" else 0
    return content[start:start + size].view(kind).reshape(shape)


@contextmanager
def released() -> Iterator[None]:
    """Regions handed out inside are used again afterwards."""
    try:
        yield
    finally:
        for pages, region in MAPPED:
            REGIONS[pages].append(region)
        MAPPED.clear()


def untouched(out: Any) -> bool:
    """Whether the rest of the output's region is as it was."""
    for pages, region in MAPPED:
        content = np.frombuffer(region.memory, np.uint8, pages * PAGE, PAGE)
        start = out.__array_interface__["data"][0] - content.__array_interface__["data"][0]
        if 0 <= start < content.size:
            return bool((content[:start] == FILL).all()
                        and (content[start + out.nbytes:] == FILL).all())
    raise LookupError("not a guarded array")


def definition(case: Case, image: Any = None, kernel: Any = None) -> Any:
    """The result before rounding, in float64, tap by tap."""
    x = arrays.as_batch((case.image if image is None else image).astype(np.float64))
    kernel = case.kernel if kernel is None else kernel
    kernel, (row, column) = arrays.oriented(kernel, case.anchor, case.flip)
    r, s = kernel.shape
    _, h, w, _ = x.shape
    border, constant = meaning(case.border, case.value)
    rows = sources(h, row, r - 1 - row, border)
    columns = sources(w, column, s - 1 - column, border)
    wide = x[:, rows][:, :, columns]
    wide[:, rows == CONSTANT] = constant
    wide[:, :, columns == CONSTANT] = constant
    total = np.zeros(x.shape)
    for i in range(r):
        for j in range(s):
            total += kernel[i, j] * wide[:, i:i + h, j:j + w]
    return total.reshape(case.image.shape)


def spread(case: Case) -> float:
    """The size of an output whose terms do not cancel: the largest root of squares."""
    squares = Case(case.image.astype(np.float64) ** 2, case.kernel ** 2, case.border,
                   case.value and case.value ** 2, case.anchor, case.flip, case.dtype, case.text)
    return float(np.sqrt(definition(squares).max(initial=0.0)))


def judge(case: Case, found: Any, expected: Any, error: float) -> float:
    """Floats are off by no more than `error` allows, integers by no more than that rounded.

    The share of what is allowed that the worst takes; of integers none is told.
    """
    slack = 32 * error * spread(case) + 1e-30
    if found.dtype != case.dtype or found.shape != case.image.shape:
        raise Mismatch(f"{case.text}: result is {found.dtype} {found.shape}")
    if found.dtype.kind == "f":
        slack = slack + abs(expected) * 2.0 ** -23 * (found.dtype == np.float32)
        wrong = ~(abs(found - expected) <= slack)  # also where it is NaN
        share = float((abs(found - expected) / slack).max(initial=0.0))
    else:
        bounds = np.iinfo(found.dtype)
        low, high = (np.clip(np.rint(expected + d), bounds.min, bounds.max)
                     for d in (-slack, slack))
        wrong, share = ~((low <= found) & (found <= high)), 0.0
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        raise Mismatch(f"{case.text}: {int(wrong.sum())} of {wrong.size} differ, first at {at}: "
                       f"{found[at]} for {expected[at]}")
    return share


@contextmanager
def guarded_scratch() -> Iterator[None]:
    """Scratch is full of NaN before it is used, and ends at an unmapped page."""
    def empty(floats: int) -> torch.Tensor:
        return torch.from_numpy(guarded((floats,), "float32", "end"))

    with swapped(filters.memory, "empty", empty), swapped(SPARE, "give", lambda *_: None):
        SPARE.clear()
        yield


def check(case: Case, algorithm: str | None = None, side: str = "end") -> str:
    """Run a case in guarded memory; returns the algorithm that ran."""
    return checked(case, algorithm, side)[0]


def checked(case: Case, algorithm: str | None = None, side: str = "end") -> tuple[str, float]:
    """The same, and the share of its bound that the error takes."""
    out = guarded(case.image.shape, case.dtype, side)
    plans: list[Any] = []
    run = filters.FilterExecutable.__call__

    def noted(self: Any, *operands: Any) -> None:
        plans.append(self.plan)
        run(self, *operands)

    before = case.image.copy()
    with guarded_scratch(), swapped(filters.FilterExecutable, "__call__", noted):
        filter2d(case.image, case.kernel, border=case.border, value=case.value,
                          anchor=case.anchor, flip=case.flip, out=out, algorithm=algorithm)
    if not np.array_equal(before, case.image, equal_nan=case.image.dtype.kind == "f"):
        raise Mismatch(f"{case.text}: the image was written to")
    if not untouched(out):
        raise Mismatch(f"{case.text}: wrote beside the output")
    return str(plans[0].algorithm), judge(case, out, definition(case), plans[0].error)

"""Softmax over planes: pixels lie side by side, and so do their results in the lanes."""

from __future__ import annotations

from typing import Any

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..emit import Function, Index, Module, Pointer
from ..emit.sizes import InCode
from ..emit.threads import X, Y, emit_entry, emit_region
from .elementary import exp
from .softmax import KINDS, largest

SIZES = ("planes", "pixels", "beside", "parts", "tasks")
TOGETHER = 2  # vectors of pixels at once, which hide each other's latency
WORTH = 1 << 12  # floats that are worth a task


def sizes(images: int, beside: int, planes: int, pixels: int, lanes: int) -> list[int]:
    """The words that the kernel reads from its frame; a task is some pixels of an image.

    It has whole vectors: one that is moved back must not lie in another's pixels.
    """
    step = TOGETHER * lanes
    parts = max(1, pixels // max(step, WORTH // planes))
    return [planes, pixels, beside, parts, images * parts]


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """x (images, planes, pixels) to y (images / beside, planes, beside, pixels).

    There are at least as many pixels as `TOGETHER` vectors have.
    """
    m, step = Module(isa), TOGETHER * isa.lanes
    with m.function("pixels", **KINDS) as f:
        z: Any = InCode(f, None, SIZES)
        planes, pixels, beside = z.planes, z.pixels, z.beside
        image, part = f.task // z.parts, f.task % z.parts
        first, last = part * pixels // z.parts, (part + 1) * pixels // z.parts
        x = f.frame.load_pointer(X) + image * (planes * pixels)
        y = f.frame.load_pointer(Y) + (image // beside * planes * beside + image % beside) * pixels
        with f.loop(last, start=first, step=step) as pixel:
            at = pixel.i.minimum(last - step)
            _softmax(f, x + at, y + at, planes, (pixels, pixels * beside))
    emit_entry(m, [emit_region(m, "all", lambda f, frame: InCode(f, None, SIZES).tasks, f)])
    return m


def _softmax(f: Function, x: Pointer, y: Pointer, planes: Index,
             apart: tuple[Index, Index]) -> None:
    """Powers are left in y, and multiplied there; planes of each lie so many floats apart."""
    own, other = apart
    places = [i * f.isa.lanes for i in range(TOGETHER)]
    lowest, zero, one = (f.vector(value) for value in (float("-inf"), 0.0, 1.0))
    with f.loop(planes, carry=[lowest] * TOGETHER) as plane:
        row = x + plane.i * own
        plane.values = [largest(top, row.load(at))
                        for top, at in zip(plane.values, places, strict=True)]
    tops = plane.values
    with f.loop(planes, carry=[zero] * TOGETHER) as plane:
        row, to = x + plane.i * own, y + plane.i * other
        powers = [exp(f, row.load(at) - top) for top, at in zip(tops, places, strict=True)]
        for power, at in zip(powers, places, strict=True):
            to.store(power, at)
        plane.values = [total + power for total, power in zip(plane.values, powers, strict=True)]
    shares = [one / total for total in plane.values]
    with f.loop(planes) as plane:
        to = y + plane.i * other
        for share, at in zip(shares, places, strict=True):
            to.store(to.load(at) * share, at)

"""Sweeps over channels-last images whose kernels read a table, made once for each size.

Images may be slices of the channels of larger ones: then pixels lie further apart than they have
channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.isa import KNOWN
from ..core.places import address
from ..core.problem import Problem
from ..core.remembered import Remembered
from ..core.watching import watcher
from ..kernels.cpu import memory
from ..kernels.cpu.emit.elements import FLOAT32
from ..kernels.cpu.emit.launch import Launch
from .images import pitch_of

ALONE = 1 << 18  # floats that one thread is done with before another has begun
ANY = Problem(1, 1, 1, 1, 1, 1, 1)  # code depends on nothing of a problem


class Images(NamedTuple):
    """Sizes, floats from a pixel to the next of what is read and of what is written, threads."""

    n: int
    c: int
    h: int
    w: int
    pitch: int
    to: int
    threads: int


class Sweep(NamedTuple):
    """A kernel for images of one size."""

    shape: tuple[int, ...]
    threads: int
    run: Callable[[Tensor, Tensor | None], Tensor]


def sweep(launch: Launch, table: bytes, shape: tuple[int, int, int, int], threads: int,
          flat: bool = False) -> Sweep:
    """The kernel's table lives as long as what is returned; `flat`: what it makes has no axes of
    rows and columns."""
    words = torch.frombuffer(bytearray(table), dtype=torch.int64)
    new, taps, n = _new(shape, flat), address(words), shape[0]

    def run(x: Tensor, out: Tensor | None) -> Tensor:
        y = new() if out is None else out
        if (told := watcher()) is not None:
            told.keeps(words)
        launch(address(x), taps, 0, 0, address(y), 0, n, threads)
        return y

    return Sweep(shape, threads, run)


def _new(shape: tuple[int, int, int, int], flat: bool) -> Callable[[], Tensor]:
    """Channels-last images, not yet written, in as few calls of torch as can be."""
    n, c, h, w = shape
    count, rank = n * c * h * w, 2 if flat else 4
    sizes, strides = shape[:rank], (h * w * c, 1, w * c, c)[:rank]
    if FLOAT32.bytes * count < memory.SMALL:
        return lambda: memory.noted(torch.empty_strided(sizes, strides, dtype=torch.float32))
    return lambda: memory.empty(count).as_strided(sizes, strides)


def after(first: Sweep, second: Sweep) -> Sweep:
    """One that reads what another made."""
    return second._replace(run=lambda x, out: second.run(first.run(x, None), out))


Make = Callable[..., Sweep | None]


def run(make: Make, x: Tensor, out: Tensor | None, *arguments: Any) -> Tensor | None:
    """What make(images, *arguments) does to x; None where tensors or arguments are torch's."""
    if not (is_plain(x) and (out is None or is_plain(out))):
        return None
    places = None if out is None else (out.shape, out.stride())
    found = _known[make, x.shape, x.stride(), places, arguments, torch.get_num_threads()]
    return None if found is None else found.run(x, out)


def _made(make: Make, shape: tuple[int, ...], strides: tuple[int, ...], places: Any,
          arguments: Any, threads: int) -> Sweep | None:
    pitch = pitch_of(shape, strides)
    if not pitch:
        return None
    to = shape[1] if places is None else pitch_of(*places)
    n, c, h, w = shape
    found = make(Images(n, c, h, w, pitch, to, threads), *arguments) if to else None
    fits = found is not None and (places is None or found.shape == places[0])
    return found if fits else None


def is_plain(x: Tensor) -> bool:
    """Whether kernels may read or write it, if its strides are right."""
    return (x.dtype is torch.float32 and KNOWN and x.is_cpu and x.layout is torch.strided
            and not x.is_neg() and not (x.requires_grad and torch.is_grad_enabled()))


_known = Remembered(_made)


def as_tuple(value: Any) -> Any:
    """Arguments of two sizes may be lists, which cannot be looked up."""
    return tuple(value) if isinstance(value, list) else value

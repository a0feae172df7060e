"""Sweeps over channels-last images whose kernels read a table, made once for each size.

Images may be slices of the channels of larger ones: then pixels lie further apart than they have
channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.places import address
from ..core.problem import Problem
from ..core.remembered import Remembered
from ..core.watching import watcher
from ..kernels.cpu import memory
from ..kernels.cpu.emit.launch import Launch
from .images import pitch_of
from .types import DTYPES, element_of

ALONE = 1 << 18  # floats that one thread is done with before another has begun
ANY = Problem(1, 1, 1, 1, 1, 1, 1)  # code depends on nothing of a problem


class Images(NamedTuple):
    """Sizes, values from a pixel to the next of what is read and of what is written, threads, and
    what the values are."""

    n: int
    c: int
    h: int
    w: int
    pitch: int
    to: int
    threads: int
    dtype: str = "f32"

    @property
    def code(self) -> Problem:
        """All that code depends on besides its own arguments."""
        return ANY.with_(dtype=self.dtype)


class Sweep(NamedTuple):
    """A kernel for images of one size."""

    shape: tuple[int, ...]
    threads: int
    run: Callable[[Tensor, Tensor | None], Tensor]


def sweep(launch: Launch, table: bytes, shape: tuple[int, int, int, int], threads: int,
          flat: bool = False, dtype: str = "f32") -> Sweep:
    """The kernel's table lives as long as what is returned; `flat`: what it makes has no axes of
    rows and columns."""
    words = torch.frombuffer(bytearray(table), dtype=torch.int64)
    new, taps, n = _new(shape, flat, DTYPES[dtype]), address(words), shape[0]

    def run(x: Tensor, out: Tensor | None) -> Tensor:
        y = new() if out is None else out
        if (told := watcher()) is not None:
            told.keeps(words)
        launch(address(x), taps, 0, 0, address(y), 0, n, threads)
        return y

    return Sweep(shape, threads, run)


def _new(shape: tuple[int, int, int, int], flat: bool, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Channels-last images, not yet written, in as few calls of torch as can be."""
    n, c, h, w = shape
    count, rank = n * c * h * w, 2 if flat else 4
    sizes, strides = shape[:rank], (h * w * c, 1, w * c, c)[:rank]
    if dtype.itemsize * count < memory.SMALL:
        return lambda: memory.noted(torch.empty_strided(sizes, strides, dtype=dtype))
    return lambda: memory.empty(count, dtype=dtype).as_strided(sizes, strides)


def after(first: Sweep, second: Sweep) -> Sweep:
    """One that reads what another made."""
    return second._replace(run=lambda x, out: second.run(first.run(x, None), out))


Make = Callable[..., Sweep | None]


def run(make: Make, x: Tensor, out: Tensor | None, *arguments: Any) -> Tensor | None:
    """What make(images, *arguments) does to x; None where tensors or arguments are torch's."""
    dtype = plain_element(x)
    if dtype is None or not (out is None or plain_element(out) == dtype):
        return None
    places = None if out is None else (out.shape, out.stride())
    found = _known[make, x.shape, x.stride(), dtype, places, arguments, torch.get_num_threads()]
    return None if found is None else found.run(x, out)


def _made(make: Make, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, places: Any,
          arguments: Any, threads: int) -> Sweep | None:
    pitch = pitch_of(shape, strides)
    if not pitch:
        return None
    to = shape[1] if places is None else pitch_of(*places)
    n, c, h, w = shape
    found = make(Images(n, c, h, w, pitch, to, threads, dtype), *arguments) if to else None
    fits = found is not None and (places is None or found.shape == places[0])
    return found if fits else None


def plain_element(x: Tensor) -> str | None:
    """What it holds, if kernels may read or write it where its strides are right."""
    plain = (x.is_cpu and x.layout is torch.strided and not x.is_neg()
             and not (x.requires_grad and torch.is_grad_enabled()))
    return element_of(x.dtype) if plain else None


def is_plain(x: Tensor) -> bool:
    """Whether that is float32."""
    return x.dtype is torch.float32 and plain_element(x) is not None


_known = Remembered(_made)


def as_tuple(value: Any) -> Any:
    """Arguments of two sizes may be lists, which cannot be looked up."""
    return tuple(value) if isinstance(value, list) else value

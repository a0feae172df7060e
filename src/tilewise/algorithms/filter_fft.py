"""Filters with large kernels, through torch's Fourier transforms, tile by tile."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..core.algorithm import EPS32, Algorithm
from ..core.borders import CONSTANT, sources
from ..core.lowrank import scaled
from ..core.schedule import Schedule, Space
from ..core.target import Target
from .filter_common import wrong_form

SIZES = (256, 512, 1024, 2048)


class Spectrum(NamedTuple):
    """Of a kernel divided by a power of two: those of large kernels would not fit into a float."""

    values: Any
    exponent: int

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)


class FilterFft(Algorithm):
    """Overlap-save: a tile of outputs is the inside of one circular correlation."""

    name = "filter_fft"
    version = 1
    spreads = True
    takes = "tensors"
    exact_on_integers = False
    forms = frozenset({"sum"})

    def reject(self, p: Any, t: Target) -> list[str]:
        reasons = [] if t.device == "cpu" else [f"device is {t.device}, needs cpu"]
        reasons += wrong_form(p, self.forms)
        if max(p.r, p.s) > SIZES[-1] // 2:
            reasons.append(f"kernel is {p.r}x{p.s}, needs at most {SIZES[-1] // 2} a side")
        return reasons

    def error(self, p: Any, t: Target, s: Any) -> float:
        unit = EPS32 if p.work == "f32" else 2.0 ** -53
        return unit * 4 * math.log2(s.size) ** 2

    def space(self, p: Any, t: Target) -> Space:
        return Space(lambda s: s.size >= 2 * max(p.r, p.s), size=SIZES)

    def default(self, p: Any, t: Target) -> Schedule:
        return min(self.space(p, t), key=lambda s: self.cost(p, t, s))

    def cost(self, p: Any, t: Target, s: Any) -> float:
        tiles = p.n * p.c * math.ceil(p.h / (s.size - p.r + 1)) * math.ceil(
            p.w / (s.size - p.s + 1))
        work = 2.5 * s.size ** 2 * 2 * math.log2(s.size) * 2  # there and back
        rate = 5.5e9 * (1 if p.work == "f32" else 0.5)
        return 100e-6 + tiles * (work / rate / t.threads + 60e-6)

    def prepare(self, p: Any, t: Target, s: Any, weight: Any) -> Any:
        import numpy as np
        import torch

        values, exponent = scaled(np.asarray(weight))
        spectrum = torch.fft.rfft2(torch.from_numpy(values), (s.size, s.size)).conj()
        return Spectrum(spectrum.to(torch.complex128 if p.work == "f64" else torch.complex64),
                        exponent)

    def build(self, p: Any, t: Target, s: Any) -> Any:
        rows = sources(p.h, p.anchor[0], p.r - 1 - p.anchor[0], p.border)
        columns = sources(p.w, p.anchor[1], p.s - 1 - p.anchor[1], p.border)
        high, wide = s.size - p.r + 1, s.size - p.s + 1  # outputs of a tile

        def run(image: Any, out: Any, kernel: Any, value: float) -> None:
            for n in range(image.shape[0]):
                for channel in range(image.shape[3]):
                    x, y = image[n, :, :, channel], out[n, :, :, channel]
                    for top in range(0, p.h, high):
                        for left in range(0, p.w, wide):
                            tile = y[top:top + high, left:left + wide]
                            block = _gather(x, rows[top:top + s.size],
                                            columns[left:left + s.size], value, p.work)
                            _store(tile, _correlate(block, kernel, s.size, tile.shape))

        return run


def _gather(x: Any, rows: Any, columns: Any, value: float, work: str) -> Any:
    """Rows and columns of an image, and the constant where they are not in it."""
    import numpy as np

    part = _along(_along(x, columns, 1), rows, 0)
    block = part.astype(np.float64 if work == "f64" else np.float32)
    block[rows == CONSTANT] = value
    block[:, columns == CONSTANT] = value
    return block


def _along(x: Any, places: Any, axis: int) -> Any:
    """x.take(places, axis), as a view where the places are neighbours."""
    first, last = int(places[0]), int(places[-1]) + 1
    if first >= 0 and last - first == len(places) and (places[1:] > places[:-1]).all():
        return x[first:last] if axis == 0 else x[:, first:last]
    return x.take(places, axis, mode="clip")


def _correlate(block: Any, kernel: Spectrum, size: int, shape: tuple[int, int]) -> Any:
    import torch

    spectrum = torch.fft.rfft2(torch.from_numpy(block), (size, size))
    found = torch.fft.irfft2(spectrum.mul_(kernel.values), (size, size))
    return found[:shape[0], :shape[1]].mul_(2.0 ** kernel.exponent).numpy()


def _store(to: Any, values: Any) -> None:
    """Rounded and saturated where the output is integer."""
    import numpy as np

    if to.dtype.kind != "f":
        bounds = np.iinfo(to.dtype)
        values = np.clip(np.rint(np.nan_to_num(values, nan=bounds.min)), bounds.min, bounds.max)
    to[...] = values

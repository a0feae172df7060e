"""Estimates that every algorithm shares: cycles and bytes to seconds."""

from __future__ import annotations

import math

from .isa import AMX
from .target import Target

CALL = 8e-6  # seconds to get from Python into a kernel and back
REGION = 2e-6  # seconds to start a parallel region
TURN = 2.2  # cycles to move a value into another layout
SHORT = 32  # products of a sum
LINE = 64  # bytes that travel together
PAGE = 4096  # bytes: lines as far apart share a place in the first cache
CROWDED = 1.25  # cycles to bring a line from the second cache for every value of it


def seconds(t: Target, cycles: float, bytes_: float, tasks: int, regions: int = 1,
            weights: float = 0.0) -> float:
    """Time of `cycles` on all threads, evened out over `tasks`, beside `bytes_` of traffic.

    Bytes of `weights` come from memory: between two uses of one, a model has read all others.
    """
    rounds = math.ceil(tasks / t.threads) if tasks else 0
    uneven = rounds * t.threads / tasks if tasks else 1.0
    compute = cycles / t.hertz / t.threads * uneven
    memory = traffic(t, bytes_) + weights / t.flow
    # neither hides the other entirely
    return CALL + REGION * regions + max(compute, memory) + 0.3 * min(compute, memory)


def traffic(t: Target, bytes_: float) -> float:
    """Time to move bytes: from memory, or from the last cache where everything fits."""
    speed = t.flow if bytes_ > t.l3 / 4 else 4 * t.flow
    return bytes_ / speed


def turn(t: Target, images: int, channels: int, pixels: int) -> float:
    """Time of the pass that brings float images into another layout."""
    values = images * channels * pixels
    if t.device != "cpu" or channels == 1 or pixels == 1:
        return CALL + traffic(t, 8 * values)
    return CALL + max(traffic(t, 8 * values), values * TURN / t.hertz / t.threads)


def tile_cycles(t: Target, rows: int, vectors: int, steps: int, apart: int = LINE) -> float:
    """One register tile: bound by multiply-adds, by loads or by their latency.

    Its rows lie so many bytes `apart`.
    """
    multiplies = rows * vectors / t.starts
    reads = 2 if t.starts < 4 else 3  # that can start in a cycle
    loads = (rows + vectors) / reads if rows <= _together(t, apart) else CROWDED * rows
    latency = 4.0 if steps > SHORT else 2.0  # of a short sum, the next begins meanwhile
    slow = 1.0 if t.row.fma else 2.0
    return steps * slow * max(multiplies, loads, latency) * 1.04 + 2.0 * rows * vectors + 25


def _together(t: Target, apart: int) -> int:
    """Lines so many bytes apart that the first cache holds: those of channels that are a power of
    two share few places of it."""
    places = PAGE // max(LINE, math.gcd(PAGE, apart))
    return places * max(1, t.l1 // PAGE)


def matrix_cycles(rows: int, columns: int, steps: int, products: int,
                  t: Target | None = None) -> float:
    """Some tiles of sums of a target's matrix unit: bound by its operations; begun and stored."""
    unit = t.row.matrix if t and t.row.matrix else AMX
    step = unit.cycles if t is None or unit.apart else unit.cycles * t.row.units / t.starts
    tiles = rows * columns
    step *= max(1.0, unit.in_flight / tiles)
    return step * tiles * steps * products + unit.moved * tiles + 25

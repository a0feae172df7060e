"""The register-tile multiply: no spills, whole registers, near the peak of the chip."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.tiles import APART, tile_module

from tilewise.core import ISA, Target
from tilewise.core.isa import available
from tilewise.kernels.cpu import peak
from tilewise.kernels.cpu.emit import jit

TILES = [("avx512", 14, 2), ("avx512", 28, 1), ("avx512", 6, 4), ("avx2", 6, 2), ("avx2", 4, 3)]
NAMES = {"avx512": "zmm", "avx2": "ymm"}
# shares of the peak beside neighbours; a quiet machine gives .93 and .90
LEAST = {"avx512": 0.85, "avx2": 0.82}
BEYOND = 0.8  # where the operands are more than the first cache holds: they come from the second
HERE = {isa.name for isa in available()}


def needs(isa: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(isa not in HERE, reason=f"this machine has no {isa}")


ON_TILES = pytest.mark.parametrize(
    "isa, rows, vectors", [pytest.param(*tile, marks=needs(tile[0])) for tile in TILES])


def assembly_of_tile(isa: str, rows: int, vectors: int, depth: int = 256) -> str:
    text = jit.assembly(tile_module(ISA[isa], rows, vectors, depth))
    return text.split("\ntile:")[1].split(".Lfunc_end")[0]


class Tile:
    """A compiled tile with its operands."""

    def __init__(self, isa: str, rows: int, vectors: int, depth: int) -> None:
        rng, width = torch.Generator().manual_seed(depth), vectors * ISA[isa].lanes
        # torch aligns to cache lines, as the packed operands of kernels are
        self.a, self.b = (torch.randint(-4, 5, shape, generator=rng).float()
                          for shape in ((rows, depth + APART), (depth, width)))
        self.c = torch.full((rows, width), float("nan"))
        self.product = self.a[:, :depth].numpy() @ self.b.numpy()
        self.bytes = self.a.nbytes + self.b.nbytes
        self.operations = 2.0 * rows * depth * width
        self._code = jit.load(lambda row: tile_module(row, rows, vectors, depth),
                              f"test tile {rows} {vectors} {depth}", ISA[isa], "again")
        pointers = [ctypes.c_void_p] * 3
        self._again = self._code.function("again", *pointers, ctypes.c_int64)

    def move(self) -> None:
        """To other memory: physical pages decide what collides in the second cache."""
        self._before = (self.a, self.b)
        self.a, self.b = self.a.clone(), self.b.clone()

    def __call__(self, times: int = 1) -> None:
        self._again(self.a.data_ptr(), self.b.data_ptr(), self.c.data_ptr(), times)


@ON_TILES
def test_accumulators_stay_in_registers(isa: str, rows: int, vectors: int) -> None:
    on_the_stack = [line for line in assembly_of_tile(isa, rows, vectors).splitlines()
                    if re.search(r"[xyz]mm", line) and re.search(r"\(%r[sb]p", line)]
    assert on_the_stack == []


def test_a_tile_that_does_not_fit_is_seen_to_spill() -> None:
    text = assembly_of_tile("avx2", 14, 2)
    assert re.search(r"ymm\d+, [-\d]*\(%rsp", text)


@ON_TILES
def test_whole_registers_are_multiplied_and_added_at_once(isa: str, rows: int,
                                                          vectors: int) -> None:
    text = assembly_of_tile(isa, rows, vectors)
    fused = re.findall(r"vfmadd\d+ps\s.*", text)
    assert fused
    assert all(f"%{NAMES[isa]}" in line for line in fused)
    assert len(fused) % (rows * vectors) == 0
    assert not re.search(r"\bvmulps|\bvaddps", text)


@pytest.mark.parametrize("depth", [1, 3, 4, 7, 8, 64, 129])
@ON_TILES
def test_the_product_is_that_of_numpy(isa: str, rows: int, vectors: int, depth: int) -> None:
    tile = Tile(isa, rows, vectors, depth)
    tile()
    np.testing.assert_array_equal(tile.c.numpy(), tile.product)


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def share_of_peak(isa: str, tile: Tile, enough: float) -> float:
    """Best rate over best rate, in turn, until it is enough or time is up."""
    run_peak, peak_operations = peak.runner(isa, 1)
    times, best, best_peak = max(1, round(2e7 / tile.operations)), float("inf"), float("inf")
    share, give_up = 0.0, time.monotonic() + 30
    while share < enough and time.monotonic() < give_up:
        tile.move()
        for _ in range(40):
            best = min(best, seconds(lambda: tile(times)))
            best_peak = min(best_peak, seconds(run_peak))
        share = (tile.operations * times / best) / (peak_operations / best_peak)
    return share


@pytest.mark.timing
@pytest.mark.parametrize("depth", [64, 128, 256, 512])
@ON_TILES
def test_share_of_the_peak(isa: str, rows: int, vectors: int, depth: int) -> None:
    tile = Tile(isa, rows, vectors, depth)
    least = LEAST[isa] if tile.bytes <= Target.host().l1 else BEYOND
    assert share_of_peak(isa, tile, least) >= least

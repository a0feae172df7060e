"""The max-pool of convolutions that do not fuse it: torch's result, no byte beside it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from support import faults, harness
from support.convolutions import LAST, PLANES, draw
from torch.nn import functional as F

import tilewise
from tilewise.bench.guarded import Mismatch, launch_guarded
from tilewise.core.isa import ISA
from tilewise.core.problem import Epilogue, Problem
from tilewise.core.schedule import Schedule
from tilewise.core.target import Target
from tilewise.kernels.cpu.between import pooling
from tilewise.kernels.cpu.between.epilogue import pool
from tilewise.kernels.cpu.emit.launch import launcher

HOST = Target.host(threads=2)
ROWS = [name for name, row in ISA.items() if row.lanes <= HOST.lanes
        and HOST.row.machines == row.machines and not row.matrix]
SIZES = [(1, 4, 4, 2), (2, 9, 9, 2), (1, 7, 40, 3), (3, 8, 13, 4), (2, 66, 66, 2)]


class Mutation(NamedTuple):
    apply: faults.Patch


def check(mutation: Mutation) -> None:
    with faults.patched(mutation.apply):
        for k in (1, 3, 16, 21):
            check_guarded("avx512" if "avx512" in ROWS else ROWS[0], k)


MUTATIONS = {
    "the first of a window": Mutation(
        faults.replaced(pooling, "pool", lambda window: window[0])),
    "not the last of a window": Mutation(
        faults.replaced(pooling, "pool", lambda window: pool(window[:-1]))),
    "small numbers lose a row": Mutation(
        faults.replaced(pooling, "ceil_div", lambda a, b: a // b or 1)),
}


def check_guarded(row: str, k: int) -> None:
    for n, h, w, size in SIZES:
        p = Problem(n, 1, h, w, k, 1, 1, epilogue=Epilogue(pool=size))
        x = draw(n, k, h, w, seed=k)
        x[:, :, h // 2, w // 2] = float("inf")
        expected = F.max_pool2d(x, size)
        kernel = launcher(pooling.make, p, Schedule(), ISA[row], sizes=pooling.sizes(p))
        for side in ("start", "end"):
            y = launch_guarded(kernel, {"x": harness.laid_out(x, p)},
                               {"y": expected.numel()}, n, 2, side)["y"]
            y = y.view(n, h // size, w // size, k).permute(0, 3, 1, 2)
            if not torch.equal(y, expected):
                raise Mismatch(f"{p} on {row}: not torch's maximum")


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 12, 16, 21, 64])
def test_windows_between_unmapped_pages(row: str, k: int) -> None:
    check_guarded(row, k)


@pytest.mark.parametrize("algorithm", ["cpu_direct", "cpu_pixels", "vendor"])
@pytest.mark.parametrize("layout", [PLANES, LAST])
def test_as_torch_pools(algorithm: str, layout: Any) -> None:
    for size in (2, 3, 4, 5):
        for n, k, h, w in ((1, 4, 11, 12), (3, 20, 9, 30)):
            x, weight = draw(n, 3, h, w).contiguous(memory_format=layout), draw(k, 3, 3, 3)
            x[0, 0, 3, 3] = float("nan")
            y = tilewise.conv2d(x, weight, padding=1, pool=size, algorithm=algorithm)
            z = F.max_pool2d(tilewise.conv2d(x, weight, padding=1, algorithm=algorithm), size)
            assert torch.equal(y.nan_to_num(9e9), z.nan_to_num(9e9))
            assert y.stride() == z.stride()


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_pooling")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])

"""One Winograd kernel for images of all sizes; tiles that stick out have the bits of whole ones."""

from __future__ import annotations

import pytest
import torch
from support import harness
from support.gradients import check_fused_mask
from support.harness import GENERATED, Operands
from support.matrix_unit import needs_amx

from tilewise.core import Problem, Schedule, Target
from tilewise.kernels.cpu.emit.launch import KERNELS

SIZES = ((9, 14), (8, 8), (2, 3), (11, 7))  # of images: rests of every kind, and none
BLOCKS = {"tile_h": 4, "tile_w": 4, "rows": 3, "vectors": 1, "groups": 2, "unroll": 1,
          "k_parts": 1, "streaming": False}
WINOGRAD = GENERATED["cpu_winograd"]


def problem(h: int, w: int, more: str = "") -> Problem:
    return Problem.parse(f"n2c5h{h}w{w}k21r3s3p1_f32_forward{more}")


@pytest.mark.parametrize("order", ["channels", "positions", "shared"])
def test_one_kernel_serves_all_sizes(order: str) -> None:
    t, s = Target.host(threads=2), Schedule(**BLOCKS, order=order)
    before = None
    for h, w in SIZES:
        p = problem(h, w, "+bias+residual+relu")
        assert s in WINOGRAD.space(p, t)
        assert harness.check(WINOGRAD, p, t, s) == 2
        before = before or len(KERNELS)
        assert len(KERNELS) == before, f"{h}x{w} was compiled for itself"


@needs_amx
def test_one_kernel_of_the_matrix_unit_serves_all_sizes() -> None:
    t, unit = Target.host(isa="amx", threads=2), next(
        a for a in harness.WRITTEN if a.name == "cpu_winograd_bf16x3")
    s = Schedule(tile_h=2, tile_w=4, order="positions", rows=16, vectors=1, groups=1, k_parts=1,
                 streaming=False)
    before = None
    for h, w in SIZES:
        assert harness.check(unit, problem(h, w, "+bias+relu+pool2"), t, s) == 2
        before = before or len(KERNELS)
        assert len(KERNELS) == before, f"{h}x{w} was compiled for itself"


def test_the_mask_of_windows_that_are_cut_off() -> None:
    t, s = Target.host(threads=2), Schedule(**BLOCKS, order="channels")
    check_fused_mask(problem(11, 7, "+bias+relu+pool2+mask"), t, s, 0)


def test_the_bits_of_a_pixel_do_not_depend_on_what_is_cut_off() -> None:
    t, s = Target.host(threads=2), Schedule(**BLOCKS, order="channels")
    whole = Problem.parse("n1c5h10w10k21r3s3_f32_forward+bias")  # 8x8 results
    o = harness.operands(whole, "floats", 0)
    prepared = harness.prepare(WINOGRAD, whole, t, s, o.weight)
    for h in (1, 2, 3, 6, 8):
        for w in (1, 4, 7):
            seen = torch.zeros_like(o.x)
            seen[:, :, :h + 2, :w + 2] = part = o.x[:, :, :h + 2, :w + 2].contiguous()
            found = harness.run(WINOGRAD, whole.with_(h=h + 2, w=w + 2), t, s,
                                Operands(part, o.weight, o.bias, None), prepared)
            expected = harness.run(WINOGRAD, whole, t, s,
                                   Operands(seen, o.weight, o.bias, None), prepared)
            assert torch.equal(found, expected[:, :, :h, :w]), f"{h}x{w}"

"""Loads stay 128 bits wide where channels are a multiple of 16 bytes, though not of a block."""

from __future__ import annotations

import pytest
from support.harness import LONG

from tilewise.algorithms.gpu_implicit_gemm import GpuImplicitGemm
from tilewise.core import Problem, Target
from tilewise.core.gpu import GPUS
from tilewise.kernels.gpu import conv
from tilewise.kernels.gpu.audit import audit

# few channels are taken flat, all taps in a row
CHANNELS = {"forward": {"f32": (12, 20, 24, 36, 40), "f16": (8, 24, 40)},
            "backward_data": {"f32": (20,), "f16": (24,)},
            "backward_weight": {"f32": (20,), "f16": (24,)}}


def sampled(gpu: str, channels: tuple[int, ...]) -> tuple[int, ...]:
    """All with TILEWISE_LONG; else some, others on the next GPU."""
    share = (len(channels) + 1) // 2
    return channels if LONG else channels[tuple(GPUS).index(gpu) % share::share]


def loads(gpu: str, direction: str, dtype: str, channels: int) -> tuple[int, int]:
    """Bits of the narrowest load in all of the default schedule's code, and its spills."""
    p = Problem.parse(f"n32c{channels}h28w28k{channels}r3s3p1_{dtype}_{direction}")
    s = GpuImplicitGemm().default(p, Target.gpu(gpu))
    report = audit(conv.launches(p, s, "ieee")[0], GPUS[gpu], 0.0)
    return report.load_bits, report.spills


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("direction", CHANNELS)
def test_channels_that_fill_no_block_are_loaded_128_bits_at_a_time(gpu, direction):
    found = {(dtype, c): loads(gpu, direction, dtype, c)
             for dtype, channels in CHANNELS[direction].items() for c in sampled(gpu, channels)}
    assert set(found.values()) == {(128, 0)}, found


@pytest.mark.parametrize("dtype, channels", [("f32", 21), ("f16", 20)])
def test_other_channels_are_not(dtype, channels):
    assert loads("sm_80", "forward", dtype, channels)[0] < 128

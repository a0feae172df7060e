"""Layers that people have: estimates choose what was measured to be fast enough beside torch.

`benchmarks/layers.py` has the layers and made tests/support/layers.json, on a Xeon with a matrix
unit: by layer, the algorithms that reached .9 of torch's, called in the same way, on one thread
or two.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tilewise.algorithms import ALGORITHMS
from tilewise.core import Problem, Target
from tilewise.core.cost import turn
from tilewise.kernels.cpu import memory
from tilewise.planner import Planner
from tilewise.planner.measure import interleaved

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

with patch.dict(os.environ):  # what it sets for torch is not for other tests
    import layers as benchmark

FINE = json.loads((Path(__file__).parents[1] / "support" / "layers.json").read_text())
XEON = Target("cpu", "amx", 2, l1=48 << 10, l2=2 << 20, l3=300 << 20)  # where it was measured
PATIENCE, ROOM = 40, 0.8  # seconds to wait for a quiet moment
WORST = ("deeplab by 12", "deeplab by 36", "last of super-resolution",
         "stem resnet, batch 8, planes", "patchify convnext, large, planes",
         "grouped resnext, stride 2, planes")  # before costs knew of layouts and padding


def chosen(p: Problem, t: Target) -> str:
    return Planner(ALGORITHMS).plan(p, t, max_error=2e-5, bits=24).algorithm


@pytest.mark.parametrize("isa", ["amx", "avx512"])
def test_choices_are_fast_enough(isa: str) -> None:
    assert list(FINE) == list(benchmark.LAYERS)
    assert len(FINE) >= 55
    found = {name: chosen(benchmark.problem(name), XEON.with_(isa=isa)) for name in FINE}
    slow = {name: algorithm for name, algorithm in found.items() if algorithm not in FINE[name]}
    assert not slow
    assert len(set(found.values())) >= 6  # not all of them torch's


@pytest.mark.parametrize("text", [
    "n1c1h28w28k1r3s3p12d12_f32_forward", "n1c1h28w28k1r3s3p36d36_f32_forward",
    "n1c1h7w9k1r3s5u2x3p1-2x0-4_f32_forward", "n1c1h2w2k1r3s3p1_f32_forward",
    "n1c1h5w5k1r1s1_f32_forward", "n1c1h4w4k1r2s2u3p3_f32_forward",
    "n1c1h3w3k1r7s1u2p5x0d2x1_f32_forward"])
def test_share_of_products_inside_the_image(text: str) -> None:
    """As many as a filter of ones finds ones."""
    p = Problem.parse(text)
    top, bottom, left, right = p.padding
    image = torch.nn.functional.pad(torch.ones(1, 1, p.h, p.w), (left, right, top, bottom))
    seen = torch.nn.functional.conv2d(image, torch.ones(1, 1, p.r, p.s), None, p.stride, 0,
                                      p.dilation)
    assert p.share_inside == pytest.approx(float(seen.mean()) / (p.r * p.s), rel=1e-6)


def test_gradients_turn_what_they_read_and_write() -> None:
    """Three planes and 64: forward and for the gradient of the input one of each, for that of the
    weight both are read."""
    def passes(direction: str) -> float:
        p = Problem.parse(f"n1c3h224w224k64r3s3p1_f32_{direction}")
        planes, last = (Planner(ALGORITHMS).plan(p.with_(layout=layout), XEON,
                                                 algorithm=f"cpu_direct{extra}").seconds
                        for extra in [("_weight" if direction == "backward_weight" else "")]
                        for layout in ("nchw", "nhwc"))
        return planes - last

    both = turn(XEON, 1, 3, 224 ** 2) + turn(XEON, 1, 64, 224 ** 2)
    for direction in ("forward", "backward_data", "backward_weight"):
        assert passes(direction) == pytest.approx(both)


@pytest.mark.timing
@pytest.mark.parametrize("name", WORST)
def test_worst_layers(name: str) -> None:
    """Clocks of shared machines err, so this leaves room."""
    best, give_up = 0.0, time.monotonic() + PATIENCE
    memory.POOL.give_back()  # what other layers left behind
    with torch.no_grad():
        while best < ROOM and time.monotonic() < give_up:
            theirs, ours = interleaved(benchmark.calls(benchmark.problem(name)), 7, 0.01, 5)
            best = max(best, theirs.minimum / ours.minimum)
    assert best >= ROOM

"""The tests can fail: kernels broken on purpose are caught, by a value or by a memory fault."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
from harness import Mismatch
from interpreter import MemoryFault
from running import check
from triton.runtime.errors import InterpreterError

from tilewise.algorithms.gpu_implicit_gemm import GpuImplicitGemm
from tilewise.core import Problem, Schedule, Target
from tilewise.kernels.gpu import conv, implicit_gemm

SHAPES = ("n2c17h7w6k19r3s2u2x1p1x0d1x2", "n1c3h8w9k5r3s3p1", "n2c12h5w5k8r2s3u1x2p1g2",
          "n2c33h6w9k20r3s3p1")
TILES = Schedule(bm=32, bn=16, bk=16, warps=4, stages=2, flat=False, swizzle=8)
GPU = Target.gpu("sm_90")
SOURCE = Path(implicit_gemm.__file__).read_text()

# what is written, what is written instead, how often it occurs
FAULTS = {
    "one row too many": ("(ih < H)", "(ih <= H)", 4),
    "one column too many": ("(iw < W)", "(iw <= W)", 4),
    "one row too few": ("(ih >= 0)", "(ih > 0)", 4),
    "one column to the left": ("(iw >= 0)", "(iw >= -1)", 4),
    "one channel too many": ("(d < DEPTH)[None", "(d <= DEPTH)[None", 1),
    "a weight beyond its channels": ("(d < DEPTH)[:, None]", "(d <= DEPTH)[:, None]", 1),
    "one output channel too many": ("column < GK", "column <= GK", 4),
    "one input channel too many": ("column < GC", "column <= GC", 2),
    "one pixel too many": ("live = m < total\n", "live = m <= total\n", 2),
    "one gradient row too many": ("(h < H)", "(h <= H)", 1),
    "the other axis' stride": ("oh * STRIDE_H", "oh * STRIDE_W", 1),
    "the other axis' dilation": ("tap // S * DIL_H", "tap // S * DIL_W", 1),
    "padding forgotten": ("ow * STRIDE_W - LEFT", "ow * STRIDE_W", 1),
    "a wrong pitch": ("* PITCH", "* DEPTH", 2),
    "taps in the wrong order": ("-(RSTEP * DIL_H // STRIDE_H)", "RSTEP * DIL_H // STRIDE_H", 1),
    "taps of another residue": ("(phase // STRIDE_W + TOP)", "(phase // STRIDE_W)", 1),
    "tiles done twice": ("inside % height", "inside % SWIZZLE", 1),
    "the wrong group": ("x + group * GC", "x + group * GK", 1),
    "bias of another group": ("k = group * GK + column\n", "k = column\n", 1),
    "pooling before the end": ("ow += m % 2", "ow += m % 4 // 2", 1),
    "parts that overlap": ("part * steps + step", "part * (steps - 1) + step", 1),
    "a part left out": ("range(parts)", "range(1, parts)", 1),
    "all parts in one place": ("dw + part * (K * WIDTH)", "dw", 1),
}


def broken(name: str, tmp_path: Path) -> ModuleType:
    before, after, times = FAULTS[name]
    assert SOURCE.count(before) == times, f"{before!r} is there {SOURCE.count(before)} times"
    path = tmp_path / f"broken_{re.sub(r'[^a-z]+', '_', name)}.py"
    path.write_text(SOURCE.replace(before, after)
                    .replace("from .epilogue", "from tilewise.kernels.gpu.epilogue"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_all() -> None:
    """Small problems of every direction, tiled so that nothing fits evenly."""
    algorithm = GpuImplicitGemm()
    for shape in SHAPES:
        for direction, s in (("forward+bias", TILES.with_(weight="rsck")),
                             ("backward_data", TILES.with_(weight="krsc")),
                             ("backward_weight", TILES.with_(split="parts"))):
            p = Problem.parse(f"{shape}_f32_{direction}")
            check(algorithm, p, GPU, s, "integers")
            check(algorithm, p, GPU, s.with_(flat=True), "integers")
    p = Problem.parse(f"{SHAPES[0]}_f32_forward+bias+residual+relu+pool2")
    check(algorithm, p, GPU, TILES.with_(weight="krsc"), "integers")
    p = Problem.parse("n3c8h9w12k16r2s2p1_f32_backward_weight")
    check(algorithm, p, GPU, TILES.with_(split="parts"), "integers")


def test_the_kernels_as_they_are_pass():
    check_all()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault, tmp_path):
    with (mock.patch.object(conv, "implicit_gemm", broken(fault, tmp_path)),
          pytest.raises((Mismatch, InterpreterError)) as caught):
        check_all()
    assert isinstance(first_cause(caught.value), Mismatch | MemoryFault)


def first_cause(error: BaseException) -> BaseException:
    """What was raised before the interpreter wrapped it."""
    return error if error.__cause__ is None else first_cause(error.__cause__)

"""The tests can fail: kernels broken on purpose are caught, by a value or by a memory fault."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
from interpreter import MemoryFault
from running import check
from support.harness import Mismatch
from triton.runtime.errors import InterpreterError

from tilewise.algorithms.gpu_implicit_gemm import GpuImplicitGemm
from tilewise.algorithms.gpu_winograd import GpuWinograd
from tilewise.core import Problem, Schedule, Target
from tilewise.kernels.gpu import conv, implicit_gemm, winograd, winograd_conv

SHAPES = ("n2c17h7w6k19r3s2u2x1p1x0d1x2", "n1c3h8w9k5r3s3p1", "n2c12h5w5k8r2s3u1x2p1g2",
          "n2c33h6w9k20r3s3p1")
TILES = Schedule(bm=32, bn=16, bk=16, warps=4, stages=2, flat=False, swizzle=8)
GPU = Target.gpu("sm_90")

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
    "slopes of another group": ("column < GK, K, BIAS", "column < GK, GK, BIAS", 1),
    "pooling before the end": ("ow += m % 2", "ow += m % 4 // 2", 1),
    "parts that overlap": ("part * steps + step", "part * (steps - 1) + step", 1),
    "a part left out": ("range(parts)", "range(1, parts)", 1),
    "all parts in one place": ("dw + part * (K * WIDTH)", "dw", 1),
}


WINOGRAD_FAULTS = {
    "one place too many": ("(first + i < SIZE)", "(first + i <= SIZE)", 1),
    "one place too few": ("(first + i >= 0)", "(first + i > 0)", 1),
    "one channel too many": ("(c < C)", "(c <= C)", 1),
    "one output channel too many": ("kept = (k < K)", "kept = (k <= K)", 1),
    "one pooled channel too many": ("(k < K)[None, :]\n        tl.store",
                                    "(k <= K)[None, :]\n        tl.store", 1),
    "one tile too many": ("tile < N", "tile <= N", 1),
    "tiles in the wrong order": ("tile // COLS % ROWS", "tile // ROWS % ROWS", 1),
    "padding forgotten": ("row * TILE - TOP", "row * TILE", 1),
    "squares too far apart": ("column * TILE - LEFT", "column * SIDE - LEFT", 1),
    "the other axis first": ("(i // SIDE * W + i % SIDE)", "(i % SIDE * W + i // SIDE)", 1),
    "one axis only": ("return by_columns(turned, STEPS, OUTPUTS, len(OUTPUTS))",
                      "return turned", 1),
    "a sign lost": ("value -= values", "value += values", 1),
    "a factor lost": ("value *= STEPS[i][1]", "value *= 1", 1),
    "positions on top of each other": ("first + i * C", "first + i", 1),
    "a row of the image forgotten": ("* OW + column * TILE) * K)[:, None] + k[None, :]\n    done",
                                     "* OW + column) * K)[:, None] + k[None, :]\n    done", 1),
    "the bias for the slopes": ("k < K, K, BIAS", "k < K, 0, BIAS", 1),
    "half a window": ("larger(values[FIRST + WIDTH],", "larger(values[FIRST],", 1),
}


def broken(module: ModuleType, fault: tuple[str, str, int], tmp_path: Path) -> ModuleType:
    """The module with one thing written otherwise."""
    before, after, times = fault
    source = Path(module.__file__).read_text()
    assert source.count(before) == times, f"{before!r} is there {source.count(before)} times"
    path = tmp_path / f"broken_{tmp_path.name}.py"
    path.write_text(source.replace(before, after)
                    .replace("from .epilogue", "from tilewise.kernels.gpu.epilogue"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


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
    p = Problem.parse(f"{SHAPES[2]}_f32_forward+prelu")
    check(algorithm, p, GPU, TILES.with_(weight="rsck"))
    p = Problem.parse("n3c8h9w12k16r2s2p1_f32_backward_weight")
    check(algorithm, p, GPU, TILES.with_(split="parts"), "integers")


def check_winograd() -> None:
    """Both tiles, with programs so small that they have neighbours."""
    algorithm = GpuWinograd()
    for text, tile in (("n2c17h5w7k19r3s3p1_f32_forward+bias+residual+relu", 2),
                       ("n1c3h7w9k5r3s3p0-1x2-0_f32_forward+pool2", 4),
                       ("n1c3h5w6k19r3s3p1_f32_forward+bias+prelu", 2)):
        p = Problem.parse(text)
        check(algorithm, p, GPU, algorithm.default(p, GPU).with_(tile=tile, tiles=4, channels=16))


@pytest.mark.parametrize("checks", [check_all, check_winograd])
def test_the_kernels_as_they_are_pass(checks):
    checks()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault, tmp_path):
    with mock.patch.object(conv, "implicit_gemm", broken(implicit_gemm, FAULTS[fault], tmp_path)):
        caught_by(check_all)


@pytest.mark.parametrize("fault", WINOGRAD_FAULTS)
def test_a_fault_in_winograd_is_caught(fault, tmp_path):
    kernels = broken(winograd, WINOGRAD_FAULTS[fault], tmp_path)
    with mock.patch.object(winograd_conv, "winograd", kernels):
        caught_by(check_winograd)


def caught_by(checks: Callable[[], None]) -> None:
    with pytest.raises((Mismatch, InterpreterError)) as caught:
        checks()
    assert isinstance(first_cause(caught.value), Mismatch | MemoryFault)


def first_cause(error: BaseException) -> BaseException:
    """What was raised before the interpreter wrapped it."""
    return error if error.__cause__ is None else first_cause(error.__cause__)

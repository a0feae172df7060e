"""One kernel for images of every size: rows that tiles do not fit, borders, wide padding."""

from __future__ import annotations

import pytest
import torch
from support import harness
from support.cases import ROWS

from tilewise.algorithms import ALGORITHMS
from tilewise.core import Problem, Schedule, Target
from tilewise.kernels.cpu.conv.direct import Geometry
from tilewise.kernels.cpu.emit import jit, launch
from tilewise.kernels.cpu.prepare import direct
from tilewise.planner.planner import _plan
from tilewise.runtime.executable import Executable

GENERATED = {a.name: a for a in ALGORITHMS}
HOST = Target.host(threads=2)
SIZES = {  # of images, by algorithm and the rest of the problem
    ("cpu_depthwise", "n1c21h{h}w{w}k21r3s3p1g21_f32_forward+bias"): range(1, 32, 2),
    ("cpu_depthwise", "n1c21h{h}w{w}k21r5s5u2p2g21_f32_forward"): range(1, 32, 5),
    ("cpu_depthwise", "n1c21h{h}w{w}k21r3s3p0x5g21_f32_forward"): (4, 9, 20),
    ("cpu_depthwise", "n1c5h{h}w{w}k5r1s1p2g5_f32_forward"): (1, 9),
    ("cpu_depthwise", "n1c21h{h}w{w}k42r7s7u2p3g21_f32_forward+bias"): range(1, 32, 5),
    ("cpu_pixels", "n1c3h{h}w{w}k7r3s3p1_f32_forward+bias+residual"): range(1, 72, 7),
    ("cpu_pixels", "n1c5h{h}w{w}k7r3s3p0x20-18_f32_forward"): (3, 20),
    ("cpu_pixels", "n1c3h{h}w{w}k8r3s3p1_f32_forward"): (1, 15, 16, 17),
    ("cpu_pixels", "n1c3h{h}w{w}k7r3s3p1_f32_nchw_forward+bias+residual"): range(1, 72, 7),
    ("cpu_direct", "n1c5h{h}w{w}k21r3s3p1_f32_forward+bias+residual+relu"): range(1, 72, 3),
    ("cpu_direct", "n1c5h{h}w{w}k37r3s3u2p1_f32_forward+bias+silu"): range(1, 72, 5),
    ("cpu_direct", "n1c6h{h}w{w}k21r3s3p1d2g3_f32_forward"): range(3, 72, 9),
    ("cpu_direct", "n1c5h{h}w{w}k21r3s3p1_f32_forward+bias+relu+pool2"): range(2, 72, 9),
    ("cpu_pointwise", "n1c5h{h}w{w}k21r1s1_f32_forward+bias+prelu"): range(1, 30, 3),
    ("cpu_pointwise", "n1c5h{h}w{w}k21r1s1u2_f32_forward"): range(1, 72, 7),
}


@pytest.mark.parametrize(("name", "line"), SIZES)
def test_one_kernel_serves_every_size(name: str, line: str, tmp_path: object,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(direct, "is_worth", lambda isa: False)  # code that packs weights
    launch.KERNELS.clear()
    algorithm, before, s = GENERATED[name], jit.compiled, None
    for w in SIZES[name, line]:
        p = Problem.parse(line.format(h=3 + w % 4, w=w))
        s = s or algorithm.default(p.with_(w=70), HOST)
        s = s.with_(tile_h=1) if name == "cpu_direct" else s  # the lowest image has one row
        assert s in algorithm.space(p, HOST)
        harness.check(algorithm, p, HOST, s, w)
    assert jit.compiled == before + 1


@pytest.mark.parametrize("row", ROWS)
def test_every_rest_of_a_row_is_reached(row: str) -> None:
    """Images from one pixel to 70x70 by one code: all sizes of tiles, moved back and not."""
    algorithm, t, used, moved = GENERATED["cpu_direct"], Target.host(row, 2), set(), set()
    s = Schedule(tile_h=1, tile_w=8, vectors=1, unroll=2, block_rows=2, block_cols=2, split=1,
                 k_parts=1, streaming=False)
    for w in (*range(1, 34), 47, 70):
        p = Problem.parse(f"n1c3h{1 + w % 3 if w < 70 else 70}w{w}k9r3s3p1_f32_forward+bias")
        harness.check(algorithm, p, t, s, w)
        g = Geometry(p, s, t.lanes)
        used |= {size for size, count in zip(g.widths, g.pieces, strict=True) if count}
        covered = sum(size * count for size, count in zip(g.widths, g.pieces, strict=True))
        moved.add(covered - (p.conv_w - min((g.col_blocks - 1) * g.block_w, max(0, w - 8))))
    assert used == {8, 4, 2, 1}
    assert moved == set(range(8))  # columns that are computed twice


def _run(p: Problem, weight: torch.Tensor, tile_w: int) -> torch.Tensor:
    algorithm = GENERATED["cpu_depthwise"]
    s = algorithm.default(p, HOST).with_(tile_w=tile_w)
    o = harness.operands(p, "floats", seed=0)
    return harness.run(algorithm, p, HOST, s, o, algorithm.prepare(p, HOST, s, weight))


@pytest.mark.parametrize("line", ["n1c21h6w19k21r3s3p1g21_f32_forward",
                                  "n1c21h7w20k21r5s5u2p2d1x2g21_f32_forward"])
def test_a_pixel_has_the_same_bits_in_every_tile(line: str) -> None:
    p = Problem.parse(line)
    weight = torch.randn(p.k, 1, p.r, p.s)
    first, *others = [_run(p, weight, tile_w) for tile_w in (1, 4, 7, 12)]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("tap", [0, 2])
@pytest.mark.parametrize("w", [1, 2, 9, 30])
def test_a_tap_outside_the_image_adds_nothing(w: int, tap: int) -> None:
    p = Problem.parse(f"n1c21h5w{w}k21r3s3p1g21_f32_forward")
    weight = torch.zeros(p.k, 1, 3, 3)
    weight[:, :, 1, tap] = float("inf")
    y = _run(p, weight, 7)
    border = y[..., 0 if tap == 0 else w - 1]
    assert torch.equal(border, torch.zeros_like(border))
    assert not y[..., 1:w - 1].isfinite().any()


def test_threads_that_share_pixels_agree_on_them() -> None:
    """Tiles of two tasks overlap where one is moved back; nobody sees a sum that waits."""
    p = Problem.parse("n32c4h3w7k16r3s3p1_f32_forward+bias+silu")
    algorithm, o = GENERATED["cpu_direct"], harness.operands(p, "floats", seed=0)
    s = Schedule(tile_h=2, tile_w=7, vectors=1, unroll=1, block_rows=1, block_cols=1, split=1,
                 k_parts=1, streaming=False)
    plan = _plan(algorithm, p, HOST, p, s)
    run, weight = Executable(plan, algorithm), algorithm.prepare(p, HOST, s, o.weight)
    x = o.x.contiguous(memory_format=torch.channels_last)
    first = run(x, weight, o.bias, None)
    assert all(torch.equal(run(x, weight, o.bias, None), first) for _ in range(3000))

"""The ladder: every rung is the convolution, and says what it gave or why it does not apply."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tilewise.bench import ladder as ladder_module
from tilewise.bench import machine
from tilewise.bench.ladder import _barred, _sentence, ladder
from tilewise.bench.run import WrongResult
from tilewise.bench.rungs import STEPS, unroll
from tilewise.cli import NO, OK, USAGE, main
from tilewise.conv.running import ENGINE
from tilewise.core import Problem, Target
from tilewise.planner.measure import Timing

TINY = "n1c8h8w8k16r3s3p1_f32_forward+bias+relu"
LIMITS = {"peak": 1e11, "bandwidth": 1e10}


def climb(text: str) -> dict[str, ladder_module.Line]:
    with torch.no_grad():
        lines = ladder(Problem.parse(text), Target.host(threads=2), LIMITS, rounds=2)
    return {line.name: line for line in lines}


def test_the_ladder_has_its_rungs_and_says_why() -> None:
    lines = climb(TINY)
    rungs = [line for line in lines.values() if line.kind == "rung" and line.minimum]
    assert len(rungs) >= 9
    assert all(line.why for line in rungs)
    assert all(line.error < (5e-5 if "3 products" in line.name else 5e-6) for line in rungs)
    assert "tile_w=1 vectors=1 unroll=1" in lines["scalar loops"].schedule
    assert "tile_w=1 vectors=1 unroll=1" in lines["vectors"].schedule
    assert lines["unrolled input + GEMM"].bytes > 3 * lines["fused epilogue"].bytes
    assert [line.gain is None for line in rungs] == [True] + [False] * (len(rungs) - 1)
    assert lines["limit: multiply-adds"].minimum == Problem.parse(TINY).flops / 1e11
    assert {"torch nchw", "torch nhwc"} <= set(lines)


def test_rungs_that_do_not_apply_say_why() -> None:
    lines = climb("n1c6h9w9k6r3s3u2p1g3_f32_forward")
    assert "groups is 3" in lines["unrolled input + GEMM"].why
    assert "stride" in lines["Winograd F(2x2)"].why
    assert "nothing follows" in lines["fused epilogue"].why
    assert lines["register tile"].minimum


def test_a_wrong_rung_stops_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = STEPS[1].make

    def wrong(p: Problem, t: Target, before: object) -> object:
        rung = honest(p, t, before)
        return replace(rung, run=lambda x: rung.run(x) + 1e-3)

    monkeypatch.setattr(ladder_module, "STEPS", (replace(STEPS[1], make=wrong),))
    with pytest.raises(WrongResult, match="vectors: rms error"):
        climb(TINY)
    assert main(["ladder", TINY, "--rounds", "2"]) == NO


@pytest.mark.parametrize("text", ["n2c3h7w6k4r3s2u2x1p1x0-1d1x2_f32_forward",
                                  "n1c4h5w5k4r3s3p1_f32_forward"])
def test_unrolling_is_a_matrix_product(text: str) -> None:
    p = Problem.parse(text)
    x = torch.randn(p.n, p.c, p.h, p.w).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(p.k, p.c, p.r, p.s)
    top, bottom, left, right = p.padding
    wide = torch.nn.functional.pad(x, (left, right, top, bottom))
    expected = torch.nn.functional.conv2d(wide, weight, None, p.stride, 0, p.dilation)
    rows = weight.permute(0, 2, 3, 1).reshape(p.k, -1)
    found = torch.einsum("kd,ndhw->nkhw", rows, unroll(p, x))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ladder", TINY, "--rounds", "2", "--json"]) == OK
    data = json.loads(capsys.readouterr().out)
    assert data["kind"] == "ladder"
    assert data["settings"]["problem"] == TINY
    assert main(["ladder", TINY, "--rounds", "2"]) == OK
    assert "register tile" in capsys.readouterr().out
    assert main(["ladder", "nonsense"]) == USAGE


def timing(least: float, median: float) -> Timing:
    return Timing(least, median, 0.0)


@pytest.mark.parametrize("least, median, said", [
    (0.9, 0.9, "because"), (1.1, 1.1, "since not"), (0.9, 1.1, "no clear difference"),
    (1.0, 0.8, "no clear difference"), (0.98, 0.98, "no clear difference")])
def test_noise_has_no_reason(least: float, median: float, said: str) -> None:
    step = replace(STEPS[0], why="because", why_not="since not")
    assert _sentence(step, timing(1.0, 1.0), timing(least, median)).startswith(said)
    assert _sentence(step, None, timing(least, median)) == "because"


@pytest.mark.parametrize("least, spread, said", [
    (0.8, 0.84, "no clear difference"), (1.25, 0.84, "no clear difference"), (0.8, 0.1, "because"),
    (1.25, 0.1, "since not"), (0.4, 0.84, "because")])
def test_a_gain_below_the_spread_has_no_reason(least: float, spread: float, said: str) -> None:
    step = replace(STEPS[0], why="because", why_not="since not")
    found = _sentence(step, timing(1.0, 1.0), Timing(least, least, spread))
    assert found.startswith(said)
    assert ("with rounds 84% apart" in found) == (said == "no clear difference")


def test_a_peak_that_plain_rungs_pass_is_measured_again(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    honest = machine.facts
    monkeypatch.setattr(ladder_module, "STEPS", STEPS[1:2])
    monkeypatch.setattr(machine, "facts", lambda *args, **more: {
        **honest(*args, **{**more, "limits": False}), "peak": 1e6, "bandwidth": 1e6})
    assert main(["ladder", TINY, "--rounds", "2", "--json"]) == OK
    data = json.loads(capsys.readouterr().out)
    peak = data["machine"]["peak"]
    assert peak > 1e9
    for row in data["rows"]:
        if row["share"] is not None:
            assert row["share"] == pytest.approx(row["gflops"] * 1e9 / peak)


@pytest.mark.parametrize("text", ["lenet_a", "my_package.my_module:make_model"])
def test_a_model_is_no_layer(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ladder", text]) == USAGE
    assert f"tilewise explain {text} lists a model's layers" in capsys.readouterr().err


@pytest.mark.parametrize("algorithm, said", [
    ("cpu_direct_bf16x3", "its products keep 16 bits, and the default precision asks for 24"),
    ("cpu_direct_bf16x6", ""), ("cpu_direct", "")])
def test_rungs_of_fewer_bits_are_barred(algorithm: str, said: str) -> None:
    """Whatever their error is."""
    p, t = Problem.parse("n1c64h14w14k64r1s1_f32_forward"), Target.host(threads=2)
    plan = ENGINE.plan(p, t)
    assert _barred(replace(plan, algorithm=algorithm, error=1e-7)) == said
    assert "error is up to 1.0e-02" in _barred(replace(plan, algorithm="cpu_direct", error=1e-2))


@pytest.mark.skipif(not Target.host().row.matrix, reason="this machine has no matrix unit")
def test_the_matrix_unit_has_a_rung_for_1x1_filters() -> None:
    p = Problem.parse("n1c64h14w14k64r1s1_f32_forward")
    make = next(step.make for step in STEPS if step.name == "matrix unit, 3 products")
    assert make(p, Target.host(threads=2), []).plan.algorithm == "cpu_direct_bf16x3"

"""Nothing is hidden: every candidate is printed, with its time or with the reasons against it."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import tilewise
from tilewise.conv.running import ENGINE
from tilewise.core import InvalidProblem, Problem, Target, TilewiseError

AVX512 = Target("cpu", "avx512", 2)
LAYER = "n8c64h56w56k64r3s3p1_f32_forward+bias+relu"
TIME = r"\d+\.\d us estimate +\d+\.\d GF/s  error <= \de-\d\d  "


def every(t: Target) -> set[str]:
    return {a.name for a in ENGINE.planner.algorithms if a.is_for(t)}


def rows(text: str) -> dict[str, str]:
    """What is said first of each algorithm: the matrix unit gives one several lines."""
    found: dict[str, str] = {}
    for name, line in (line[2:].split(maxsplit=1) for line in text.splitlines()[2:]):
        found.setdefault(name, line)
    return found


def test_a_float64_problem_shows_refusals() -> None:
    text = str(tilewise.explain("n1c8h8w8k8r3s3p1_f64_forward", target=AVX512))
    title, size, first, *_ = text.splitlines()
    assert title == "n1c8h8w8k8r3s3p1_f64_forward on cpu:avx512:t2"
    assert re.fullmatch(r"\d\.\d+ GFLOP, \d+\.\d MB", size)
    assert first.startswith("> vendor")
    said = rows(text)
    assert set(said) == every(AVX512)
    assert said["cpu_direct"] == "refused: dtype is f64, needs f32"
    assert said["cpu_winograd"] == "refused: dtype is f64, needs f32"
    assert said["cpu_pointwise"] == (
        "refused: dtype is f64, needs f32; filter is 3x3, needs 1x1; "
        "padding is (1, 1, 1, 1), needs 0")
    assert re.match(TIME, said["vendor"])


@pytest.mark.parametrize("subject", [LAYER, Problem.parse(LAYER)], ids=["string", "problem"])
def test_every_candidate_is_printed(subject: str | Problem) -> None:
    explanation = tilewise.explain(subject, target=AVX512)
    text = str(explanation)
    assert repr(explanation) == text
    assert text.splitlines()[0] == f"{LAYER} on cpu:avx512:t2"
    assert text.splitlines()[1] == "1.850 GFLOP, 13.0 MB"
    said = rows(text)
    assert set(said) == every(AVX512)
    for name, line in said.items():
        assert re.match(TIME, line) or line.startswith("refused: "), name
    assert said["cpu_depthwise"].startswith("refused: groups is 1 for 64 input and 64 output")
    assert said["vendor"].endswith("-, then relu")  # what it cannot fuse
    assert "tile_w=" in said["cpu_direct"]
    times = [float(line.split()[0]) for line in said.values() if "refused" not in line]
    assert times == sorted(times)
    assert [line[0] for line in text.splitlines()[2:]].count(">") == 1


def test_what_is_first_is_what_runs() -> None:
    explanation = tilewise.explain(LAYER, target=AVX512)
    assert explanation.plan == explanation.candidates[0].plan
    assert f"> {explanation.plan.algorithm}" in str(explanation)


def test_a_bound_on_the_error() -> None:
    said = rows(str(tilewise.explain(LAYER, target=AVX512, max_error=3e-7)))
    assert re.fullmatch(r"refused: error is up to \d\.\de-\d\d, needs at most 3.0e-07; "
                        r"would take .* us with tile_h=.*",
                        said["cpu_direct"])
    assert "refused" not in said["reference"]


def test_measured_candidates() -> None:
    text = str(tilewise.explain("n1c16h14w14k16r3s3p1_f32_forward", effort="measure"))
    said = rows(text)
    assert set(said) == every(Target.host())
    timed = [name for name, line in said.items() if " us measured " in line]
    assert {"vendor", "cpu_direct"} <= set(timed)


@pytest.mark.parametrize("effort", ["estimate", "measure"])
def test_a_problem_that_nothing_can_run(effort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = [a for a in ENGINE.planner.algorithms
               if a.directions == {"forward"} and a.is_for(Target.host()) and a.device == "cpu"]
    monkeypatch.setattr(ENGINE.planner, "algorithms", forward)
    explanation = tilewise.explain("n1c8h8w8k8r3s3p1_f32_backward_weight", effort=effort)
    said = rows(str(explanation))
    assert explanation.plan is None
    assert ">" not in str(explanation)
    assert len(said) == len(forward)
    assert all("direction is backward_weight, needs forward" in line for line in said.values())


def test_what_cannot_be_explained() -> None:
    with pytest.raises(InvalidProblem, match="cannot read the problem 'conv 3x3'; needs a line"):
        tilewise.explain("conv 3x3")
    with pytest.raises(TilewiseError, match="effort is 'mesure', needs one of"):
        tilewise.explain(LAYER, effort="mesure")


def test_linear_layers_have_names() -> None:
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(1024, 1024)).eval()
    x = torch.randn(2, 1024)
    found = tilewise.explain(tilewise.optimize(model, x), x)
    assert [name for name, _ in found.layers] == ["1"]


def test_a_model_s_programs_are_told_with_their_memory() -> None:
    """Those for the example alone, however many sizes came before."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    model = tilewise.optimize(net)
    told = [tilewise.explain(model, torch.randn(1, 3, size, size)).program for size in (40, 12, 40)]
    assert all(text.startswith("one program: ") for text in told)
    assert told[0] == told[2] != told[1]
    weights = [text.split("; ")[1].split(", ")[1] for text in told]
    assert weights[0] == weights[2]
    model.train()
    assert tilewise.explain(model, torch.randn(1, 3, 12, 12)).program.startswith("no program")


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.b, self.drop = nn.Conv2d(32, 16, 1), nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.a(x))
        found: torch.Tensor = self.b(torch.cat((y, nn.functional.max_pool2d(y, 3, 1, 1)), 1))
        return found


def test_every_stage_can_be_seen() -> None:
    net, x = Parts().eval(), torch.randn(1, 3, 20, 20)
    has = {"captured": "BatchNorm2d(", "normalised": "BatchNorm2d(",
           "fused": "conv 3x3 3 to 16 + norm + relu(", "laid_out": "enter(p0)",
           "lowered": "max pool(", "placed": "channels 16 to 32 of", "bound": "bytes in all"}
    lacks = {"normalised": "Dropout", "fused": "BatchNorm2d", "laid_out": "max pool",
             "bound": "cat:"}
    before = {name: value.clone() for name, value in net.state_dict().items()}
    for subject in (net, tilewise.optimize(net)):
        found = {stage: str(tilewise.explain(subject, x, stage=stage)) for stage in has}
        for stage, text in has.items():
            assert text in found[stage], stage
        for stage, text in lacks.items():
            assert text not in found[stage], stage
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())


def test_a_stage_that_there_is_not() -> None:
    net, x = Parts().eval(), torch.randn(1, 3, 20, 20)
    with pytest.raises(TilewiseError, match="stage is 'fuse', needs one of captured, normalised"):
        tilewise.explain(net, x, stage="fuse")
    for subject, example in ((LAYER, None), (net, None)):
        with pytest.raises(TilewiseError, match="a stage needs a model and an example"):
            tilewise.explain(subject, example, stage="fused")


def test_a_stage_of_models_that_are_no_program_or_no_copies() -> None:
    class Counts(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n.add_(1)
            return super().forward(x)

    net, x = Counts().eval(), torch.randn(1, 3, 20, 20)
    assert "no program: it writes to" in str(tilewise.explain(net, x, stage="bound"))
    assert net.n == 0
    odd = nn.Sequential(torch.nn.utils.weight_norm(nn.Conv2d(3, 8, 3)), nn.Conv2d(8, 8, 3)).eval()
    with pytest.raises(TilewiseError, match="Sequential cannot be copied, which a stage needs"):
        tilewise.explain(odd, x, stage="bound")

"""Nothing is told of a wrong result, everybody gets the same numbers, files can be compared."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tilewise.bench import health, machine, peers, run, worker
from tilewise.bench.contenders import Contender, tilewise_contender, torch_contenders
from tilewise.bench.graph import CannotExport, export
from tilewise.bench.health import disturbed
from tilewise.bench.ncnn_file import write_ncnn
from tilewise.bench.remote import start_remote
from tilewise.bench.results import Result, compare
from tilewise.bench.run import Options, WrongResult, measure
from tilewise.bench.subjects import Subject, layer, subject
from tilewise.bench.suites import SHAPES, suite
from tilewise.cli import MISSING, NO, OK, main
from tilewise.core import Problem, TilewiseError
from tilewise.models import lenet_a, resnet18
from tilewise.planner.measure import interleaved

TINY = "n2c8h9w9k8r3s3p1_f32_forward+bias+relu"
QUICK = Options(rounds=2, budget=1.0, threads=1)
PROBLEMS = [TINY, "n1c4h8w8k4r3s3p1_f32_forward+bias+residual+relu+pool2",
            "n1c4h8w8k4r3s3p0-1_f32_nchw_forward+gelu", "n2c4h8w8k4r3s3u2g4_f64_forward+residual"]


@pytest.mark.parametrize("text", PROBLEMS)
def test_all_contenders_compute_the_problem(text: str) -> None:
    what = layer(Problem.parse(text))
    everybody = [*torch_contenders(what), tilewise_contender(what)]
    reference = what.model(what.example)
    for contender in everybody:
        torch.testing.assert_close(contender.run(), reference, rtol=1e-4, atol=1e-5)


def test_a_measurement_has_torch_first_and_ours() -> None:
    rows = measure(layer(Problem.parse(TINY)), QUICK)
    assert [row.family for row in rows] == ["torch", "torch", "torch", "tilewise"]
    assert max(row.ratio for row in rows if row.family == "torch") == 1.0
    assert all(row.minimum <= row.median for row in rows)


def test_a_cold_measurement_empties_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied = []
    monkeypatch.setattr(run, "_evict", lambda: emptied.append(1))
    measure(layer(Problem.parse(TINY)), replace(QUICK, cold=True))
    assert len(emptied) == 2 * 4


def test_no_speed_is_told_of_a_wrong_result(monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(s: Subject, *_: object) -> Contender:
        return Contender("tilewise", "tilewise", lambda: s.model(s.example) * (1 + 1e-4))

    monkeypatch.setattr(run, "tilewise_contender", wrong)
    with pytest.raises(WrongResult, match=r"rms error is 1\.0e-04"):
        measure(layer(Problem.parse(TINY)), QUICK)
    assert main(["bench", "layer", TINY, "--rounds", "2"]) == NO
    assert "ms" not in capsys.readouterr().out


@pytest.mark.parametrize("name, is_timed", [("openvino_default", True), ("openvino", False)])
def test_a_peer_in_its_own_precision_may_err_as_bfloat16_does(
        name: str, is_timed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    what = layer(Problem.parse(TINY))

    def rounded(graph: object, x: torch.Tensor, threads: int, directory: Path) -> Contender:
        return Contender(name, name, lambda: what.model(what.example).bfloat16().float())

    monkeypatch.setitem(peers.PEERS, name, ((), rounded))
    rows = measure(what, replace(QUICK, against=("torch", name)))
    assert 1e-3 < rows[-1].error < 1e-2
    assert (rows[-1].minimum is not None) == is_timed


def test_a_peer_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(graph: object, x: torch.Tensor, threads: int, directory: Path) -> Contender:
        return Contender("liar", "liar", lambda: torch.zeros(2, 8, 9, 9))

    monkeypatch.setitem(peers.PEERS, "liar", ((), wrong))
    rows = measure(layer(Problem.parse(TINY)), replace(QUICK, against=("torch", "liar")))
    assert rows[-1].contender == "liar"
    assert rows[-1].minimum is None
    assert "wrong" in rows[-1].note


def test_a_missing_peer_is_told_with_what_to_install(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "layer", TINY, "--against", "torch,openvino"]) == MISSING
    assert "pip install 'tilewise[bench]'" in capsys.readouterr().err
    assert main(["bench", "layer", TINY, "--against", "jax"]) == MISSING
    assert "--against jax=" in capsys.readouterr().err


@pytest.mark.parametrize("make, shape", [(lenet_a, (2, 1, 86, 86)), (resnet18, (1, 3, 64, 64))])
def test_the_graph_for_others_is_the_model(make: object, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(shape)
    ops = {
        "conv": lambda y, weight, bias, stride, padding, dilation, groups: F.conv2d(
            y, torch.from_numpy(weight), torch.from_numpy(bias), stride, padding, dilation,
            groups),
        "linear": lambda y, weight, bias: F.linear(y, torch.from_numpy(weight),
                                                   torch.from_numpy(bias)),
        "maxpool": lambda y, size, stride, padding: F.max_pool2d(y, size, stride, padding),
        "relu": torch.relu, "add": torch.add, "flatten": lambda y: y.flatten(1),
        "mean": lambda y: y.mean((2, 3), keepdim=True)}
    graph = export(model, x)
    nodes = [{"op": n.op, "name": n.name, "inputs": n.inputs, "attributes": n.attributes}
             for n in graph.nodes]
    arrays = {f"{n.name}.{key}": array for n in graph.nodes for key, array in n.arrays.items()}
    with torch.no_grad():
        found, expected = worker.evaluate(nodes, arrays, x, ops), model(x)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.std()))


def test_what_others_cannot_be_given_is_told() -> None:
    with pytest.raises(CannotExport, match="GELU"):
        export(torch.nn.Sequential(torch.nn.GELU()), torch.randn(1, 3, 4, 4))
    what = layer(Problem.parse("n1c4h8w8k4r3s3_f64_forward"))
    with pytest.raises(CannotExport, match="float64"):
        export(what.model, what.example)


def test_ncnn_files_split_what_is_read_twice(tmp_path: Path) -> None:
    graph = export(resnet18().eval(), torch.randn(1, 3, 64, 64))
    text, weights = write_ncnn(graph, tmp_path / "model")
    magic, counts, *lines = text.read_text().splitlines()
    layers, blobs = map(int, counts.split())
    assert magic == "7767517"
    assert layers == len(lines)
    made = [name for line in lines for name in _outputs(line)]
    used = [name for line in lines for name in _inputs(line)]
    assert len(made) == len(set(made)) == blobs
    assert len(used) == len(set(used))  # ncnn gives every blob one reader
    assert set(made) - set(used) == {"y"}
    numbers = sum(n.arrays[key].size for n in graph.nodes for key in n.arrays)
    marks = sum(n.op in ("conv", "linear") for n in graph.nodes)
    assert weights.stat().st_size == 4 * (numbers + marks)


def _inputs(line: str) -> list[str]:
    words = line.split()
    return words[4:4 + int(words[2])]


def _outputs(line: str) -> list[str]:
    words = line.split()
    first = 4 + int(words[2])
    return words[first:first + int(words[3])]


def test_a_peer_in_another_interpreter_tells_its_last_words(tmp_path: Path) -> None:
    import sys

    what = subject("lenet_a", 1)
    graph = export(what.model, what.example)
    with pytest.raises(TilewiseError, match=r"jax: .*No module named 'jax'"):
        start_remote("jax", sys.executable, graph, what.example, 1, tmp_path)
    with pytest.raises(TilewiseError, match="cannot start"):
        start_remote("jax", "/no/such/python", graph, what.example, 1, tmp_path)


def test_a_peer_in_another_interpreter_answers(tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    stub = ("import sys, numpy\n"
            "for line in sys.stdin:\n"
            "    if line.strip() == 'save': numpy.save(sys.argv[2] + '/y.npy', numpy.ones(3))\n"
            "    print('done', flush=True)\n")
    (tmp_path / "stub.py").write_text(stub)
    monkeypatch.setattr("tilewise.bench.remote.WORKER", tmp_path / "stub.py")
    what = subject("lenet_a", 1)
    contender = start_remote("jax", sys.executable, export(what.model, what.example), what.example,
                             1, tmp_path)
    assert contender.result(contender.run()).tolist() == [1.0, 1.0, 1.0]


def test_suites_are_problems() -> None:
    for name in SHAPES:
        assert all(p.epilogue.activation == "relu" for p in suite(name, 4))
    with pytest.raises(TilewiseError, match="suite is 'none'"):
        suite("none", 1)


def test_result_files_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    assert main(["bench", "layer", TINY, "--rounds", "2", "-o", str(old), "--json"]) == OK
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads(old.read_text())
    assert {"peak", "bandwidth", "processor", "versions"} <= set(said["machine"])
    assert said["plans"][0]["problem"] == TINY
    result = Result.load(old)
    slower = [{**row, "minimum": 2 * row["minimum"], "ratio": row["ratio"] / 2}
              if row["contender"] == "tilewise" else row for row in result.rows]
    replace(result, rows=slower).save(new)
    assert main(["bench", "compare", str(old), str(old)]) == OK
    assert main(["bench", "compare", str(old), str(new)]) == NO
    assert "regression" in capsys.readouterr().out
    assert compare(result, replace(result, rows=slower))[0].time == 0.5
    old.write_text("{}")
    with pytest.raises(TilewiseError, match="not a result file"):
        Result.load(old)
    with pytest.raises(TilewiseError, match="no subject in common"):
        compare(result, replace(result, rows=[]))
    assert asdict(result)["format"] == 1


def test_turns_can_be_watched_and_prepared() -> None:
    ticks, before = [], []
    times = interleaved([lambda: None, lambda: None], rounds=3, sample=0.001,
                        before=lambda: before.append(1), tick=lambda: ticks.append(1))
    assert len(ticks) == len(before) == 6
    assert [len(time.samples) for time in times] == [3, 3]


def test_a_result_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TilewiseError, match=r"none.json does not exist; tilewise bench .* -o FILE"):
        Result.load(tmp_path / "none.json")


@pytest.mark.parametrize("peak, busy", [(18e9, True), (343e9, False), (150e9, False)])
def test_a_peak_of_a_busy_machine_is_told(peak: float, busy: bool) -> None:
    found = disturbed({"isa": "amx", "threads": 2, "peak": peak})
    assert [finding.state for finding in found] == ["missing"] * busy
    assert all("18 GFLOP/s" in finding.what and "busy" in finding.what for finding in found)


def test_the_doctor_tells_of_a_busy_machine(monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(health, "examine", lambda *_: [])
    monkeypatch.setattr(machine, "facts", lambda *_, **more: {
        "isa": "amx", "threads": 2, "peak": 18e9})
    assert main(["doctor", "--json"]) == OK
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert "the machine is busy" in finding["what"]

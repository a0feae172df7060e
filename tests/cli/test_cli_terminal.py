"""What commands print on a terminal of 80 columns, and what their help says."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console

import tilewise
from tilewise.bench.ladder import Line
from tilewise.bench.peers import PEERS
from tilewise.bench.results import Row
from tilewise.bench.rungs import STEPS
from tilewise.bench.subjects import layer
from tilewise.cli import OK, bench, ladder, main
from tilewise.cli.app import app
from tilewise.core import Problem

TINY = "n1c8h8w8k8r3s3p1_f32_forward+bias+relu"
Screen = Callable[[int], None]


@pytest.fixture
def screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    """Makes stdout a terminal of some width."""
    threads = torch.get_num_threads()
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    tilewise.wisdom.forget()

    def make(width: int) -> None:
        console = Console(highlight=False, width=width, force_terminal=True, color_system=None)
        for name, module in list(sys.modules.items()):
            if name.startswith("tilewise.cli.") and hasattr(module, "console"):
                monkeypatch.setattr(module, "console", console)

    yield make
    tilewise.wisdom.forget()
    torch.set_num_threads(threads)


def lines(capsys: pytest.CaptureFixture[str], width: int = 80) -> list[str]:
    found = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert all(len(line) <= width for line in found if not line.startswith("written to"))
    assert not any("…" in line for line in found)
    return found


def test_explain_of_a_model_keeps_what_matters(screen: Screen,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    screen(80)
    assert main(["explain", "lenet_a", "--batch", "2"]) == OK
    header, *rest = lines(capsys)
    assert re.findall(r"\w+", header) == ["layer", "problem", "algorithm", "time", "torch", "error"]
    first = next(line for line in rest if line.startswith("features.0"))
    assert len(re.findall(r"\d\.\d{3} ms", first)) == 2
    assert re.search(r"\de-\d\d$", first)
    screen(400)
    assert main(["explain", "lenet_a", "--batch", "2"]) == OK
    assert "schedule" in lines(capsys, 400)[0]


def test_explain_of_a_problem_keeps_what_matters(screen: Screen,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    screen(80)
    assert main(["explain", TINY]) == OK
    text = "\n".join(lines(capsys))
    assert re.search(r"> cpu_\w+ .* us .* error <= \de-\d\d$", text, re.M)
    assert "tile_w=" not in text
    words = " ".join(text.split())
    assert "filter is 3x3, needs 1x1" in words  # reasons are told as a whole
    assert "us with" not in words


def test_tune_tells_torchs_time_and_the_gain(screen: Screen,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    screen(80)
    assert main(["tune", TINY]) == OK
    said = " ".join(" ".join(lines(capsys)).split())
    found = re.search(r"tilewise ([\d.]+) ms, torch ([\d.]+) ms .*: ([\d.]+)x as fast", said)
    assert found
    ours, theirs, gain = map(float, found.groups())
    assert gain == pytest.approx(theirs / ours, rel=0.2)
    assert "written to" in said


def ladder_lines() -> list[Line]:
    def rung(name: str, seconds: float, share: float, gain: float | None, error: float,
             algorithm: str = "cpu_direct", barred: str = "") -> Line:
        return Line(name, "rung", "because", seconds, seconds, 0.0, 123.4, share, 39_000_000,
                    57_800_000, error, gain, algorithm, "", barred)

    names = [step.name for step in STEPS]
    found = [rung(name, 0.002, 0.5, 1.0, 3e-7) for name in names[:-2]]
    return [*found, rung(names[-2], 0.00144, 3.81, 1.46, 1.9e-6, "cpu_winograd_bf16x3", "16 bits"),
            rung(names[-1], 0.002, 2.75, 0.72, 6e-7, "cpu_winograd"),
            Line("torch nhwc", "torch", "", 0.006, 0.006, 0.0, 308.0, 0.91, 13_000_000, None, 3e-7),
            Line("limit: multiply-adds", "limit", "", 0.0055, gflops=336.0, share=1.0)]


def test_the_ladder_keeps_its_labels_and_explains_itself(
        screen: Screen, capsys: pytest.CaptureFixture[str]) -> None:
    screen(80)
    ladder._print(TINY, ladder_lines())
    found = lines(capsys)
    for line in ladder_lines():  # a label and its numbers stand on one line
        row = next(text for text in found if text.startswith(line.name))
        assert re.search(r"\d", row.removeprefix(line.name))
    assert {"ms", "error", "gain"} <= set(found[1].split())
    said = " ".join(" ".join(found).split())
    assert "of peak counts the operations of the direct method" in said
    assert "Winograd does fewer" in said
    assert "the matrix unit has a higher peak" in said
    assert "0.72x as fast as the rung before it (matrix unit, 3 products)" in said
    assert "16 bits (max_error admits it, with its error of 1.9e-06)" in said
    for word in ("moved is", "workspace the", "gain is", "limit: memory is"):
        assert word in said
    assert "busy" not in said
    assert "3.00x as fast as torch" in said


def test_a_ladder_below_the_peak_has_nothing_to_explain(
        screen: Screen, capsys: pytest.CaptureFixture[str]) -> None:
    screen(80)
    ladder._print(TINY, ladder_lines()[:3])
    said = capsys.readouterr().out
    assert "higher peak" not in said
    assert "rung before it" not in said


@pytest.mark.parametrize("change, said", [
    ({"share": 38.0}, "a rung of the vector units passes it. The machine is busy"),
    ({"spread": 0.84}, "The spread of some rungs is above 50%: the machine is busy")])
def test_a_busy_machine_is_told(change: dict[str, float], said: str, screen: Screen,
                                capsys: pytest.CaptureFixture[str]) -> None:
    screen(80)
    ladder._print(TINY, [replace(line, **change) for line in ladder_lines()[:3]])
    found = " ".join(" ".join(lines(capsys)).split())
    assert said in found
    assert "higher peak" not in found


def test_bench_keeps_time_torch_and_error(screen: Screen,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row(TINY, "torch prepacked", "torch", 8e-8, 0.13, 0.14, 0.1, 1.0, 1.0, 8),
            Row(TINY, "tilewise", "tilewise", 8e-8, 0.083, 0.128, 0.7, 0.47, 0.36, 8)]
    screen(80)
    bench._print(layer(Problem.parse(TINY)), rows)
    found = lines(capsys)
    assert [text for text in ("least ms", "of torch's best", "error") if text in found[1]] == [
        "least ms", "of torch's best", "error"]
    assert sum(line.startswith(("torch prepacked", "tilewise")) for line in found) == 2


def parameters() -> Iterator[tuple[str, Any]]:
    """All helps, of commands and of what they take."""
    group: Any = typer.main.get_command(app)
    todo = [("tilewise", group)]
    while todo:
        name, command = todo.pop()
        yield name, command.help
        for parameter in command.params:
            yield f"{name} {parameter.name}", parameter.help
        todo += [(f"{name} {word}", sub) for word, sub in
                 getattr(command, "commands", {}).items()]


@pytest.mark.parametrize("name, text", [pytest.param(*pair, id=pair[0]) for pair in parameters()
                                        if not pair[0].endswith(" help")])
def test_help_is_in_sentences(name: str, text: str | None) -> None:
    """From a capital letter to a full stop, and more than a fragment."""
    first = " ".join((text or "").split())
    assert first[:1].isupper(), f"{name}: {text!r}"
    assert first.endswith("."), f"{name}: {text!r}"
    assert len(first.split()) >= 3, f"{name}: {text!r}"
    assert not re.match(r"(Of|As|A|An|Whether|One of|Only) ", first), f"{name}: {text!r}"
    assert "if not said" not in first, f"{name}: {text!r}"


@pytest.mark.parametrize("command", ["layer", "model", "suite"])
def test_bench_offers_every_peer(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", command, "--help"]) == OK
    said = capsys.readouterr().out
    assert all(re.search(rf"\b{name}\b", said) for name in PEERS)

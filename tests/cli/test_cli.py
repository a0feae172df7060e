"""The command line: answers for people and for programs, and exit codes for scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise.cli import MISSING, NO, OK, USAGE, main
from tilewise.cli.app import COMMANDS, GROUPS

TINY = "n1c8h8w8k8r3s3p1_f32_forward+bias+relu"


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tilewise.wisdom.forget()
    yield
    tilewise.wisdom.forget()
    torch.set_num_threads(threads)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> object:
    """What a command prints as JSON."""
    assert main([*arguments, "--json"]) == OK
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", [*COMMANDS, *GROUPS])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == OK
    assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [
    ["explain", "nonsense"], ["explain", "n1c8_f32_forward"], ["no-such-command"],
    ["explain", "lenet_a", "--shape", "3"], ["explain", TINY, "--effort", "hard"],
    ["explain", "no_such_module:model"], ["wisdom", "show", "no-such-file.json"]])
def test_wrong_usage_has_its_exit_code(arguments: list[str],
                                       capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == USAGE
    assert capsys.readouterr().err


def test_a_slip_of_the_finger_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "vgg-16"]) == USAGE
    assert "did you mean vgg16?" in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ImportError('none', name='typer')")
    code = (f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
            "from tilewise.cli import main; sys.exit(main(['--version']))")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == MISSING
    assert "pip install 'tilewise[cli]'" in found.stderr


def test_explain_of_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(capsys, "explain", TINY, "--batch", "3")
    assert data["problem"] == "n3" + TINY[2:]
    assert any("refused" in candidate for candidate in data["candidates"])
    assert main(["explain", TINY]) == OK
    assert "vendor" in capsys.readouterr().out


def test_explain_of_what_a_users_function_makes(capsys: pytest.CaptureFixture[str],
                                                tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def net():\n"
        "    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)), torch.randn(2, 3, 9, 9)\n")
    [layer] = answer(capsys, "explain", "mine:net")
    assert layer["problem"].startswith("n2c3h9w9k8r3s3")


def test_explain_of_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(capsys, "explain", "lenet_a", "--stage", "fused")
    assert data["stage"] == "fused"
    assert any("conv" in line for line in data["graphs"][0])
    assert main(["explain", "lenet_a", "--stage", "fusion"]) == USAGE
    assert main(["explain", TINY, "--stage", "fused"]) in (USAGE, OK)


def test_tuning_leaves_wisdom_that_travels(capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(capsys, "tune", TINY)
    assert [layer["source"] for layer in data["layers"]] == ["measured"]
    assert len(answer(capsys, "wisdom", "show")) >= 1
    assert answer(capsys, "wisdom", "export", "shipped.json")["plans"] >= 1
    assert answer(capsys, "wisdom", "import", "shipped.json")["plans"] >= 1
    assert answer(capsys, "wisdom", "merge", "all.json", "shipped.json")["plans"] >= 1
    assert set(answer(capsys, "wisdom", "check", "all.json").values()) == {""}


def test_stale_wisdom_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    answer(capsys, "tune", TINY, "-o", "old.json")
    text = Path("old.json").read_text()
    Path("old.json").write_text(text.replace('"llvmlite": "', '"llvmlite": "0.'))
    assert main(["wisdom", "check", "old.json"]) == NO
    assert "made with llvmlite 0." in capsys.readouterr().out


def test_doctor_finds_this_machine_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    data = answer(capsys, "doctor", "--threads", "1")
    assert data["healthy"]
    assert data["machine"]["peak"] > 1e9
    assert {finding["state"] for finding in data["findings"]} <= {"ok", "missing"}
    assert all(finding["advice"] for finding in data["findings"] if finding["state"] == "missing")
    assert main(["doctor"]) == OK
    said = capsys.readouterr().out
    assert "multiply-add peak" in said
    assert any(f"tilewise[{extra}]" in said for extra in ("gpu", "bench")) or "missing" not in said


def test_doctor_tells_what_is_broken(capsys: pytest.CaptureFixture[str],
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.bench import health

    monkeypatch.setattr(health, "conv2d", lambda x, *_, **__: x * 1.01)
    assert main(["doctor"]) == NO
    assert "wrong results" in capsys.readouterr().out

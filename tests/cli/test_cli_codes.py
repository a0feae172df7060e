"""The exit codes that docs/cli.md promises, command by command."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import tilewise
from tilewise.cli import MISSING, NO, OK, USAGE, main
from tilewise.cli.app import app

TINY = "n1c8h8w8k8r3s3p1_f32_forward+bias+relu"
USERS = """
import torch
def needs_arg(width): return torch.nn.Conv2d(3, width, 3)
def fails(): raise OSError("no weights here")
def none(): return None
instance = torch.nn.Conv2d(3, 8, 3)
number = 3
"""


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("users_models.py").write_text(USERS)
    Path("bench.json").write_text(json.dumps(result("bench", [row(2.0)])))
    Path("slower.json").write_text(json.dumps(result("bench", [row(1.0)])))
    Path("audit.json").write_text(json.dumps(result("gpu-audit", [{"gpu": "sm_80"}])))
    tilewise.wisdom.forget()
    yield
    tilewise.wisdom.forget()
    torch.set_num_threads(threads)


def row(ratio: float) -> dict[str, Any]:
    return {"subject": "a", "contender": "tilewise", "family": "tilewise", "minimum": 1.0,
            "median": 1.0, "spread": 0.0, "ratio": ratio, "paired": ratio, "error": 1e-7,
            "note": ""}


def result(kind: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    machine = {"processor": "p", "cores": 2, "system": "s", "threads": 2, "isa": "avx2",
               "l1": 1 << 15, "l2": 1 << 20, "l3": 1 << 25, "huge_pages": "always", "peak": 1e11,
               "bandwidth": 1e10, "versions": {}}
    return {"kind": kind, "command": "c", "date": "2026-01-01", "machine": machine,
            "settings": {}, "rows": rows, "plans": [], "format": 1}


WRONG = [
    ["bundle", "users_models:needs_arg", "-o", "out"],
    ["bundle", "lenet_b", "--example", "3xa", "-o", "out"], ["bundle", "lenet_b"],
    ["infer", "nowhere", "lenet_b", "-o", "out"], ["infer", "."],
    ["doctor", "--threads", "none"], ["profile", "no_such_model"],
    ["explain", "users_models:needs_arg"], ["explain", "users_models:fails"],
    ["explain", "users_models:none"], ["explain", "users_models:instance"],
    ["explain", "users_models:number"], ["explain", "users_models:nothing"],
    ["tune", "users_models:needs_arg"], ["tune", TINY, "--effort", "hard"],
    ["bench", "layer", "nonsense"], ["bench", "layer", TINY, "--against", "nobody"],
    ["bench", "model", "users_models:needs_arg"], ["bench", "suite", "nonsense"],
    ["bench", "layer", TINY, "-o", "no/such/directory/file.json"],
    ["bench", "compare", "bench.json", "nowhere.json"],
    ["bench", "compare", "bench.json", "audit.json"],
    ["bench", "--device", "tpu"],
    ["ladder", "nonsense"], ["ladder", TINY.replace("f32", "f64")],
    ["ladder", TINY.replace("f32", "bf16")],
    ["ladder", "n1c8h8w8k8r3s3p1_f32_backward_data"],
    ["ladder", TINY, "-o", "no/such/directory/file.json"],
    ["gpu-audit", "--gpu", "sm_1"],
    ["image", "nowhere.png"], ["image", "users_models.py"], ["image", "a.png", "--filter", "no"],
    ["report", "nowhere.json"], ["report", "audit.json"],
    ["report", "bench.json", "-o", "no/such/directory/page.html"],
    ["train", "nowhere", "-o", "run"], ["train", "."],
    ["selftest", "--deep", "--seeds", "many"], ["selftest", "--deep", "--part", "graphs"],
    ["selftest", "--deep", "--row", "none"],
    ["wisdom", "show", "nowhere.json"], ["wisdom", "check", "nowhere.json"],
    ["wisdom", "merge", "all.json", "nowhere.json"], ["wisdom", "import", "nowhere.json"],
    ["wisdom", "export", "no/such/directory/file.json"],
    ["wisdom", "ship", "nowhere.json"], ["wisdom", "ship", "-d", "no/such/directory"],
]


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if arguments[:2] == ["wisdom", "export"]:
        tilewise.wisdom.save()
    assert main(arguments) == USAGE
    said = capsys.readouterr()
    assert said.err
    assert not said.out
    assert "Traceback" not in said.err


def test_every_command_is_tried_with_wrong_usage() -> None:
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        for words in [[name, sub] for sub in getattr(command, "commands", ())] or [[name]]:
            assert any(arguments[:len(words)] == words for arguments in WRONG), words


@pytest.mark.parametrize("arguments, package, told", [
    (["gpu-audit"], "triton", "tilewise[gpu]"),
    (["bench", "layer", TINY, "--against", "openvino"], "openvino", "tilewise[bench]"),
    (["bench", "layer", TINY, "--against", "ncnn"], "ncnn", "tilewise[bench]"),
    (["report", "bench.json", "--png", "pictures"], "resvg_py", "tilewise[bench]"),
], ids=str)
def test_what_is_not_installed(arguments: list[str], package: str, told: str,
                               capsys: pytest.CaptureFixture[str],
                               monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == package else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    from tilewise.tools import gpu_audit

    monkeypatch.setattr(gpu_audit, "find_spec", without, raising=False)
    assert main(arguments) == MISSING
    assert told in capsys.readouterr().err


def test_a_report_that_cannot_be_drawn_leaves_the_old_one(
        monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name, *rest: None if name == "resvg_py" else find(name, *rest))
    Path("report.html").write_text("the old one")
    assert main(["report", "bench.json", "--png", "pictures"]) == MISSING
    assert Path("report.html").read_text() == "the old one"
    assert main(["report", "bench.json"]) == OK
    assert Path("report.html").read_text() != "the old one"


def test_the_answer_is_no() -> None:
    assert main(["bench", "compare", "bench.json", "slower.json"]) == NO
    assert main(["bench", "compare", "slower.json", "bench.json"]) == OK


def test_messages_say_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
            (["ladder", TINY.replace("f32", "f64")], f"dtype is f64, needs f32: tilewise ladder "
                                                     f"{TINY}"),
            (["explain", "users_models:needs_arg"], "needs a function without arguments"),
            (["explain", "users_models:instance"], "needs a function"),
            (["explain", "users_models:fails"], "no weights here")):
        assert main(arguments) == USAGE
        assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o644)])
def test_exported_wisdom_can_be_read_by_whom_the_umask_lets(umask: int, mode: int) -> None:
    """Never written by others: wisdom that others can write is not read."""
    tilewise.wisdom.save()
    Path("old.json").touch(0o600)
    before = os.umask(umask)
    try:
        for name in ("new.json", "old.json"):
            assert main(["wisdom", "export", name]) == OK
            assert Path(name).stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


def test_no_typer_is_allowed_that_crashes() -> None:
    """0.12.3 does not know `int | None`; up to 0.15.3 it takes releases of click that break it."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    least = re.search(r'"typer>=([\d.]+)"', text)
    assert least is not None
    assert tuple(map(int, least[1].split("."))) >= (0, 15, 4)

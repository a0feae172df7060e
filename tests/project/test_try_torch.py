"""The check that runs beside each version of torch can fail, and says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pages import script

import tilewise

check, driver, tables = script("check_torch"), script("try_torch"), script("write_tables")


def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check.outcome(check.self_check) == "yes"
    right = tilewise.conv2d
    monkeypatch.setattr(tilewise, "conv2d", lambda *args, **kw: 1.001 * right(*args, **kw))
    assert check.outcome(check.self_check).startswith("no: AssertionError: differs by ")


def test_a_model_that_is_left_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    small = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU())
    monkeypatch.setattr(check, "network", lambda: (small, torch.randn(1, 3, 12, 12)))
    monkeypatch.setattr(tilewise, "explain", lambda *_: "vendor")
    assert check.outcome(check.inference) == "no: AssertionError: no layer runs generated code"


def test_what_cannot_be_tried_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "has_compiler", lambda: False)
    assert check.outcome(check.compiled) == "not tried: no C++ compiler"


def test_versions_become_requirements() -> None:
    assert [driver.requirement(name) for name in ("2.8", "newest")] == ["torch==2.8.*", "torch"]


def test_the_table_has_what_pyproject_promises() -> None:
    rows = json.loads((tables.RESULTS / "torch_versions.json").read_text())["rows"]
    asked = list(dict.fromkeys(row["asked"] for row in rows))
    assert asked == [name for name in driver.VERSIONS if name in asked]
    assert {row["python"] for row in rows if row["asked"] == "2.13"} == set(driver.PYTHONS)
    for row in rows:
        if row["versions"]:  # else there is no build for that Python, and the table says so
            assert list(row["uses"]) == list(check.USES), row
            assert row["versions"]["python"].startswith(row["python"] + "."), row


def test_pairs_that_are_tried_again_replace_those_of_the_file(tmp_path: Path) -> None:
    def row(torch: str, python: str, said: str) -> dict[str, Any]:
        return {"asked": torch, "python": python, "versions": {}, "uses": {"inference": said}}

    path = tmp_path / "torch_versions.json"
    driver.save(path, [row("2.8", "3.13", "no: wrong"), row("2.13", "3.10", "yes")])
    driver.save(path, [row("2.6", "3.11", "yes"), row("2.8", "3.13", "yes"),
                       row("2.8", "3.9", "yes")])
    rows = json.loads(path.read_text())["rows"]
    assert [(each["asked"], each["python"]) for each in rows] == [
        ("2.6", "3.11"), ("2.8", "3.9"), ("2.8", "3.13"), ("2.13", "3.10")]
    assert all(each["uses"] == {"inference": "yes"} for each in rows)


def test_a_python_that_is_not_there_is_no_failure(tmp_path: Path) -> None:
    uses = driver.attempt("2.13", "2.99", tmp_path)["uses"]
    assert uses == {"python": "not tried: no python2.99 on the PATH"}
    assert tables._uses(uses) == "python: not tried: no python2.99 on the PATH"
    assert tables._uses({"inference": "yes"}) == "all"

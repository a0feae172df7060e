"""The check that runs beside each version of torch can fail, and says why."""

from __future__ import annotations

import json

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


def test_the_table_has_a_row_for_each_version() -> None:
    result = json.loads((tables.RESULTS / "torch_versions.json").read_text())
    assert [row["asked"] for row in result["rows"]] == list(driver.VERSIONS)
    for row in result["rows"]:
        assert list(row["uses"]) == list(check.USES), row["asked"]
    oldest = result["rows"][0]["versions"]["torch"]
    assert oldest.split(".")[:2] == ["2", "6"], "pyproject.toml asks for torch>=2.6"

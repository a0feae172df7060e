"""How many threads a process should have, and who says so."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise.bench import health
from tilewise.cli.output import set_threads
from tilewise.core import cores as module


@pytest.fixture
def four_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "visible", lambda: 8)
    monkeypatch.setattr(module, "quota", lambda: 4.5)
    monkeypatch.setattr(health, "visible", lambda: 8)
    monkeypatch.setattr(health, "quota", lambda: 4.5)


def test_workers_share_the_cores(four_of_eight: None) -> None:
    assert [tilewise.threads(workers) for workers in (1, 2, 3, 9)] == [4, 2, 1, 1]
    with pytest.raises(tilewise.TilewiseError, match="workers is 0, needs at least 1"):
        tilewise.threads(0)


def test_the_doctor_tells_of_the_quota(four_of_eight: None) -> None:
    fine, wrong = health._threads(4), health._threads(8)
    assert (fine.state, wrong.state) == ("ok", "broken")
    assert "4 cores to run on (a quota gives the time of 4.5 of 8)" in fine.what
    assert "torch.set_num_threads(4)" in wrong.advice


def test_commands_take_no_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        monkeypatch.setattr(module, "quota", lambda: 1.0)
        assert set_threads(None) == 1
        assert set_threads(2) == 2  # what is said holds
    finally:
        torch.set_num_threads(before)

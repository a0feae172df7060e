"""Random networks that learn: right as they are, and wrong where a fault is put in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewise.bench.judged import Mismatch
from tilewise.bench.learning import Unable, learned
from tilewise.bench.networks import Family, may_write
from tilewise.conv import batch_norm
from tilewise.conv import learned as learned_calls
from tilewise.model.effects import Effects


def try_all(seeds: Any) -> int:
    """How many could learn."""
    family, able = Family("learning"), 0
    for seed in seeds:
        try:
            learned(seed, family)
            able += 1
        except Unable:
            continue
    return able


def test_they_learn_as_torchs() -> None:
    assert try_all(range(60)) > 40


def without_share(norm: Any, statistics: Any, y: torch.Tensor) -> None:
    """Statistics stay as they are."""


def statistics_stay(patch: pytest.MonkeyPatch) -> None:
    for module in (batch_norm, learned_calls):
        patch.setattr(module, "follow", without_share)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "statistics": statistics_stay,
    "gradients": lambda patch: patch.setattr(
        learned_calls, "by_engine", lambda *args, right=learned_calls.by_engine: tuple(
            None if part is None else part * 1.1 for part in right(*args))),
    "writes": lambda patch: patch.setattr(Effects, "is_written_between", lambda *_: False)}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    with pytest.raises(Mismatch):
        try_all(filter(may_write, range(300)) if fault == "writes" else range(60))


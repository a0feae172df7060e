"""Optimised models in files: speed and plans come along."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import tilewise
from tilewise.conv.running import ENGINE
from tilewise.model import variants
from tilewise.model.captured import all_captured

LOADS = """
import sys, torch, tilewise
from tilewise.model.tuning import observe
model = torch.load(sys.argv[1], weights_only=False)
print(*(layer.plan.source for layer in observe(model, torch.randn(1, 8, 20, 20))))
"""


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 24, 3), nn.ReLU(), nn.Conv2d(24, 8, 3)).eval()


def test_what_was_measured_is_saved_with_the_model(tmp_path, monkeypatch):
    """Another process that loads it, without this one's wisdom, runs the same plans."""
    monkeypatch.setattr(variants, "_others", lambda *_: {})  # ours, however fast it is
    fast = tilewise.optimize(small(), torch.randn(1, 8, 20, 20), effort="measure")
    torch.save(fast, tmp_path / "model.pt")
    environment = {**os.environ, "TILEWISE_CACHE_DIR": str(tmp_path / "cache")}
    said = subprocess.run([sys.executable, "-c", LOADS, str(tmp_path / "model.pt")],
                          env=environment, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["wisdom", "wisdom"]


def test_what_was_measured_is_saved_with_a_released_model(tmp_path):
    fast = tilewise.optimize(small(), torch.randn(1, 8, 20, 20), effort="measure",
                             keep_original=False)
    torch.save(fast, tmp_path / "model.pt")
    tilewise.wisdom.forget()
    torch.load(tmp_path / "model.pt", weights_only=False)
    assert len(ENGINE.planner.wisdom.entries) == 2


def test_a_model_that_is_torchs_gets_nothing_of_ours():
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    model.tuned = "the user's own"
    fast = tilewise.optimize(model, torch.randn(1, 8), effort="measure")
    assert fast.tuned == "the user's own"


class Twin(nn.Module):
    """Copies itself, attribute by attribute, and tells nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x):
        return self.second(self.first(x).relu())

    def __deepcopy__(self, memo):
        new = Twin.__new__(Twin)
        for name, value in self.__dict__.items():
            new.__dict__[name] = copy.deepcopy(value, memo)
        return new


def test_a_copy_runs_itself():
    fast, x = tilewise.optimize(Twin().eval(), torch.randn(1, 8, 9, 9)), torch.randn(1, 8, 9, 9)
    with torch.no_grad():
        fast(x)
        twin = copy.deepcopy(fast)
        for parameter in twin.parameters():
            parameter.zero_()
        assert not twin(x).any()
        assert fast(x).any()


@pytest.mark.parametrize("again", [
    lambda model: pickle.loads(pickle.dumps(model)),
    lambda model: pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(model))))])
def test_a_loaded_model_is_captured_whole(again):
    """In one graph, inside of which images lie channels-last."""
    loaded, x = again(tilewise.optimize(small())), torch.randn(1, 8, 20, 20)
    with torch.no_grad():
        loaded(x)
    (captured,) = [found for found in all_captured(loaded) if found.captures]
    ((capture,),) = captured.captures.values()
    assert capture.is_channels_last
    assert len(capture.blocks) == 2

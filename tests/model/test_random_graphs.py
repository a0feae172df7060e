"""Random networks as programs: results against float64, memory between unmapped pages."""

from __future__ import annotations

import os

import pytest
import torch

import tilewise
from tilewise.bench import networks
from tilewise.bench.guarded import GuardedMemory
from tilewise.bench.judged import Mismatch
from tilewise.bench.networks import Family, judged, may_write
from tilewise.kernels.cpu import memory
from tilewise.model import binding, chains
from tilewise.model.effects import Effects
from tilewise.runtime import arena, program

COUNT = 3000 if os.environ.get("TILEWISE_LONG") else 12
CHUNKS = 4


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_programs_of_random_graphs(chunk):
    found = [judged(seed)[1] for seed in range(chunk, COUNT, CHUNKS)]
    assert sum(found) > 0.9 * len(found)  # else little is tested


def test_networks_that_write_to_what_others_read():
    family = Family("any")
    for seed in filter(may_write, range(80)):
        judged(seed, family, 2)


class OffByLittle(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x) * 1.001


def test_what_is_left_of_a_difference(monkeypatch):
    """Of this network's result one value is not zero: 2e-3, a difference of values near 0.4."""
    assert judged(30698, Family("15 on avx512"), 3).share < 0.5
    monkeypatch.setattr(networks, "optimize", lambda net: OffByLittle(tilewise.optimize(net)))
    with pytest.raises(Mismatch):
        judged(30698, Family("15 on avx512"), 3)


def wrong_stays(stays, right=arena.placed):
    """Values live a step shorter than they are read."""
    return right([stay._replace(last=max(stay.first, stay.last - 1)) for stay in stays])


def wrong_overlap(taken, size):
    """Places are given without looking who has them."""
    return 0


def wrong_offset(self, tensor, escapes=True, right=binding.Binder._kept):
    view = right(self, tensor, escapes)
    return view._replace(offset=0) if isinstance(view, program.View) else view


FAULTS = {
    "stays": lambda patch: patch.setattr(arena, "placed", wrong_stays),
    "places": lambda patch: patch.setattr(arena, "_lowest", wrong_overlap),
    "views": lambda patch: patch.setattr(binding.Binder, "_kept", wrong_offset),
    "affine": lambda patch: patch.setattr(
        chains, "_scale", lambda *args, right=chains._scale: right(*args)[::-1]),
    "writes": lambda patch: patch.setattr(Effects, "is_written_between", lambda *_: False),
    "arithmetic": lambda patch: patch.setattr(
        chains, "ARITHMETIC", {**chains.ARITHMETIC, torch.add: "sub"}),
}


def check_all():
    """Of all that can be drawn, and of a family in several sizes."""
    family = Family("any")
    for seed in range(24):
        judged(seed, family, 2) if seed % 2 else judged(seed)
    for seed in filter(may_write, range(24, 160)):
        judged(seed, family)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault, monkeypatch):
    FAULTS[fault](monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, KeyError)):
        check_all()


def test_the_pages_around_are_guarded():
    given = GuardedMemory().empty(16)
    assert given.isnan().all()
    assert memory.empty is not GuardedMemory.empty

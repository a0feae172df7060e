"""Random networks as programs: results against float64, memory between unmapped pages."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from support.graphs import Net
from support.guarded import GuardedMemory

import tilewise
from tilewise.kernels.cpu import memory
from tilewise.model import binding, chains
from tilewise.model.captured import all_captured
from tilewise.runtime import arena, program

COUNT = 3000 if os.environ.get("TILEWISE_LONG") else 12
CHUNKS = 4


def leaves(found):
    return list(found) if isinstance(found, tuple) else [found]


def programs_of(model):
    return [bound.program for captured in all_captured(model)
            for captures in captured.captures.values()
            for capture in captures for bound in capture.programs.bound]


def off(found, expected):
    """The largest error, relative to the result's size."""
    return max(((a - b).norm() / max(float(b.norm()), 1e-3)).item()
               for a, b in zip(leaves(found), leaves(expected), strict=True))


def check(seed, monkeypatch):
    """How far the program's result is off; and whether there was a program."""
    net = Net(seed).eval()
    model = tilewise.optimize(net)
    exact = copy.deepcopy(net).double()
    with torch.inference_mode():
        for _ in range(2):
            model(torch.randn(net.shape))
        bound = programs_of(model)
        x = torch.randn(net.shape)
        with monkeypatch.context() as patch:
            patch.setattr(program, "memory", GuardedMemory())
            found = model(x)
        assert [a.shape for a in leaves(found)] == [b.shape for b in leaves(net(x))]
        limit = 1e-4 + 20 * off(net(x), exact(x.double()))
        assert off(found, exact(x.double())) <= limit, seed
    return bool(bound)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_programs_of_random_graphs(chunk, monkeypatch):
    found = [check(seed, monkeypatch) for seed in range(chunk, COUNT, CHUNKS)]
    assert sum(found) > 0.9 * len(found)  # else little is tested


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
    "arithmetic": lambda patch: patch.setattr(
        chains, "ARITHMETIC", {**chains.ARITHMETIC, torch.add: "sub"}),
}


def check_all(monkeypatch):
    for seed in range(24):
        check(seed, monkeypatch)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault, monkeypatch):
    FAULTS[fault](monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, KeyError)):
        check_all(monkeypatch)


def test_the_pages_around_are_guarded():
    given = GuardedMemory().empty(16)
    assert given.isnan().all()
    assert memory.empty is not GuardedMemory.empty

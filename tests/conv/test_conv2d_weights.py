"""Prepared weights of tilewise.conv2d: made once, never stale, gone with their weight."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.convolutions import LAST, PLANES, assert_close, draw, theirs
from torch.nn import functional as F

import tilewise
from tilewise.algorithms import ALGORITHMS
from tilewise.runtime.weights import MADE

BY_NAME = {algorithm.name: algorithm for algorithm in ALGORITHMS}


def check_follows(change: Callable[[torch.nn.Parameter], object],
                  layout: torch.memory_format = PLANES) -> None:
    """After a change of the weight, the answer is that of the new one."""
    for algorithm in ("cpu_direct", "vendor", None):
        x, weight = draw(1, 8, 9, 9), draw(8, 8, 3, 3).contiguous(memory_format=layout)
        weight = torch.nn.Parameter(weight)
        first = tilewise.conv2d(x, weight, algorithm=algorithm)
        change(weight)
        y = tilewise.conv2d(x, weight, algorithm=algorithm)
        assert_close(y, F.conv2d(x, weight))
        assert not torch.allclose(first, y)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("layout", [PLANES, LAST])
def test_an_optimizer_step_is_noticed(optimizer: Any, options: dict[str, bool],
                                      layout: torch.memory_format) -> None:
    def step(weight: torch.nn.Parameter) -> None:
        weight.grad = torch.ones_like(weight)
        optimizer([weight], lr=0.1, **options).step()

    def step_of_one_element(weight: torch.nn.Parameter) -> None:
        weight.grad = torch.zeros_like(weight)
        weight.grad[5, 3, 1, 1] = 1
        optimizer([weight], lr=0.1, **options).step()

    check_follows(step, layout)
    check_follows(step_of_one_element, layout)


def test_changes_of_a_weight_are_noticed() -> None:
    other = draw(8, 8, 3, 3, seed=5)

    def assign(weight: torch.nn.Parameter) -> None:
        weight.data = other.clone()

    def in_place(weight: torch.nn.Parameter) -> None:
        with torch.no_grad():
            weight[3].mul_(-2)

    def one_element(weight: torch.nn.Parameter) -> None:
        with torch.no_grad():
            weight[5, 3, 1, 1] += 1

    def in_inference(weight: torch.nn.Parameter) -> None:
        with torch.inference_mode():
            weight.mul_(2)

    def load(weight: torch.nn.Parameter) -> None:
        module = torch.nn.Module()
        module.weight = weight
        module.load_state_dict({"weight": other})

    def through_a_view(weight: torch.nn.Parameter) -> None:
        weight.detach().select(0, 3).neg_()

    for change in (assign, in_place, one_element, in_inference, load, through_a_view):
        check_follows(change)
        check_follows(change, LAST)


@pytest.mark.parametrize("change", [lambda w: w.data.mul_(2),
                                    lambda w: w.detach().numpy().fill(1)], ids=["data", "numpy"])
@pytest.mark.parametrize("layout", [PLANES, LAST])
def test_changes_that_no_version_counter_tells(change: Callable[[Any], object],
                                               layout: torch.memory_format) -> None:
    check_follows(change, layout)


def test_training_equals_training_with_torch() -> None:
    found = []
    for function in (tilewise.conv2d, theirs):
        weight = torch.nn.Parameter(0.2 * draw(8, 8, 3, 3))
        optimizer = torch.optim.SGD([weight], lr=0.01, momentum=0.9, fused=True)
        for i in range(5):
            optimizer.zero_grad()
            y = function(draw(2, 8, 9, 9, seed=i), weight, padding=1, activation="relu")
            y.square().mean().backward()
            optimizer.step()
        found.append(weight.detach())
    assert_close(*found, 1e-4)
    assert not torch.allclose(found[0], 0.2 * draw(8, 8, 3, 3), atol=1e-3)


def test_a_weight_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    direct, prepared = BY_NAME["cpu_direct"], []
    prepare = direct.prepare
    monkeypatch.setattr(direct, "prepare", lambda *args: prepared.append(args) or prepare(*args))
    weight = torch.nn.Parameter(draw(8, 8, 3, 3))
    for seed in range(3):
        tilewise.conv2d(draw(2, 8, 9, 9, seed=seed), weight, algorithm="cpu_direct")
    assert len(prepared) == 1
    with torch.no_grad():
        weight.add_(1)
    for seed in range(3):
        tilewise.conv2d(draw(2, 8, 9, 9, seed=seed), weight, algorithm="cpu_direct")
    assert len(prepared) == 2


def test_weights_made_in_inference_mode() -> None:
    gc.collect()  # of others
    with torch.inference_mode():
        x, weight = draw(1, 8, 9, 9), draw(8, 8, 3, 3)
        before = len(MADE)
        for _ in range(2):
            assert_close(tilewise.conv2d(x, weight, algorithm="cpu_direct"), F.conv2d(x, weight))
            weight.mul_(2)
        assert len(MADE) == before + 1
        del weight
        gc.collect()
        assert len(MADE) == before


def test_a_prepared_weight_goes_with_its_weight() -> None:
    gc.collect()
    before, bytes_before = len(MADE), MADE.total
    weight = draw(64, 64, 3, 3)
    tilewise.conv2d(draw(1, 64, 9, 9), weight, algorithm="cpu_direct")
    tilewise.conv2d(draw(1, 64, 9, 9), weight, algorithm="cpu_pixels")
    assert len(MADE) == before + 2
    assert MADE.total >= bytes_before + 2 * weight.numel() * 4
    del weight
    gc.collect()
    assert (len(MADE), MADE.total) == (before, bytes_before)


def test_a_weight_at_the_address_of_a_dead_one() -> None:
    x, seen = draw(1, 8, 9, 9), set()
    for seed in range(50):
        weight = draw(8, 8, 3, 3, seed=seed)
        seen.add((id(weight), weight.data_ptr()))
        assert_close(tilewise.conv2d(x, weight, algorithm="cpu_direct"), F.conv2d(x, weight))
        del weight
    assert len(seen) < 50  # some did come back

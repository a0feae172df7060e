"""Weights of gradients of inputs by strides alone: the same bits as from a tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise.algorithms import ALGORITHMS
from tilewise.core import Problem, Schedule, Target
from tilewise.kernels.cpu.prepare import winograd
from tilewise.kernels.cpu.prepare.mirrored import Mirrored, mirror, mirrored

T = Target.host(threads=2)
BY_STRIDES = [a for a in ALGORITHMS if a.by_strides and a.is_for(T)]


def prepared(algorithm: Any, p: Problem, weight: Any, **tunables: Any) -> torch.Tensor:
    s = algorithm.default(p, T)
    q, of_weight = algorithm.weight_of(p, Schedule(**{**dict(s), **tunables}))
    made: torch.Tensor = algorithm.prepare(q, T, of_weight, weight)
    return made


@pytest.mark.parametrize("algorithm", BY_STRIDES, ids=lambda a: a.name)
@pytest.mark.parametrize("shape", [(5, 7, 3, 3), (33, 16, 2, 5), (16, 40, 3, 1)])
def test_the_same_bits(algorithm: Any, shape: tuple[int, int, int, int]) -> None:
    k, c, r, s = shape
    p = Problem(1, k, 12, 12, c, r, s)
    whole = torch.randn(k, c, r, s)
    weights = [whole, whole.contiguous(memory_format=torch.channels_last),
               torch.randn(k, c, 2 * r, 2 * s)[:, :, ::2, 1::2]]
    for weight in weights:
        assert torch.equal(prepared(algorithm, p, Mirrored(weight)),
                           prepared(algorithm, p, mirror(weight, 1)))


def test_winograd_is_among_them() -> None:
    assert "cpu_winograd" in {a.name for a in BY_STRIDES}


def test_groups_are_tensors() -> None:
    weight = torch.randn(8, 2, 3, 3)
    assert isinstance(mirrored(weight, 2, True), torch.Tensor)
    assert isinstance(mirrored(weight, 1, False), torch.Tensor)
    assert isinstance(mirrored(weight, 1, True), Mirrored)


def test_large_weights_bypass_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values; channels do not fill the last vectors."""
    algorithm: Any = BY_STRIDES[0]
    p, weight = Problem(1, 19, 12, 12, 35, 3, 3), torch.randn(35, 19, 3, 3)
    expected = prepared(algorithm, p, weight)
    monkeypatch.setattr(winograd, "LARGE", 0)
    assert winograd.maker(p, algorithm.default(p, T), T.row) is winograd.make_streaming
    assert torch.equal(prepared(algorithm, p, weight), expected)

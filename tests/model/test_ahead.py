"""What a first look at a graph asks for, and that nobody notices it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise
from tilewise.model import ahead


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 24, 3, stride=2)
        self.last = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).relu()).relu()
        return self.last(y.mean((2, 3)))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[Any]:
    """Requests, none of which anybody compiles."""
    found: list[Any] = []
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ahead, "is_compiled", lambda request: False)
    monkeypatch.setattr(ahead.AHEAD, "ask", lambda requests: found.extend(requests) or 0)
    return found


@torch.inference_mode()
def test_all_convolutions_are_asked_for(asked: list[Any]) -> None:
    tilewise.optimize(Small().eval())(torch.randn(1, 3, 20, 20))
    assert {request.p.c for request in asked} >= {3, 8}


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def test_modes_do_not_see_it(asked: list[Any]) -> None:
    model, x = tilewise.optimize(Small().eval()), torch.randn(1, 3, 20, 20)
    with Counting() as first:
        model(x)
    with Counting() as second:
        model(x)
    assert first.seen["aten.mean.dim"] == second.seen["aten.mean.dim"] == 1, first.seen
    assert not asked


class Drawing(Small):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand_like(x))


@torch.inference_mode()
def test_no_number_is_drawn(asked: list[Any]) -> None:
    model, x = tilewise.optimize(Drawing().eval()), torch.randn(1, 3, 20, 20)
    torch.manual_seed(3)
    model(x)
    after = torch.rand(1)
    torch.manual_seed(3)
    torch.rand_like(x)
    assert torch.equal(after, torch.rand(1))
    assert not asked


class Writing(Small):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


@torch.inference_mode()
def test_buffers_are_written_once(asked: list[Any]) -> None:
    model = tilewise.optimize(Writing().eval())
    model(torch.randn(1, 3, 20, 20))
    assert float(model.calls) == 1


def test_training_is_left_alone(asked: list[Any]) -> None:
    tilewise.optimize(Small())(torch.randn(1, 3, 20, 20)).sum().backward()
    assert not asked

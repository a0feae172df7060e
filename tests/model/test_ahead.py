"""What a first look at a graph asks for, and that nobody notices it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise
from tilewise.core import Problem
from tilewise.core.lru import Lru
from tilewise.kernels.cpu.emit import launch
from tilewise.kernels.cpu.emit.requests import Request
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


class Between(nn.Module):
    """A chain, a concatenation, a pool and a norm between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(16, 8, 3)
        self.norm, self.last = nn.GroupNorm(2, 16), nn.Linear(8, 40)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = torch.cat((y * torch.sigmoid(y + 1), nn.functional.max_pool2d(y, 3, 1, 1)), 1)
        return self.last(self.second(self.norm(y)).permute(0, 2, 3, 1))


@pytest.mark.usefixtures("by_our_kernels")
@torch.inference_mode()
def test_what_is_between_convolutions_is_asked_for(asked: list[Any],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "KERNELS", Lru(limit=512))  # as a new process has none
    net, x = Between().eval(), torch.randn(1, 3, 20, 20)
    found = tilewise.optimize(net)(x)
    torch.testing.assert_close(found, net(x), rtol=1e-4, atol=1e-4)
    assert 40 in {request.p.k for request in asked if isinstance(request.p, Problem)}
    kinds = {request.make.__module__.rpartition(".")[2] for request in asked}
    assert kinds >= {"pointwise", "concatenation", "pools", "groups"}
    for request in asked:
        assert request.can_travel
        again = Request.from_line(request.to_line())
        assert again.key == request.key
        assert str(again.module().ir) == str(request.module().ir)


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

"""Signals lie channels-last between convolutions, and nobody can tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.convolutions import assert_close
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise
from tilewise.model import nn as blocks


class Demucs(nn.Module):
    """Down and up again with gates and a shortcut, as nets for sound have it."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.gate = nn.Conv1d(2, 32, 8, 4, 2), nn.Conv1d(32, 64, 1)
        self.deep, self.norm = nn.Conv1d(32, 32, 3, padding=1, bias=False), nn.BatchNorm1d(32)
        self.up, self.last = nn.ConvTranspose1d(64, 16, 8, 4, 2), nn.Conv1d(16, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.glu(self.gate(F.relu(self.down(x))), 1)
        deep = F.relu(self.norm(self.deep(x)), inplace=True)
        x = torch.cat([deep + x, x], 1)
        return self.last(torch.tanh(self.up(x)))


class Speech(nn.Module):
    """Two convolutions before a transformer, which takes (N, L, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(20, 48, 3, padding=1), nn.Conv1d(48, 48, 3, 2, 1)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.gelu(self.second(F.gelu(self.first(x))))
        return x, self.head(x.permute(0, 2, 1))


class Gated(nn.Module):
    """Halves of channels, one of which lets the other pass; the last sum is nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 16, 1), nn.Conv1d(16, 3, 1)
        self.wide = nn.ModuleList(nn.Conv1d(16, 32, 3, padding=d, dilation=d) for d in (1, 2))
        self.norms = nn.ModuleList(nn.BatchNorm1d(32) for _ in range(2))
        self.narrow = nn.ModuleList(nn.Conv1d(16, 32, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.first(x), 0
        for wide, norm, narrow in zip(self.wide, self.norms, self.narrow):
            value, gate = norm(wide(x)).chunk(2, 1)
            more, skip = narrow(torch.tanh(value) * torch.sigmoid(gate)).split(16, 1)
            x, total = x + more, total + skip
        return self.last(F.relu(total))


class Seen(nn.Module):
    """What lies between is viewed, and given back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 8, 3, padding=1), nn.Conv1d(8, 8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.first(x)
        return x, x.view(x.shape[0], -1), self.second(x)


def seen_by_blocks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether channels lie side by side in what each block of a call is given."""
    seen: list[bool] = []
    whole: Callable[..., Tensor] = blocks.Block._anew

    def anew(self: blocks.Block, x: Tensor, *more: object) -> Tensor:
        seen.append(x.stride(-2) == 1)
        return whole(self, x, *more)

    monkeypatch.setattr(blocks.Block, "_anew", anew)
    return seen


def same(ours: object, theirs: object) -> None:
    for mine, other in zip(*([x] if isinstance(x, Tensor) else x for x in (ours, theirs))):
        assert_close(mine, other)
        assert mine.stride() == other.stride()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("whole", [True, False])
@torch.no_grad()
def test_between_convolutions(batch: int, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Demucs().eval(), torch.randn(batch, 2, 400)
    ours = tilewise.optimize(model, keep_original=whole)
    seen = seen_by_blocks(monkeypatch)
    same(ours(x), model(x))
    assert seen == [True] * 5
    same(ours(x), model(x))


@torch.no_grad()
def test_parts_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Gated().eval(), torch.randn(2, 1, 3000)
    ours = tilewise.optimize(model)
    seen = seen_by_blocks(monkeypatch)
    same(ours(x), model(x))
    assert seen == [True] * 6
    assert not [line.step for line in tilewise.profile(ours, x).lines
                if line.by == "torch" and "conv" not in line.step]


@torch.no_grad()
def test_they_leave_as_torch_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Speech().eval(), torch.randn(2, 20, 100)
    seen = seen_by_blocks(monkeypatch)
    ours = tilewise.optimize(model)
    for given in (x, torch.randn(2, 100, 20).transpose(1, 2), x[:, :, ::2]):
        same(ours(given), model(given))
    assert seen[:2] == [True, True]


@torch.no_grad()
def test_what_is_seen_lies_as_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Seen().eval(), torch.randn(2, 4, 30)
    seen = seen_by_blocks(monkeypatch)
    same(tilewise.optimize(model)(x), model(x))
    assert not any(seen)


class Dropped(nn.Module):
    """Numbers are drawn in the order of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(8, 16, 3, padding=1), nn.Conv1d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(F.relu(self.first(x)), 0.5, self.training))


def test_random_numbers_are_those_of_torch() -> None:
    model, x = Dropped().train(), torch.randn(2, 8, 60)
    ours = tilewise.optimize(model)
    found = []
    for net in (ours, model):
        torch.manual_seed(1)
        found.append(net(x))
    assert_close(*found)


class Rows(nn.Module):
    """Signals become images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(8, 16, 3, padding=1), nn.Conv2d(16, 16, (1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)[:, :, None])


@torch.no_grad()
@pytest.mark.parametrize("model", [
    Rows(), nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 1, 3)),
    nn.Sequential(nn.Conv1d(8, 16, 3), nn.ReLU(), nn.ConvTranspose1d(16, 1, 4, 2, 1)),
    nn.Sequential(nn.Conv1d(8, 8, 60), nn.ReLU(), nn.Conv1d(8, 8, 1))],
    ids=["images", "one channel", "transposed", "one value"])
def test_strides_are_those_of_torch(model: nn.Module) -> None:
    x, ours = torch.randn(2, 8, 60), tilewise.optimize(model)
    for _ in range(3):
        same(ours(x), model(x))


@torch.no_grad()
def test_without_a_batch() -> None:
    model, x = nn.Sequential(nn.Conv1d(4, 8, 1), nn.ReLU(), nn.Conv1d(8, 3, 3)), torch.randn(4, 50)
    same(tilewise.optimize(model)(x), model(x))


def test_gradients() -> None:
    torch.manual_seed(0)
    model = Demucs().train()
    ours = tilewise.optimize(model)
    x = torch.randn(2, 2, 400)
    found = []
    for net in (model, ours):
        given = x.clone().requires_grad_()
        net(given).square().sum().backward()
        found.append((given.grad, *(p.grad for p in net.parameters())))
        model.zero_grad()
    for mine, other in zip(found[1], found[0], strict=True):
        assert_close(mine, other, 1e-4)


@torch.no_grad()
def test_it_is_one_program() -> None:
    model, x = Demucs().eval(), torch.randn(1, 2, 4000)
    lines = tilewise.profile(tilewise.optimize(model, x), x).lines
    assert sum(line.by != "torch" for line in lines) >= 5

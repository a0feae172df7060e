"""Programs give tensors as torch does: the same object where it is the same, else another."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewise


class Net(nn.Module):
    def __init__(self, more: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.register_buffer("kept", torch.arange(6.0).view(2, 3))
        self.p, self.more = nn.Parameter(torch.arange(4.0)), [more]

    def forward(self, x: Tensor) -> Any:
        y = self.b(torch.relu(self.a(x)))
        return y, *self.more[0](self, x, y)


RESULTS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "a buffer": lambda s, x, y: (s.kept, s.p),
    "of a buffer": lambda s, x, y: (s.kept.view(-1), s.kept.t(), s.kept.detach()),
    "of a parameter": lambda s, x, y: (s.p[1:], s.p.detach(), s.p),
    "wider": lambda s, x, y: (s.kept[None].expand(2, -1, -1),),
    "empty": lambda s, x, y: (y[:, :0], x[:, :0], y.new_zeros(0, 4)),
    "the input": lambda s, x, y: (x, x.detach(), x[:], x.view(x.shape)),
    "of the input": lambda s, x, y: (x[:, 1:], x.detach(), x.view(-1)),
    "itself": lambda s, x, y: (y, y.detach(), y[:], y.view_as(y)),
    "a view twice": lambda s, x, y: (lambda part: (part, part, y[:, 1:]))(y[:, 1:])}


def relations(results: tuple[Tensor, ...], model: Any, x: Tensor) -> list[Any]:
    """What a caller sees beside values."""
    known = (*results, x, model.kept, model.p)
    return [(tuple(one.shape), one.requires_grad, [one is other for other in known])
            for one in results]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", RESULTS)
def test_who_is_who(name: str, grad: bool) -> None:
    """The caller gives each result another form, which no later call may see."""
    theirs = Net(RESULTS[name]).eval()
    ours = tilewise.optimize(copy.deepcopy(theirs))
    earlier: list[Tensor] = []
    for side in (24, 24, 17, 24, 24, 17, 24):
        x = torch.randn(2, 3, side, side).requires_grad_(grad)
        again = x.detach().clone().requires_grad_(grad)
        with torch.no_grad():
            found, right = ours(x), theirs(again)
        assert relations(found, ours, x) == relations(right, theirs, again)
        held = [id(ours.kept), id(ours.p)]
        assert not any(one is old for one in found for old in earlier if id(one) not in held)
        for one, other in zip(found, right, strict=True):
            assert torch.allclose(one, other, atol=1e-5)
        own = {id(one): one for one in found if id(one) not in held and one is not x}
        for one in own.values():
            if not one.requires_grad:
                one.unsqueeze_(0)
        assert x.shape == again.shape
        earlier += found


class Looking(nn.Module):
    """A part that cannot be traced, and sees whether a gradient is wanted."""

    def forward(self, a: Tensor) -> Tensor:
        time.time()
        return a * (2 if a.requires_grad else 3)


def test_parts_see_what_torch_gives_them() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.part = Looking()

        def forward(self, x: Tensor) -> Tensor:
            y = self.b(torch.relu(self.a(x)))
            return y + self.part(x.detach())[:, :1] + self.part(x)[:, 1:2] + self.part(x[:])[:, 2:]

    theirs = Whole().eval()
    ours = tilewise.optimize(copy.deepcopy(theirs))
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(2, 3, 24, 32, requires_grad=True)
            assert torch.allclose(ours(x), theirs(x), atol=1e-4)

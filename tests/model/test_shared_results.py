"""Results that share memory, of models whose images lie channels-last inside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewise
from tilewise.model import capture

FORMS: dict[str, Callable[[Tensor], Any]] = {
    "itself and detached": lambda y: {"a": y, "b": y.detach()},
    "detached and itself": lambda y: [y.detach(), y],
    "parts": lambda y: y.chunk(2, 1),
    "a part, the whole and another part": lambda y: (y[:, :3], y, y[:, 2:]),
    "views of views": lambda y: (y[:, :6][:, 2:], y.permute(0, 2, 3, 1), y.flatten(2)),
    "twice": lambda y: (y, y),
    "changed in place": lambda y: (y, y.mul_(2)),
    "changed afterwards": lambda y: (y.detach(), y.mul_(2), y[:, 1:3].add_(1)),
    "apart": lambda y: (y, y * 2),
    "one of two": lambda y: (y, y.expand_as(y * 2), y[:, 0]),
}


class Net(nn.Module):
    """Two convolutions, and one that reads what is also a result."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.form, self.a, self.b = form, nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.c = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.b(self.a(x).relu())
        found = self.form(y)
        return found, self.c(y)


def leaves(found: Any) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(found)


def relations(found: list[Tensor]) -> list[Any]:
    """Which results lie in one memory, where, and how."""
    places = [(y.untyped_storage().data_ptr(), y.storage_offset(), y.stride()) for y in found]
    return [(place[0] == other[0], place[1] - other[1] if place[0] == other[0] else None, place[2])
            for place in places for other in places]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("form", FORMS)
def test_results_share_what_torchs_share(form: str, grad: bool,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[capture.Capture] = []
    settle = capture.Capture.settle
    monkeypatch.setattr(capture.Capture, "settle", lambda self: (made.append(self), settle(self)))
    torch.manual_seed(0)
    theirs = Net(FORMS[form])
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(2, 3, 9, 9)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            found, right = leaves(ours(x)), leaves(theirs(x))
            assert relations(found) == relations(right)
            for y, expected in zip(found, right, strict=True):
                assert torch.allclose(y, expected, atol=1e-5)
        if grad:
            for results in (found, right):
                sum(y.square().sum() for y in results if y.requires_grad).backward()
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.allclose(one.grad, other.grad, atol=1e-3, rtol=1e-4)
    assert made
    assert all(one.is_channels_last for one in made) == (form != "one of two")


def test_sums_of_tuples_lie_as_torchs() -> None:
    class Tuples(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = self.b(self.a(x))
            return (*(y.split([3, 5], 1) + (y * 2,)), self.a(x))

    theirs = Tuples()
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(2, 3, 8, 8)
    for _ in range(2):
        for one, other in zip(ours(x), theirs(x), strict=True):
            assert torch.allclose(one, other, atol=1e-4)
            assert one.stride() == other.stride()

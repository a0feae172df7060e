"""Strided filters of one tap: torch, which would leave its memory, is given the pixels they see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise
from tilewise.conv.calls import Call
from tilewise.conv.volume_gradients import by_torch


class Watched(TorchDispatchMode):
    """Notes the strides of torch's gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        if function is torch.ops.aten.convolution_backward.default:
            self.seen.append(tuple(args[4]))
        return function(*args, **(kwargs or {}))


def twice(function: Any, leaves: list[Tensor]) -> list[Tensor]:
    """First and second gradients."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    return [g.detach() for g in (*first, *second)]


def compare(ours: Any, theirs: Any, leaves: list[Tensor]) -> list[tuple[int, ...]]:
    """The strides that torch was given."""
    with Watched() as watched:
        found = twice(ours, leaves)
    for one, other in zip(found, twice(theirs, [leaf.double() for leaf in leaves]), strict=True):
        assert float((one - other).norm()) < 1e-5 * float(other.norm())
    return watched.seen


@pytest.mark.parametrize(("stride", "padding"), [((2, 1, 3), (0, 0, 0)), ((2, 2, 2), (1, 0, 2))])
def test_volumes(stride: Any, padding: Any) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(2, 3, 5, 9, 8), torch.randn(5, 3, 1, 1, 1), torch.randn(5)]
    seen = compare(lambda *given: tilewise.conv3d(*given, stride, padding),
                   lambda *given: F.conv3d(*given, stride, padding), leaves)
    assert seen
    assert set(seen) == {(1, 1, 1)}


def test_first_gradients_of_volumes_with_uneven_padding() -> None:
    x, weight = torch.randn(2, 4, 5, 9, 8), torch.randn(6, 2, 1, 1, 1)
    call = Call(x, weight, None, None, (2, 1, 3), (1, 0, 0, 2, 3, 1), (1, 1, 1), 2)
    wide = F.pad(x.double(), (3, 1, 0, 2, 1, 0)).requires_grad_()
    ours = weight.double().requires_grad_()
    y = F.conv3d(wide, ours, None, (2, 1, 3), groups=2)
    grad = torch.randn(y.shape)
    y.backward(grad.double())
    with Watched() as watched:
        dx, dw, db = by_torch(call, grad, (True, True, True))
    torch.testing.assert_close(dx, wide.grad[:, :, 1:, :9, 3:11].float())
    torch.testing.assert_close(dw, ours.grad.float())
    torch.testing.assert_close(db, grad.sum((0, 2, 3, 4)))
    assert watched.seen == [(1, 1, 1)]


@pytest.mark.parametrize(("stride", "padding", "more"), [
    ((2, 2), (0, 0), (0, 0)), ((2, 3), (1, 0), (1, 2)), ((1, 3), (0, 1), (0, 0))])
def test_transposed(stride: Any, padding: Any, more: Any) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(2, 4, 5, 6), torch.randn(4, 3, 1, 1), torch.randn(6)]
    seen = compare(lambda *given: tilewise.conv_transpose2d(*given, stride, padding, more, 2),
                   lambda *given: F.conv_transpose2d(*given, stride, padding, more, 2), leaves)
    assert seen
    assert set(seen) == {(1, 1)}


def test_larger_filters_keep_their_stride() -> None:
    leaves = [torch.randn(1, 4, 5, 6), torch.randn(4, 3, 2, 2)]
    seen = compare(lambda *given: tilewise.conv_transpose2d(*given, stride=2),
                   lambda *given: F.conv_transpose2d(*given, stride=2), leaves)
    assert (2, 2) in seen

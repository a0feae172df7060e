"""Running statistics move when torch moves them, whoever reads or writes them meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn
from torch.utils.checkpoint import checkpoint

import tilewise


class Net(nn.Module):
    """A norm before convolutions, or behind one, in whatever order `body` has."""

    def __init__(self, body: Callable[[Any, Tensor], Any], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c, self.d = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.bn, self.bn2 = nn.BatchNorm2d(8, **options), nn.BatchNorm2d(8, **options)
        self.body = [body]  # shared by copies

    def forward(self, x: Tensor) -> Any:
        return self.body[0](self, F.max_pool2d(self.a(x), 2))


def plain(s: Any, x: Tensor) -> Tensor:
    return s.b(F.relu(s.bn(x)))


def other_order(s: Any, x: Tensor) -> Tensor:
    p, q = s.bn(x), s.bn(3 * x + 1)
    q = F.relu(q)
    return s.b(F.relu(p) + q)


def bare_second(s: Any, x: Tensor) -> Tensor:
    p, q = s.bn(x), s.bn(3 * x + 1)
    return s.b(F.relu(p)) + q


def block_second(s: Any, x: Tensor) -> Tensor:
    p = s.bn(x)
    q = F.relu(s.bn(s.b(x)))
    return s.b(F.relu(p)) + q


def both_blocks(s: Any, x: Tensor) -> Tensor:
    p, q = s.bn(s.c(x)), s.bn(s.d(3 * x + 1))
    q = F.relu(q)
    return s.b(F.relu(p) + q)


def steps_between(s: Any, x: Tensor) -> Tensor:
    p = s.bn(x) * 2
    r = F.silu(s.bn(3 * x + 1))
    return s.b(F.silu(p) + s.b(r))


def mean_read(s: Any, x: Tensor) -> Any:
    y = s.bn(x)
    mean = s.bn.running_mean.clone()
    return s.b(F.relu(y)), mean


def count_read(s: Any, x: Tensor) -> Any:
    y = s.bn(x)
    count = s.bn.num_batches_tracked * 1
    return s.b(F.relu(y)), count


def mean_read_behind_block(s: Any, x: Tensor) -> Any:
    y = s.bn(s.c(x))
    mean = s.bn.running_mean.clone()
    return s.b(F.relu(y)), mean


def normalised_alike(s: Any, x: Tensor) -> Any:
    y = s.bn(x)
    z = F.batch_norm(x, s.bn.running_mean, s.bn.running_var)
    return s.b(F.relu(y)), z.mean((0, 2, 3))


def weight_written(s: Any, x: Tensor) -> Tensor:
    y = s.bn(x)
    s.bn.weight.data.mul_(0.5)
    return s.b(F.relu(y))


def weight_written_behind_block(s: Any, x: Tensor) -> Tensor:
    y = s.bn(s.c(x))
    s.bn.weight.data.mul_(0.5)
    return s.b(F.relu(y))


def called(s: Any, x: Tensor) -> Tensor:
    y = F.batch_norm(x, s.bn.running_mean, s.bn.running_var, s.bn.weight, s.bn.bias, True)
    s.bn.weight.data.mul_(0.5)
    return s.b(F.relu(y))


BODIES = [plain, other_order, bare_second, block_second, both_blocks, steps_between, mean_read,
          count_read, mean_read_behind_block, normalised_alike, weight_written,
          weight_written_behind_block, called]


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    for a, b in zip(*((y if isinstance(y, tuple) else (y,)) for y in (one, other)), strict=True):
        assert torch.allclose(a.double(), b.double(), atol=1e-4), (a, b)


def compare(theirs: nn.Module, modes: str = "TTTTT", grad: bool = True) -> None:
    """Calls in training mode (T) and eval mode (E)."""
    ours = tilewise.optimize(copy.deepcopy(theirs))
    for step, mode in enumerate(modes):
        x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(step))
        with torch.set_grad_enabled(grad):
            same(ours.train(mode == "T")(x), theirs.train(mode == "T")(x))
        for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
            assert torch.allclose(one, other, atol=1e-4), (step, one, other)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("modes", ["TTTTT", "EETTT", "TETETE"])
@pytest.mark.parametrize("body", BODIES)
def test_order(body: Callable[[Any, Tensor], Any], modes: str, grad: bool) -> None:
    compare(Net(body), modes, grad)


@pytest.mark.parametrize("modes", ["TTETE", "EETTE"])
@pytest.mark.parametrize("body", [plain, steps_between, both_blocks])
@pytest.mark.parametrize("options", [{"track_running_stats": False}, {"momentum": None},
                                     {"affine": False}])
def test_options(body: Callable[[Any, Tensor], Any], modes: str, options: dict[str, Any]) -> None:
    for grad in (True, False):
        compare(Net(body, **options), modes, grad)


def test_statistics_that_are_taken_away() -> None:
    theirs = Net(plain)
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(2, 3, 16, 16)
    for model in (ours, theirs):
        model(x)
        model.eval()
        model.bn.running_mean = model.bn.running_var = None
    with torch.no_grad():
        same(ours(x), theirs(x))


@pytest.mark.parametrize("way", ["no_grad", "inference", "update_bn", "checkpoint"])
def test_nothing_moves_while_code_is_asked_for(way: str) -> None:
    """A first call without gradients looks for what it needs on images that hold nothing."""
    theirs = Net(plain)
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(2, 3, 16, 16)
    for model in (ours, theirs):
        if way == "update_bn":
            update_bn([x, x + 1, x * 2], model)
        elif way == "checkpoint":
            checkpoint(model, x.clone().requires_grad_(), use_reentrant=True).sum().backward()
        else:
            with torch.no_grad() if way == "no_grad" else torch.inference_mode():
                model(x)
    for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("spoil", ["eps", "mean"])
def test_what_torch_refuses(spoil: str) -> None:
    def spoilt(model: Any) -> Any:
        if spoil == "eps":
            model.bn.eps = 0.0
        else:
            model.bn.running_mean = torch.zeros(4)
        return model

    theirs = Net(plain)
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(2, 3, 16, 16)
    said = []
    for model in map(spoilt, (ours, theirs)):
        with pytest.raises((ValueError, RuntimeError)) as problem:
            model(x)
        said.append(str(problem.value))
    assert said[0] == said[1]

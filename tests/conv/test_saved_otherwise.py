"""Hooks may save what a gradient needs in another layout, as those that save memory do."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tilewise

LAST = torch.channels_last
HOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "in planes": lambda t: t.contiguous(),
    "channels-last": lambda t: t.contiguous(memory_format=LAST) if t.dim() == 4 else t,
    "with gaps": lambda t: torch.stack((t, t), -1)[..., 0]}
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "pooled": (lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.SiLU()), (2, 3, 20, 20)),
    "in groups": (lambda: nn.Sequential(
        nn.Conv2d(16, 16, 3, padding=1, groups=4), nn.ReLU(), nn.Conv2d(16, 24, 1)),
        (2, 16, 12, 12)),
    "transposed": (lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ReLU()),
        (2, 3, 9, 9)),
    "normalised": (lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, bias=False), nn.BatchNorm2d(16), nn.SiLU()), (4, 3, 16, 16)),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(8, 16, 3, padding=1), nn.ReLU(),
                                      nn.ConvTranspose3d(16, 8, 2, 2)), (1, 8, 6, 10, 10)),
    "linear": (lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), (500, 64)),
}


def gradients(model: nn.Module, x: Tensor, hook: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: hook(t.detach()), lambda t: t):
        y = model(x)
    return list(torch.autograd.grad(y.square().mean(), [x, *model.parameters()]))


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("net", NETS)
def test_gradients(net: str, hook: str) -> None:
    torch.manual_seed(0)
    make, shape = NETS[net]
    made, x = make(), torch.randn(shape)
    expected = gradients(copy.deepcopy(made).double(), x.double(), lambda t: t)
    found = gradients(tilewise.optimize(made), x, HOOKS[hook])
    for one, other in zip(found, expected, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 1e-5

"""Penalties on gradients, as GANs are trained with, and many gradients at once."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import tilewise

ACTS: dict[str, Any] = {"relu": nn.ReLU, "relu6": nn.ReLU6, "leaky": lambda: nn.LeakyReLU(0.2),
                        "silu": nn.SiLU}
NORMS: dict[str, Any] = {
    "none": nn.Identity, "batch": lambda: nn.BatchNorm2d(16), "group": lambda: nn.GroupNorm(4, 16),
    "instance": lambda: nn.InstanceNorm2d(16, affine=True)}


def critic(act: Any, norm: Any, *last: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), norm(), act(), nn.Conv2d(16, 16, 3), norm(), act(),
                        *last, nn.Flatten(), nn.LazyLinear(1))
    net(torch.randn(2, 3, 12, 12))
    return net


def penalised(net: Any, x: torch.Tensor, alone: bool) -> list[torch.Tensor | None]:
    x = x.clone().requires_grad_()
    y = net(x).sum()
    of_x, = torch.autograd.grad(y, x, create_graph=True)
    penalty = of_x.square().sum()
    return list(torch.autograd.grad(penalty if alone else penalty + y, [x, *net.parameters()],
                                    allow_unused=True))


def same(net: nn.Module, x: torch.Tensor, alone: bool) -> None:
    exact = penalised(copy.deepcopy(net).double(), x.double(), alone)
    ours = penalised(tilewise.optimize(net), x, alone)
    names = ["x", *(name for name, _ in net.named_parameters())]
    assert [name for name, one in zip(names, ours) if one is None] == [
        name for name, one in zip(names, exact) if one is None]
    largest = max(float(one.norm()) for one in exact if one is not None)
    for name, one, other in zip(names, ours, exact):
        if one is not None and other is not None:
            assert float((one - other).norm()) <= 1e-3 * max(float(other.norm()), 1e-2 * largest), (
                name)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("act", ACTS)
def test_penalties(act: str, norm: str, alone: bool) -> None:
    """What only moves an activation's edge has zeros for a gradient, not none: Adam goes on."""
    net = critic(ACTS[act], NORMS[norm])
    same(net, torch.randn(2, 3, 12, 12), alone)


@pytest.mark.parametrize("last", [nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.AvgPool2d(2)],
                         ids=lambda one: type(one).__name__)
def test_penalties_behind_pools(last: nn.Module) -> None:
    same(critic(nn.ReLU, nn.Identity, last), torch.randn(2, 3, 12, 12), True)


@pytest.mark.parametrize("part", [
    nn.AdaptiveAvgPool2d(1), nn.Sequential(nn.Conv2d(16, 16, 1, 2), nn.BatchNorm2d(16), nn.ReLU())],
    ids=["global pool", "strided"])
@pytest.mark.parametrize("training", [False, True])
def test_many_gradients_at_once(part: nn.Module, training: bool) -> None:
    net = critic(nn.ReLU, lambda: nn.BatchNorm2d(16), part).train(training)
    fast, x = tilewise.optimize(copy.deepcopy(net)), torch.randn(2, 3, 12, 12)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a rule of its own, an operator is looped over
        for one in (net, fast):
            leaf = x.clone().requires_grad_()
            y = one(leaf).flatten()
            found.append([*torch.autograd.grad(y, [leaf, *one.parameters()], torch.eye(len(y)),
                                               is_grads_batched=True),
                          torch.autograd.functional.jacobian(one, x, vectorize=True)])
    largest = max(float(theirs.norm()) for theirs in found[0])
    for theirs, ours in zip(*found):
        assert float((ours - theirs).norm()) <= 1e-3 * max(float(theirs.norm()), 1e-2 * largest)


def test_mapped_gradients_that_are_differentiated() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1),
                        nn.ReLU())
    found = []
    for one in (net, tilewise.optimize(copy.deepcopy(net))):
        x = torch.ones(1, 3, 6, 6).requires_grad_()
        y = one(x).mean((0, 2, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(torch.func.vmap(lambda v, y=y, x=x: torch.autograd.grad(
                y, x, v, create_graph=True)[0])(torch.eye(4)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)

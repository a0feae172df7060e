"""Random networks that learn: results, gradients and statistics, against float64."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ..model.optimize import optimize
from .judged import Mismatch
from .networks import SLACK, TIMES, Family, Net

STEPS = 3  # the first of a form is captured, later ones are remembered
# of gradients, relative: float64 cuts an activation off, or picks a maximum, where floats do not
KINKS = 2e-2
LITTLE = 1e-3  # of the largest gradient: what is less is made of roundings


class Unable(Exception):
    """Torch itself has no gradient of it, or not in training mode."""


def learned(seed: int, family: Family | None = None) -> float:
    """The largest share of its bound that an error takes, after some steps of one network."""
    net = Net(seed, family).train()
    if not list(net.parameters()):
        raise Unable("nothing in it learns")
    exact, ours = copy.deepcopy(net).double(), optimize(copy.deepcopy(net))
    try:
        right = _steps(exact, net.shape)
        plain = _steps(net, net.shape)
    except (RuntimeError, ValueError) as reason:
        raise Unable(str(reason)) from reason
    found = _steps(ours, net.shape)
    return max(_share(seed, name, found[name], plain[name], right[name]) for name in right)


def _steps(model: nn.Module, shape: tuple[int, ...]) -> dict[str, list[Tensor]]:
    """Results and gradients of the last step, and what its norms have then."""
    kind, drawn = next(model.parameters()).dtype, torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        model.zero_grad()
        results = model(torch.randn(shape, generator=drawn).to(kind))
        results = list(results) if isinstance(results, tuple) else [results]
        loss = sum((y * y).mean() for y in results)
        if not loss.requires_grad:
            raise Unable("nothing in it learns")
        loss.backward()
    gradients = [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]
    return {"results": [y.detach() for y in results], "gradients": gradients,
            "statistics": [buffer.to(kind) for buffer in model.buffers()]}


def _share(seed: int, name: str, found: list[Tensor], plain: list[Tensor],
           right: list[Tensor]) -> float:
    error, theirs = _off(found, right), _off(plain, right)
    limit = (KINKS if name == "gradients" else SLACK) + TIMES * theirs
    if not error <= limit:  # also where it is NaN
        raise Mismatch(f"network {seed}, learning: error of {name} is {error:.3e}, needs at most "
                       f"{limit:.3e}")
    return error / limit


def _off(found: list[Tensor], right: list[Tensor]) -> float:
    """The largest error, relative to the size of its tensor, or to a little of the largest."""
    if [a.shape for a in found] != [b.shape for b in right]:
        return float("inf")
    sizes = [float(b.norm()) for b in right]
    least = max(LITTLE * max(sizes, default=0.0), 1e-6)
    return max(((a.double() - b).norm().item() / max(size, least)
                for a, b, size in zip(found, right, sizes, strict=True)), default=0.0)

"""Random networks of branches, views, concatenations and operations between convolutions."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..model.captured import all_captured
from ..model.optimize import optimize
from ..model.storing import storing
from ..runtime import program
from .guarded import GuardedMemory, swapped
from .judged import Mismatch

ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [
    F.relu, F.silu, torch.sigmoid, F.gelu, F.hardswish, torch.tanh, F.leaky_relu]
MODULES = [nn.ReLU, nn.SiLU, nn.Hardswish, nn.GELU, nn.Sigmoid]
CHANNELS = (3, 4, 8, 12, 16, 17, 24)


class Op(nn.Module):
    """Makes a value from others, which it names by their places."""

    def __init__(self, places: list[int], run: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.places, self.run = places, run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, values: list[Tensor]) -> Tensor:
        return self.run(self, *[values[place] for place in self.places])


class Net(nn.Module):
    """`count` random operations; some of the values are results."""

    def __init__(self, seed: int, count: int = 12) -> None:
        super().__init__()
        self.rng = rng = random.Random(seed)
        torch.manual_seed(seed)
        self.shape = (rng.choice((1, 1, 2)), rng.choice((3, 4)), rng.randint(5, 24),
                      rng.randint(5, 24))
        shapes: list[tuple[int, ...]] = [self.shape]
        self.ops = nn.ModuleList()
        with torch.no_grad():
            values = [torch.randn(self.shape)]
            while len(self.ops) < count:
                op = self._draw(shapes)
                made = op.eval()(list(map(torch.clone, values)))
                if made.shape[2] * made.shape[3] > 3000 or made.dim() != 4:
                    continue
                self.ops.append(op)
                values.append(made)
                shapes.append(tuple(made.shape))
        last = rng.sample(range(1, count), rng.randint(0, 2))
        self.results = [count, *last]
        del self.rng

    def forward(self, x: Tensor) -> Any:
        values = [x]
        for op in self.ops:
            values.append(op(values))
        found = [values[place] for place in self.results]
        return found[0] if len(found) == 1 else tuple(found)

    def _draw(self, shapes: list[tuple[int, ...]]) -> Op:
        rng = self.rng
        # late values are likelier, so that the network is deep
        place = max(rng.randrange(len(shapes)) for _ in range(3))
        shape = shapes[place]
        kind = rng.choice(KINDS)
        return kind(rng, place, shape, shapes)


def _same(rng: random.Random, shapes: list[Any], shape: Any) -> int:
    return rng.choice([i for i, other in enumerate(shapes) if other == shape])


def conv(rng, place, shape, shapes):
    c, k, r = shape[1], rng.choice(CHANNELS), rng.choice((1, 1, 3, 3, 5))
    stride = rng.choice((1, 1, 2)) if min(shape[2:]) > 4 else 1
    layer = nn.Conv2d(c, k, r, stride, r // 2, bias=rng.random() < 0.5)
    follow = [nn.BatchNorm2d(k)] if rng.random() < 0.5 else []
    for norm in follow:
        nn.init.uniform_(norm.running_mean, -0.5, 0.5)
        nn.init.uniform_(norm.running_var, 0.5, 2)
    follow += [rng.choice(MODULES)()] if rng.random() < 0.6 else []
    return Op([place], lambda self, x: self.body(x), body=nn.Sequential(layer, *follow))


def depthwise(rng, place, shape, shapes):
    c = shape[1]
    return Op([place], lambda self, x: self.body(x), body=nn.Conv2d(c, c, 3, 1, 1, groups=c))


def norm(rng, place, shape, shapes):
    layer = nn.BatchNorm2d(shape[1])
    nn.init.uniform_(layer.running_mean, -0.5, 0.5)
    nn.init.uniform_(layer.weight, 0.5, 1.5)
    return Op([place], lambda self, x: F.relu(self.body(x)), body=layer)


def activation(rng, place, shape, shapes):
    function = rng.choice(ACTIVATIONS)
    return Op([place], lambda self, x: function(x))


def arithmetic(rng, place, shape, shapes):
    other, sign = _same(rng, shapes, shape), rng.choice((1.0, -0.5))
    run = rng.choice([lambda self, a, b: a + b * sign, lambda self, a, b: a * torch.sigmoid(b),
                      lambda self, a, b: (a - b) / 2, lambda self, a, b: torch.add(a, b)])
    return Op([place, other], run)


def scaled(rng, place, shape, shapes):
    return Op([place], lambda self, x: x * self.gamma + 1,
              gamma=nn.Parameter(torch.rand(shape[1], 1, 1)))


def excited(rng, place, shape, shapes):
    c = shape[1]
    return Op([place], lambda self, x: x * self.up(F.relu(self.down(
        F.adaptive_avg_pool2d(x, 1)))).sigmoid(), down=nn.Conv2d(c, 4, 1), up=nn.Conv2d(4, c, 1))


def cat(rng, place, shape, shapes):
    fitting = [i for i, s in enumerate(shapes) if (s[0], *s[2:]) == (shape[0], *shape[2:])]
    places = [place, *(rng.choice(fitting) for _ in range(rng.randint(1, 4)))]
    if sum(shapes[i][1] for i in places) > 96:
        return activation(rng, place, shape, shapes)
    return Op(places, lambda self, *xs: torch.cat(xs, 1))


def sliced(rng, place, shape, shapes):
    if shape[1] < 2:
        return activation(rng, place, shape, shapes)
    first = rng.randrange(shape[1] - 1)
    return Op([place], rng.choice([lambda self, x: x[:, first:], lambda self, x: x.chunk(2, 1)[0],
                                   lambda self, x: x.split(1 + first, 1)[-1]]))


def pooled(rng, place, shape, shapes):
    if min(shape[2:]) < 3:
        return activation(rng, place, shape, shapes)
    run = rng.choice([lambda self, x: F.max_pool2d(x, 3, 2, 1),
                      lambda self, x: F.max_pool2d(x, 5, 1, 2),
                      lambda self, x: F.avg_pool2d(x, 2), lambda self, x: F.avg_pool2d(x, 3, 1, 1),
                      lambda self, x: F.adaptive_avg_pool2d(x, (3, 5))])
    return Op([place], run)


def resized(rng, place, shape, shapes):
    run = rng.choice([lambda self, x: F.interpolate(x, scale_factor=2),
                      lambda self, x: F.interpolate(x, scale_factor=2, mode="bilinear"),
                      lambda self, x: F.interpolate(x, size=(7, 9), mode="bilinear")])
    return Op([place], run)


def centred(rng, place, shape, shapes):
    return Op([place], lambda self, x: x - x.mean((2, 3), keepdim=True))


def totals(rng, place, shape, shapes):
    run = rng.choice([lambda self, x: x * x.mean(1, keepdim=True),
                      lambda self, x: x / (x.norm(p=2, dim=(2, 3), keepdim=True) + 1),
                      lambda self, x: x - x.amax(1, keepdim=True).contiguous(),
                      lambda self, x: x + x.sum((2, 3), keepdim=True) / x[0, 0].numel(),
                      lambda self, x: torch.addcmul(x, x.mean(1, keepdim=True), x)])
    return Op([place], run)


def halves(rng, place, shape, shapes):
    n, c, h, w = shape
    if c % 2:
        return totals(rng, place, shape, shapes)
    return Op([place], lambda self, x: x.reshape(n, 2, c // 2, h, w).sum(dim=1))


def by_torch(rng, place, shape, shapes):
    return Op([place], rng.choice([lambda self, x: torch.sin(x), lambda self, x: x.roll(1, 3),
                                   lambda self, x: x.flip(2),
                                   lambda self, x: x.transpose(2, 3).contiguous()]))


def in_place(rng, place, shape, shapes):
    run = rng.choice([lambda self, x: (x * 2).relu_(), lambda self, x: (x + 1).mul_(0.5),
                      lambda self, x: x.clone().clamp_(-1, 1),
                      lambda self, x: torch.cat([x, x * 2], 1)[:, :shape[1]].add_(x),
                      lambda self, x: F.dropout(x, 0.5, training=False)])
    return Op([place], run)


def up(rng, place, shape, shapes):
    return Op([place], lambda self, x: self.body(x),
              body=nn.ConvTranspose2d(shape[1], rng.choice(CHANNELS), 2, 2))


KINDS = [conv, conv, conv, conv, depthwise, norm, activation, arithmetic, arithmetic, scaled,
         excited, cat, cat, sliced, sliced, pooled, resized, centred, totals, totals,
         halves, by_torch, in_place, up]


# judging one

SLACK, TIMES = 4e-6, 10  # of a result's size, and of the error that torch makes in float32


ROUNDED = 2.0 ** -8  # a value that is stored in 16 bits


def judged(seed: int, stored: bool = False) -> tuple[float, bool]:
    """The share of its bound that a network's error takes, between unmapped pages; and whether it
    ran as a program.

    With `stored`, its images may be bfloat16: then as torch errs whose tensors all are.
    """
    net = Net(seed).eval()
    model, exact = optimize(net), copy.deepcopy(net).double()
    with torch.inference_mode(), storing(stored):
        for _ in range(2):
            model(torch.randn(net.shape))
        bound = programs_of(model)
        x = torch.randn(net.shape)
        with swapped(program, "memory", GuardedMemory()):
            found = model(x)
        plain, expected = net(x), exact(x.double())
    if [a.shape for a in _leaves(found)] != [b.shape for b in _leaves(plain)]:
        raise Mismatch(f"network {seed}: other shapes than torch's")
    error, limit = _off(found, expected), SLACK + TIMES * _off(plain, expected)
    if stored:
        with torch.inference_mode():
            limit = ROUNDED + 2 * _off(net.bfloat16()(x.bfloat16()), expected)
    if not error <= limit:  # also where it is NaN
        raise Mismatch(f"network {seed}: error is {error:.3e}, needs at most {limit:.3e}")
    return error / limit, bool(bound)


def programs_of(model: nn.Module) -> list[Any]:
    return [bound.program for captured in all_captured(model)
            for captures in captured.captures.values()
            for capture in captures for graph in capture.graphs
            for bound in graph.programs.bound]


def _leaves(found: Any) -> list[Tensor]:
    return list(found) if isinstance(found, tuple) else [found]


def _off(found: Any, expected: Any) -> float:
    """The largest error, relative to the result's size."""
    return max(((a - b).norm() / max(float(b.norm()), 1e-3)).item()
               for a, b in zip(_leaves(found), _leaves(expected), strict=True))

"""Operations of random networks: each kind draws one, of a value's place and of all shapes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Op(nn.Module):
    """Makes a value from others, which it names by their places."""

    def __init__(self, places: list[int], run: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.places, self.run = places, run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, values: list[Tensor]) -> Tensor:
        return self.run(self, *[values[place] for place in self.places])


def _same(rng: random.Random, shapes: list[Any], shape: Any) -> int:
    return rng.choice([i for i, other in enumerate(shapes) if other == shape])


def conv(rng, place, shape, shapes):
    c, k, form = shape[1], rng.width(), rng.form()
    stride = form.stride if min(shape[2:]) > 4 else 1
    layer = nn.Conv2d(c, k, form.size, stride, form.size // 2, bias=form.bias)
    follow = [nn.BatchNorm2d(k)] if form.norm else []
    for norm in follow:
        nn.init.uniform_(norm.running_mean, -0.5, 0.5)
        nn.init.uniform_(norm.running_var, 0.5, 2)
    follow += [form.activation()] if form.activation else []
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
    function = rng.activation()
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
    first = rng.left(shape[1])
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
    run = rng.choice([lambda self, x: x.reshape(n, 2, c // 2, h, w).sum(dim=1),
                      lambda self, x: x.reshape(x.shape[0], 2, c // 2, *x.shape[2:]).sum(dim=1)])
    return Op([place], run)


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


def called(rng, place, shape, shapes):
    """Functions with the tensors of modules, whose mode does not matter."""
    c, k, form = shape[1], rng.width(), rng.form()
    layer, norm = nn.Conv2d(c, k, form.size, 1, form.size // 2, bias=form.bias), nn.BatchNorm2d(k)
    nn.init.uniform_(norm.running_mean, -0.5, 0.5)
    function, eps = rng.activation(), rng.choice((1e-5, 1e-3))

    def run(self: Any, x: Tensor) -> Tensor:
        y = F.conv2d(x, self.conv.weight, self.conv.bias, 1, form.size // 2)
        return function(F.batch_norm(y, self.norm.running_mean, self.norm.running_var,
                                     self.norm.weight, self.norm.bias, False, 0.1, eps))

    return Op([place], run, conv=layer, norm=norm)


# what others have is written to, also their views: whoever reads it later sees that


def written(rng, place, shape, shapes):
    half, other = max(1, shape[1] // 2), _same(rng, shapes, shape)
    run = rng.choice([lambda self, x, y: x.relu_(), lambda self, x, y: x.add_(1),
                      lambda self, x, y: F.silu(x, inplace=True), lambda self, x, y: x.add_(y),
                      lambda self, x, y: x[:, :half].mul_(0.5),
                      lambda self, x, y: x.copy_(y * 0.5)])
    return Op([place, other], run)


def summed(rng, place, shape, shapes):
    """A convolution, a sum and an activation; what was added may be written to on the way."""
    c, other = shape[1], rng.choice(range(len(shapes)))
    function, write = rng.activation(), rng.choice((
        lambda r: r, lambda r: r * 2, lambda r: r.relu_(), lambda r: r.mul_(-1)))
    layer = nn.Conv2d(c, shapes[other][1], 1)

    def run(self: Any, x: Tensor, r: Tensor) -> Tensor:
        y = self.body(F.adaptive_avg_pool2d(x, r.shape[2:])) + r
        write(r)
        return function(y)

    return Op([place, other], run, body=layer)


def up(rng, place, shape, shapes):
    return Op([place], lambda self, x: self.body(x),
              body=nn.ConvTranspose2d(shape[1], rng.width(), 2, 2))


KINDS = [conv, conv, conv, conv, depthwise, norm, activation, arithmetic, arithmetic, scaled,
         excited, cat, cat, sliced, sliced, pooled, resized, centred, totals, totals,
         halves, by_torch, in_place, up]
WRITES = [called, called, written, written, summed, summed]
WEIGHTED = {conv, depthwise, excited, up, called, summed}  # code of theirs is for so many channels

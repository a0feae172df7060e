"""Random networks of branches, views, concatenations and operations between convolutions."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

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
SMALLEST, LARGEST = 5, 24  # images, before what a network does with them
WIDTHS, FORMS, AREAS = 2, 4, 6  # of a family
WRITING = 0.25  # of the networks may write to what others read


class Form(NamedTuple):
    """A convolution but for its channels."""

    size: int
    stride: int
    bias: bool
    norm: bool
    activation: Callable[[], nn.Module] | None

    @staticmethod
    def drawn(rng: random.Random) -> Form:
        return Form(rng.choice((1, 1, 3, 3, 5)), rng.choice((1, 1, 2)), rng.random() < 0.5,
                    rng.random() < 0.5, rng.choice(MODULES) if rng.random() < 0.6 else None)


class Family:
    """What some networks have in common, so that they share code: none of it is drawn but of all
    that there is."""

    def __init__(self, seed: object) -> None:
        rng = random.Random(f"family {seed}")
        self.widths = rng.sample(CHANNELS, WIDTHS)
        self.forms = [Form.drawn(rng) for _ in range(FORMS)]
        self.activations, self.modules = (rng.sample(some, 2) for some in (ACTIVATIONS, MODULES))
        self.images = rng.choice((3, 4))
        self.read = {self.images, *self.widths, sum(self.widths)}  # channels of what weights meet
        self.areas = [_area(rng) for _ in range(AREAS)]


def _area(rng: random.Random) -> tuple[int, int]:
    return rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST)


class Hand(random.Random):
    """Draws from a family, or from all there is."""

    def __init__(self, seed: int, family: Family | None = None) -> None:
        super().__init__(seed)
        self.family = family

    def width(self) -> int:
        return self.choice(self.family.widths if self.family else CHANNELS)

    def form(self) -> Form:
        return self.choice(self.family.forms) if self.family else Form.drawn(self)

    def activation(self) -> Callable[[Tensor], Tensor]:
        return self.choice(self.family.activations if self.family else ACTIVATIONS)

    def images(self) -> int:
        return self.family.images if self.family else self.choice((3, 4))

    def area(self) -> tuple[int, int]:
        return self.choice(self.family.areas) if self.family else _area(self)

    def place(self, shapes: list[tuple[int, ...]], weighted: bool) -> int:
        """Of a value to go on from. Late ones are likelier, so that networks are deep."""
        able = [i for i, shape in enumerate(shapes)
                if not (weighted and self.family) or shape[1] in self.family.read]
        return able[max(self.randrange(len(able)) for _ in range(3))]

    def left(self, channels: int) -> int:
        """Where a slice begins; a family's slices are as wide as others, if they can be."""
        fitting = [width for width in self.family.widths if width < channels] if (
            self.family) else []
        return channels - self.choice(fitting) if fitting else self.randrange(channels - 1)


class Op(nn.Module):
    """Makes a value from others, which it names by their places."""

    def __init__(self, places: list[int], run: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.places, self.run = places, run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, values: list[Tensor]) -> Tensor:
        return self.run(self, *[values[place] for place in self.places])


def may_write(seed: int) -> bool:
    """Whether a network writes to what others read, if that is drawn."""
    return random.Random(f"writes of {seed}").random() < WRITING


class Net(nn.Module):
    """`count` random operations; some of the values are results."""

    def __init__(self, seed: int, family: Family | None = None, count: int = 12) -> None:
        super().__init__()
        self.rng = rng = Hand(seed, family)
        self.kinds = KINDS + WRITES if may_write(seed) else KINDS
        torch.manual_seed(seed)
        self.shape = (rng.choice((1, 1, 2)), rng.images(), *rng.area())
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
        del self.rng, self.kinds

    def forward(self, x: Tensor) -> Any:
        values = [x]
        for op in self.ops:
            values.append(op(values))
        found = [values[place] for place in self.results]
        return found[0] if len(found) == 1 else tuple(found)

    def _draw(self, shapes: list[tuple[int, ...]]) -> Op:
        kind = self.rng.choice(self.kinds)
        place = self.rng.place(shapes, kind in WEIGHTED)
        return kind(self.rng, place, shapes[place], shapes)


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


# judging one

SLACK, TIMES = 4e-6, 10  # of a result's size, and of the error that torch makes in float32


ROUNDED = 2.0 ** -8  # a value that is stored in 16 bits


class Verdict(NamedTuple):
    """The largest share of its bound that an error takes, whether a network ran as a program, and
    how many sizes of images it ran with."""

    share: float
    bound: bool
    runs: int


def judged(seed: int, family: Family | None = None, sizes: int = 1,
           stored: bool = False) -> Verdict:
    """A network between unmapped pages, with images of up to so many sizes that torch runs it with.

    With `stored`, its images may be bfloat16: then as torch errs whose tensors all are.
    """
    net = Net(seed, family).eval()
    model, exact = optimize(net), copy.deepcopy(net).double()
    rounded = copy.deepcopy(net).bfloat16() if stored else None
    rng, shares = random.Random(f"sizes of {seed}"), []
    with torch.inference_mode(), storing(stored):
        for number in range(rng.randint(1, sizes)):
            shape = _resized(net.shape, rng, family) if number else net.shape
            if not number or _suits(net, shape):
                shares.append(_run(seed, shape, net, model, exact, rounded))
    return Verdict(max(shares), bool(programs_of(model)), len(shares))


def _resized(shape: tuple[int, ...], rng: random.Random,
             family: Family | None) -> tuple[int, ...]:
    """Not much larger: what grows in a network grows a lot."""
    _, c, h, w = shape
    areas = family.areas if family else [(rng.randint(4, h + 3), rng.randint(4, w + 3))]
    able = [area for area in areas if math.prod(area) <= (h + 3) * (w + 3)]
    return rng.choice((1, 2, 3)), c, *rng.choice(able)


def _suits(net: Net, shape: tuple[int, ...]) -> bool:
    """Whether torch can run it: some networks demand that two sizes are equal."""
    try:
        net(torch.zeros(shape))
    except RuntimeError:
        return False
    return True


def _run(seed: int, shape: tuple[int, ...], net: Net, model: nn.Module, exact: nn.Module,
         rounded: nn.Module | None) -> float:
    """The third call with a size, which is the first of its program."""
    for _ in range(2):
        model(torch.randn(shape))
    x = torch.randn(shape)
    with swapped(program, "memory", GuardedMemory()):
        found = model(x.clone())
    plain, expected = net(x.clone()), exact(x.double())
    if [a.shape for a in _leaves(found)] != [b.shape for b in _leaves(plain)]:
        raise Mismatch(f"network {seed} with {shape}: other shapes than torch's")
    error, limit = _off(found, expected), SLACK + TIMES * _off(plain, expected)
    if rounded is not None:
        limit = ROUNDED + 2 * _off(rounded(x.bfloat16()), expected)
    if not error <= limit:  # also where it is NaN
        raise Mismatch(f"network {seed} with {shape}: error is {error:.3e}, needs at most "
                       f"{limit:.3e}")
    return error / limit


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

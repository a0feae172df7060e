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
from .operations import KINDS, WEIGHTED, WRITES, Op

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


# judging one

SLACK, TIMES = 4e-6, 10  # of a result's size, and of the error that torch makes in float32


ROUNDED = 2.0 ** -8  # a value that is stored in 16 bits
LAST_BIT, DRAWS = 2.0 ** -24, 4


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
    elif not error <= limit:  # what is left of a difference, perhaps
        limit = SLACK + TIMES * _sway(seed, exact, x.double(), expected)
    if not error <= limit:  # also where it is NaN
        raise Mismatch(f"network {seed} with {shape}: error is {error:.3e}, needs at most "
                       f"{limit:.3e}")
    return error / limit


def _sway(seed: int, exact: nn.Module, x: Tensor, expected: Any) -> float:
    """How far results move if inputs and weights change in their last bit."""
    generator = torch.Generator().manual_seed(seed)

    def near(value: Tensor) -> Tensor:
        signs = 2 * torch.rand(value.shape, generator=generator, dtype=value.dtype) - 1
        return value * (1 + LAST_BIT * signs)

    found = []
    for _ in range(DRAWS):
        other = copy.deepcopy(exact)
        for own in (*other.parameters(), *other.buffers()):
            if own.is_floating_point():
                own.copy_(near(own))
        found.append(_off(other(near(x)), expected))
    return max(found)


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

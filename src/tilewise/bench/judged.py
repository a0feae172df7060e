"""What a kernel was given and should have made of it, in float64: for tests and self-tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from ..algorithms.reference import finished
from ..core.activations import parsed
from ..core.algorithm import Algorithm
from ..core.problem import Problem
from ..core.schedule import Schedule
from ..core.target import Target
from ..kernels.activations import activated, apart
from ..kernels.cpu.prepare.mirrored import mirror
from ..planner.planner import inner_problem

STORED = {"bf16": torch.bfloat16, "f16": torch.float16}


class Mismatch(AssertionError):
    """A kernel left something else than it should have."""


@dataclass(frozen=True)
class Operands:
    """float32 inputs of a problem as (N, C, H, W) tensors; what the epilogue lacks is None.

    Images have values that the problem's type can hold.

    Slopes of an activation lie behind the bias; where there is none, NaN is in its place.
    For the gradient of the input, x is that of the output; for the gradient of the weight, the
    weight is.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None

    def first(self, p: Problem) -> Operands:
        """Those of as many images as the problem has."""
        weight = self.weight[:p.n] if p.direction == "backward_weight" else self.weight
        residual = None if self.residual is None else self.residual[:p.n]
        return Operands(self.x[:p.n], weight, self.bias, residual)


def operands(p: Problem, kind: str, seed: int, non_negative: bool = False) -> Operands:
    """Random "integers", small enough for exact float32 sums, normal "floats", or ADVERSE ones."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        if kind in ADVERSE:
            return ADVERSE[kind](shape, rng)
        if kind == "integers":
            return _integers(shape, rng)
        return torch.randn(shape, generator=rng)

    def stored(*shape: int) -> torch.Tensor:
        return draw(*shape).to(STORED.get(p.dtype, torch.float32)).float()

    def image(*shape: int) -> torch.Tensor:
        drawn = stored(*shape)
        return drawn.relu() if non_negative else drawn

    inside, outside = (p.n, p.c, p.h, p.w), (p.n, p.k, p.conv_h, p.conv_w)
    if p.direction == "backward_weight":
        return Operands(image(*inside), stored(*outside), None, None)
    return Operands(
        image(*(outside if p.direction == "backward_data" else inside)),
        draw(p.k, p.group_c, p.r, p.s),
        channels(p, draw),
        stored(*(inside if p.direction == "backward_data" else outside))
        if p.epilogue.residual else None)


def _integers(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """From -4 to 4; `randint` takes six times as long."""
    return torch.rand(shape, generator=rng).mul_(9).floor_().clamp_(max=8).sub_(4)


def _alike(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """One value everywhere: all sums round in the same way."""
    return torch.full(shape, 1 + torch.rand((), generator=rng).item())


def _one_sign(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=rng) + 0.5


def _cancelling(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """Neighbours that differ in sign, and in little else."""
    signs = 1.0 - 2.0 * (torch.arange(math.prod(shape)) % 2).view(shape)
    return signs * (1 + 1e-3 * torch.randn(shape, generator=rng))


def _wide(shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """Magnitudes from a millionth to a million."""
    return torch.randn(shape, generator=rng) * 2.0 ** torch.randint(-20, 21, shape, generator=rng)


# data that a bound for independent errors need not hold for
ADVERSE: dict[str, Callable[[tuple[int, ...], torch.Generator], torch.Tensor]] = {
    "alike": _alike, "one sign": _one_sign, "cancelling": _cancelling, "wide": _wide,
    "tiny": lambda shape, rng: 1e-16 * torch.randn(shape, generator=rng),
    "huge": lambda shape, rng: 1e15 * torch.randn(shape, generator=rng)}
FEW = 3.0  # times what is expected that a single error may be
UNDERFLOW = 2.0 ** -110  # what denormal numbers that count as zero can add up to


def channels(p: Problem, draw: Callable[[int], torch.Tensor]) -> torch.Tensor | None:
    """What kernels read for each output channel."""
    count = p.c if p.direction == "backward_data" else p.k
    bias = draw(count) if p.epilogue.bias else None
    if not p.epilogue.has_slopes:
        return bias
    return torch.cat((torch.full((count,), math.nan) if bias is None else bias, draw(count)))


def exact(p: Problem, o: Operands) -> torch.Tensor:
    """The answer in float64; `reference.solve`, where it can be as one product over all windows."""
    if p.direction == "backward_data":
        return finished(p, _folded(p, o.x, o.weight), o.bias, o.residual)
    windows = _windows(p, o.x)
    if p.direction == "backward_weight":
        grad = o.weight.double().unflatten(1, (p.groups, p.group_k))
        return torch.einsum("ngchwrs,ngkhw->gkcrs", windows, grad).flatten(0, 1)
    weight = o.weight.double().unflatten(0, (p.groups, p.group_k))
    y = torch.einsum("ngchwrs,gkcrs->ngkhw", windows, weight).flatten(1, 2)
    if p.epilogue.bias and o.bias is not None:
        y = y + o.bias[:p.k].double()[:, None, None]
    if o.residual is not None:
        y = y + o.residual.double()
    y = activated(y, p.epilogue.activation, None if o.bias is None else
                  apart(p, o.bias.double())[1])
    return F.max_pool2d(y, p.epilogue.pool) if p.epilogue.pool > 1 else y


def _windows(p: Problem, x: torch.Tensor) -> torch.Tensor:
    """What every output sees, in float64: (n, group, c, conv_h, conv_w, r, s)."""
    top, bottom, left, right = p.padding
    x = F.pad(x.double(), (left, right, top, bottom))
    n, c, h, w = x.stride()
    return x.as_strided(
        (p.n, p.groups, p.group_c, p.conv_h, p.conv_w, p.r, p.s),
        (n, p.group_c * c, c, p.stride[0] * h, p.stride[1] * w, p.dilation[0] * h,
         p.dilation[1] * w))


def _folded(p: Problem, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient of the input: what every output gives to its window, added where they meet."""
    if not grad.numel():  # torch folds no empty ones
        return torch.zeros(p.n, p.c, p.h, p.w, dtype=torch.float64)
    given = torch.einsum("ngkhw,gkcrs->ngcrshw",
                         grad.double().unflatten(1, (p.groups, p.group_k)),
                         weight.double().unflatten(0, (p.groups, p.group_k)))
    whole = F.fold(given.reshape(p.n, p.c * p.r * p.s, p.conv_h * p.conv_w),
                   (p.padded_h, p.padded_w), (p.r, p.s), p.dilation, stride=p.stride)
    top, left = p.padding[0], p.padding[2]
    return whole[..., top:top + p.h, left:left + p.w]


def scatter(results: int) -> float:
    """How much larger than expected the mean error of few results may be; zeros do not count."""
    return max(1.0, FEW / math.sqrt(max(1, results)))


def spread(p: Problem, o: Operands) -> torch.Tensor:
    """Root of the sum of all squared terms: the size of an output whose terms do not cancel.

    Before pooling: what is pooled may see nothing where its neighbours that are left out see much.
    """
    squares = Operands(*(None if value is None else value.double() ** 2
                         for value in (o.x, o.weight, o.bias, o.residual)))
    return exact(p.with_(epilogue=replace(p.epilogue, activation=None, pool=1)), squares).sqrt()


def rms(values: torch.Tensor) -> float:
    return math.sqrt(values.square().mean()) if values.numel() else 0.0


def prepare(algorithm: Algorithm, p: Problem, t: Target, s: Schedule,
            weight: torch.Tensor) -> torch.Tensor:
    """The second operand as the kernel takes it."""
    if p.direction == "backward_weight":
        return laid_out(weight, p)
    inner = inner_problem(algorithm, p)
    if inner.direction != p.direction:
        weight = mirror(weight, p.groups)
    p, s = algorithm.weight_of(inner, s)
    return algorithm.prepare(p, t, s, weight)


def laid_out(images: torch.Tensor | None, p: Problem) -> torch.Tensor | None:
    """The values of (N, C, H, W) images in the problem's order and type."""
    if images is None:
        return None
    images = images.to(STORED.get(p.dtype, images.dtype))
    return (images if p.layout == "nchw" else images.permute(0, 2, 3, 1)).flatten()


def compare(algorithm: Algorithm, p: Problem, t: Target, s: Schedule, kind: str, y: torch.Tensor,
            expected: torch.Tensor, scale: torch.Tensor) -> float:
    """Integers must be equal bit for bit, floats as close as the algorithm declares.

    The share of the bound that the error takes.
    """
    if kind == "integers" and algorithm.exact_on_integers and keeps_integers(p):
        stored = STORED.get(p.dtype, torch.float32)  # sums are exact, so this rounds once
        wrong = y.float().view(torch.int32) != (expected + 0.0).to(stored).float().view(torch.int32)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            raise Mismatch(f"{int(wrong.sum())} of {wrong.numel()} integers differ, first at {at}: "
                           f"{y[at]} for {expected[at]}")
        return 0.0
    if not y.numel():
        return 0.0
    error = rms(y.double() - expected) / max(rms(expected), rms(scale), 1e-30)
    bound = algorithm.bound(p, t, s) * scatter(min(y.numel(), int(scale.count_nonzero())))
    if not error <= bound:  # also where it is NaN
        raise Mismatch(f"error on {kind} is {error:.3e}, declared is {bound:.3e}")
    return error / bound


def reach(p: Problem, o: Operands) -> torch.Tensor:
    """How large a result can be: the largest input times the magnitudes of what it meets."""
    x, weight = o.x.double().abs(), o.weight.double().abs()
    if p.direction == "backward_weight":
        return x.amax() * weight.sum((0, 2, 3))[:, None, None, None]
    if p.direction == "backward_data":
        sums = weight.unflatten(0, (p.groups, p.group_k)).sum((1, 3, 4)).flatten()
    else:
        sums = weight.sum((1, 2, 3))
    added = sum(float(one.nan_to_num().abs().max()) for one in (o.bias, o.residual)
                if one is not None)
    return x.amax((1, 2, 3))[:, None, None, None] * sums[:, None, None] + added


def compare_any(algorithm: Algorithm, p: Problem, t: Target, s: Schedule, kind: str,
                y: torch.Tensor, expected: torch.Tensor, reach: torch.Tensor) -> float:
    """Every result within the bound that holds for all data; the share that the worst takes."""
    if not y.numel():
        return 0.0
    limit = algorithm.certain(p, t, s) * reach + UNDERFLOW
    share = float(((y.double() - expected).abs() / limit).max())
    if not share <= 1:  # also where it is NaN
        raise Mismatch(f"error on {kind} is {share:.3f} of what is certain")
    return share


def suits_any(p: Problem) -> bool:
    """Whether what follows the sum makes no error larger, so that any data can be judged."""
    return keeps_integers(p) and not p.epilogue.has_slopes and p.dtype == "f32"


def keeps_integers(p: Problem) -> bool:
    """Whether the activation rounds nothing."""
    return p.epilogue.activation is None or parsed(p.epilogue.activation)[0].error == 0

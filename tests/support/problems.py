"""Random problems through the public function, and torch's answers."""

from __future__ import annotations

import math
import random
from typing import Any

from torch import Tensor
from torch.nn import functional as F

import tilewise
from tilewise.core import Problem
from tilewise.kernels.activations import activated, apart


def convolve(p: Problem, operands: tuple[Any, ...], algorithm: str | None = None) -> Tensor:
    """A problem through the public function."""
    x, weight, channels, residual = operands
    bias, slope = apart(p, channels)
    return tilewise.conv2d(x, weight, bias, p.stride, p.padding, p.dilation, p.groups,
                           activation=p.epilogue.activation, slope=slope, residual=residual,
                           pool=p.epilogue.pool, algorithm=algorithm)


def expected(p: Problem, operands: tuple[Any, ...]) -> Tensor:
    """The same by torch, in float64."""
    x, weight, channels, residual = (None if o is None else o.double() for o in operands)
    bias, slope = apart(p, channels)
    top, bottom, left, right = p.padding
    y = F.conv2d(F.pad(x, (left, right, top, bottom)), weight, bias, p.stride, 0, p.dilation,
                 p.groups)
    y = y if residual is None else y + residual
    y = activated(y, p.epilogue.activation, slope)
    return y if p.epilogue.pool == 1 else F.max_pool2d(y, p.epilogue.pool)


def error(y: Tensor, answer: Tensor) -> float:
    """Relative to the answer; NaN counts as infinite."""
    found = float((y.double() - answer).norm() / answer.norm().clamp_min(1e-30))
    return math.inf if math.isnan(found) else found


def random_problem(rng: random.Random) -> Problem:
    """Small, of any kind, in either layout."""
    kind = rng.choice(("dense", "pointwise", "depthwise", "grouped"))
    groups = {"depthwise": rng.randint(2, 40), "grouped": rng.randint(2, 4)}.get(kind, 1)
    c = groups * (1 if kind == "depthwise" else rng.randint(1, 20))
    k = c if kind == "depthwise" else groups * rng.randint(1, 20)
    r, s = (1, 1) if kind == "pointwise" else (rng.randint(1, 4), rng.randint(1, 4))
    stride = (1, 1) if rng.random() < 0.6 else (rng.randint(1, 2), rng.randint(1, 2))
    pads = (0, 0, 0, 0) if kind == "pointwise" else tuple(rng.randint(0, 2) for _ in range(4))
    steps = "".join(f"+{step}" for step in ("bias", "residual", "relu", "pool2")
                    if rng.random() < 0.4)
    name = f"n{rng.randint(1, 3)}c{c}h{rng.randint(4, 17)}w{rng.randint(4, 17)}k{k}r{r}s{s}"
    name += f"u{stride[0]}x{stride[1]}p{pads[0]}-{pads[1]}x{pads[2]}-{pads[3]}"
    name += (f"g{groups}" if groups > 1 else "") + rng.choice(("_f32", "_f32_nchw")) + "_forward"
    try:
        return Problem.parse(name + steps)
    except tilewise.TilewiseError:  # the pool did not fit
        return random_problem(rng)

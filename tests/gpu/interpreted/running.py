"""Problems for the interpreter, run and judged against float64."""

from __future__ import annotations

import math
import random
from typing import Any
from unittest import mock

import torch
from support.harness import STEPS, Mismatch, Operands, exact, keeps_integers, operands, rms, spread
from torch.nn import functional as F

from tilewise.algorithms.gpu_common import GpuAlgorithm
from tilewise.core import Algorithm, Epilogue, InvalidProblem, Problem, Schedule, Target
from tilewise.kernels.cpu.prepare.mirrored import mirror
from tilewise.kernels.gpu import launch
from tilewise.planner.planner import inner_problem
from tilewise.runtime.engine import DTYPES

MOST_TAPS = 15  # of all groups; a step of a loop takes some 5 ms, whatever the tile


def problems(direction: str, dtype: str, count: int, seed: int = 0) -> list[Problem]:
    """Small ones of every kind: odd sizes, few channels, groups, stride, dilation, padding."""
    rng, found = random.Random(f"{direction} {dtype} {seed}"), []
    while len(found) < count:
        try:
            p = _problem(rng, direction, dtype)
        except InvalidProblem:
            continue
        if p.groups * p.r * p.s <= MOST_TAPS:
            found.append(p)
    return found


def _problem(rng: random.Random, direction: str, dtype: str) -> Problem:
    groups = rng.choice((1, 1, 1, 2, 3))
    c, k = (groups * rng.choice((1, 2, 3, 5, 8, 16, 17, 24, 33)) for _ in range(2))
    r, s = (rng.choice((1, 2, 3, 3, 3, 5)) for _ in range(2))
    sides = [rng.randint(0, size) for size in (r, r, s, s)]
    steps = (None,) if direction != "forward" else (None, "relu", rng.choice(STEPS))
    forward = direction == "forward"
    epilogue = Epilogue(forward and rng.random() < 0.5, forward and rng.random() < 0.3,
                        rng.choice(steps), rng.choice((1, 1, 2)) if forward else 1)
    epilogue = epilogue.split(GpuAlgorithm.fuses)[0]  # the rest is not the kernel's
    return Problem(rng.choice((1, 1, 2, 3)), c, rng.randint(1, 13), rng.randint(1, 13), k, r, s,
                   (rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3))), tuple(sides),
                   (rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3))), groups, dtype,
                   direction=direction, epilogue=epilogue)


def drawn(p: Problem, kind: str, seed: int) -> tuple[Operands, torch.Tensor]:
    """Operands and the gradient of the output, rounded to the problem's type."""
    o = operands(p.with_(direction="forward"), kind, seed)
    dy = operands(Problem(p.n, p.k, p.conv_h, p.conv_w, 1, 1, 1), kind, seed + 1).x
    typed = [None if t is None else t.to(DTYPES[p.dtype])
             for t in (o.x, o.weight, o.bias, o.residual, dy)]
    return Operands(*typed[:4]), typed[4]


def expected(p: Problem, o: Operands, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The answer in float64, and the size of its values where they do not cancel."""
    if p.direction == "forward":
        return exact(p, o), spread(p, o)
    squares = [t.double() ** 2 for t in (o.x, o.weight, dy)]
    return gradient(p, o.x, o.weight, dy), gradient(p, *squares).sqrt()


def gradient(p: Problem, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    x, weight = (t.double().requires_grad_() for t in (x, weight))
    top, bottom, left, right = p.padding
    y = F.conv2d(F.pad(x, (left, right, top, bottom)), weight, None, p.stride, 0, p.dilation,
                 p.groups)
    wanted = x if p.direction == "backward_data" else weight
    return torch.autograd.grad(y, wanted, dy.double())[0]


def channels_last(t: torch.Tensor | None) -> torch.Tensor | None:
    """The same values with strides of (N, H, W, C), also where a size is one."""
    if t is None:
        return None
    return t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def run(algorithm: Algorithm, p: Problem, t: Target, s: Schedule, o: Operands,
        dy: torch.Tensor) -> torch.Tensor:
    """The kernels' result; what they allocate is NaN until they write to it."""
    def hollow(shape: Any, **options: Any) -> torch.Tensor:
        return torch.full(shape, math.nan, **options)

    inner = inner_problem(algorithm, p)
    call = algorithm.build(inner, t, s)
    with mock.patch.object(launch, "empty", hollow):
        if p.direction == "backward_weight":
            return call(channels_last(o.x), channels_last(dy))
        mirrors = p.direction != inner.direction
        weight = algorithm.prepare(inner, t, s, mirror(o.weight, 1) if mirrors else o.weight)
        if p.direction == "backward_data":
            return call(channels_last(dy), weight)
        return call(channels_last(o.x), weight, o.bias, channels_last(o.residual))


def check(algorithm: Algorithm, p: Problem, t: Target, s: Schedule, kind: str = "floats",
          seed: int = 0) -> float:
    """The error over the declared bound; raises where it is above one, or integers differ."""
    p = p.with_(epilogue=inner_problem(algorithm, p).epilogue)  # what it fuses
    o, dy = drawn(p, kind, seed)
    want, scale = expected(p, o, dy)
    y = run(algorithm, p, t, s, o, dy)
    where = f"{p} on {t}: {algorithm.name} {s.to_json()}"
    if y.shape != want.shape or y.dtype != DTYPES[p.dtype]:
        raise Mismatch(f"{where}: {y.dtype} {tuple(y.shape)} for {tuple(want.shape)}")
    if kind == "integers" and algorithm.exact_on_integers and keeps_integers(p):
        rounded = want.to(y.dtype)
        if not torch.equal(y, rounded):
            raise Mismatch(f"{where}: {int((y != rounded).sum())} of {y.numel()} integers differ")
        return 0.0
    error = rms(y.double() - want) / max(rms(want), rms(scale), 1e-30)
    bound = algorithm.bound(inner_problem(algorithm, p), t, s)
    if not error <= bound:
        raise Mismatch(f"{where}: error is {error:.3e}, declared is {bound:.3e}")
    return error / bound

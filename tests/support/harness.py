"""Runs kernels between unmapped pages and judges what they leave behind."""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from tilewise.algorithms import ALGORITHMS
from tilewise.algorithms.cpu_few_rows import CpuFewRows
from tilewise.algorithms.reference import data_gradient
from tilewise.core import Algorithm, Epilogue, InvalidProblem, Problem, Schedule, Target
from tilewise.core.activations import ACTIVATIONS, parsed
from tilewise.kernels.activations import activated, apart
from tilewise.kernels.cpu.emit import launch, threads
from tilewise.kernels.cpu.prepare.mirrored import mirror
from tilewise.planner.planner import inner_problem
from tilewise.runtime import masks

from . import forks
from .guarded import Mismatch, launch_guarded

WRITTEN = [a for a in ALGORITHMS if a.takes == "addresses"]
# without those for large weights alone, which have tests of their own
GENERATED: dict[str, Algorithm] = {
    a.name: a for a in WRITTEN if "forward" in a.directions and a.unit is None
    and not isinstance(a, CpuFewRows)}
WEIGHT_GRADIENTS: dict[str, Algorithm] = {
    a.name: a for a in WRITTEN if "backward_weight" in a.directions and a.unit is None}
ON_MATRIX: dict[str, Any] = {a.name: a for a in WRITTEN if a.unit == "matrix"}
DIRECTIONS = {"forward": GENERATED, "backward_data": GENERATED,
              "backward_weight": WEIGHT_GRADIENTS}
THREADS = 2
LONG = "TILEWISE_LONG" in os.environ  # random tests in full; CI runs a sample of each


def sample(whole: int, part: int) -> int:
    """How many random problems are run."""
    return whole if LONG else part


# data


@dataclass(frozen=True)
class Operands:
    """float32 inputs of a problem as (N, C, H, W) tensors; what the epilogue lacks is None.

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
    """Random "integers", small enough for exact float32 sums, or normal "floats"."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        if kind == "integers":
            return torch.randint(-4, 5, shape, generator=rng, dtype=torch.float32)
        return torch.randn(shape, generator=rng)

    def image(*shape: int) -> torch.Tensor:
        return draw(*shape).relu() if non_negative else draw(*shape)

    inside, outside = (p.n, p.c, p.h, p.w), (p.n, p.k, p.conv_h, p.conv_w)
    if p.direction == "backward_weight":
        return Operands(image(*inside), draw(*outside), None, None)
    return Operands(
        image(*(outside if p.direction == "backward_data" else inside)),
        draw(p.k, p.group_c, p.r, p.s),
        channels(p, draw),
        draw(*(inside if p.direction == "backward_data" else outside))
        if p.epilogue.residual else None)


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
        return data_gradient(p, o.x, o.weight, o.bias, o.residual)
    windows = _windows(p, o.x)
    if p.direction == "backward_weight":
        grad = o.weight.double().unflatten(1, (p.groups, p.group_k))
        return torch.einsum("ngchwrs,ngkhw->gkcrs", windows, grad).flatten(0, 1)
    weight = o.weight.double().unflatten(0, (p.groups, p.group_k))
    y = torch.einsum("ngchwrs,gkcrs->ngkhw", windows, weight).flatten(1, 2)
    if p.epilogue.bias:
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


def spread(p: Problem, o: Operands) -> torch.Tensor:
    """Root of the sum of all squared terms: the size of an output whose terms do not cancel."""
    squares = Operands(*(None if value is None else value.double() ** 2
                         for value in (o.x, o.weight, o.bias, o.residual)))
    return exact(p.with_(epilogue=replace(p.epilogue, activation=None)), squares).sqrt()


def rms(values: torch.Tensor) -> float:
    return math.sqrt(values.square().mean()) if values.numel() else 0.0


# running


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
def _as_last_worker(region: int, frame: int, workers: int, flags: int) -> None:
    threads.Frame.from_address(frame)[threads.WORKER] = workers - 1
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(region)(frame)


LAST_WORKER = ctypes.cast(_as_last_worker, ctypes.c_void_p).value


def last_worker_alone() -> Any:
    """A context where the last worker does all tasks: on small problems it often gets none."""
    return mock.patch.object(launch, "parallel_address", return_value=LAST_WORKER)


def run(algorithm: Algorithm, p: Problem, t: Target, s: Schedule, o: Operands, prepared: Any,
        side: str = "end") -> torch.Tensor:
    """The output of a kernel, every buffer of which touches an unmapped page."""
    return run_masked(algorithm, p, t, s, o, prepared, side)[0]


def run_masked(algorithm: Algorithm, p: Problem, t: Target, s: Schedule, o: Operands,
               prepared: Any, side: str = "end") -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output and, where the problem asks for one, its mask."""
    given = {"x": laid_out(o.x, p), "weight": prepared.flatten(), "bias": o.bias,
             "residual": laid_out(o.residual, p)}
    made = {"y": math.prod(p.result_shape), "scratch": -(-algorithm.workspace(p, t, s) // 4)}
    if p.epilogue.mask:
        made["mask"] = math.prod(masks.shape(p, t))
    found = launch_guarded(algorithm.build(p, t, s), given, made, p.n, t.threads, side)
    mask = found["mask"].view(masks.shape(p, t)) if p.epilogue.mask else None
    a, b, c, d = p.result_shape
    if p.layout == "nchw" or p.direction == "backward_weight":
        return found["y"].view(a, b, c, d), mask
    return found["y"].view(a, c, d, b).permute(0, 3, 1, 2), mask


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
    """The floats of (N, C, H, W) images in the problem's order."""
    if images is None:
        return None
    return (images if p.layout == "nchw" else images.permute(0, 2, 3, 1)).flatten()


def compare(algorithm: Algorithm, p: Problem, t: Target, s: Schedule, kind: str, y: torch.Tensor,
            expected: torch.Tensor, scale: torch.Tensor) -> float:
    """Integers must be equal bit for bit, floats as close as the algorithm declares.

    The share of the bound that the error takes.
    """
    if kind == "integers" and algorithm.exact_on_integers and keeps_integers(p):
        wrong = y.view(torch.int32) != (expected + 0.0).float().view(torch.int32)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            raise Mismatch(f"{int(wrong.sum())} of {wrong.numel()} integers differ, first at {at}: "
                           f"{y[at]} for {expected[at]}")
        return 0.0
    if not y.numel():
        return 0.0
    error = rms(y.double() - expected) / max(rms(expected), rms(scale), 1e-30)
    bound = algorithm.bound(p, t, s)
    if not error <= bound:  # also where it is NaN
        raise Mismatch(f"error on {kind} is {error:.3e}, declared is {bound:.3e}")
    return error / bound


def keeps_integers(p: Problem) -> bool:
    """Whether the activation rounds nothing."""
    return p.epilogue.activation is None or parsed(p.epilogue.activation)[0].error == 0


def check(algorithm: Algorithm, p: Problem, t: Target, s: Schedule, seed: int = 0,
          batches: Sequence[int] | None = None) -> int:
    """Run a shape with each batch size on both kinds of data; the number of comparisons.

    Integers end at an unmapped page and are the last worker's, floats start at one.
    """
    batches = (p.n,) if batches is None else batches
    largest, compared = p.with_(n=max(batches)), 0
    for kind, side, workers in (("integers", "end", last_worker_alone),
                                ("floats", "start", nullcontext)):
        o = operands(largest, kind, seed, non_negative=seed % 3 == 0)
        for q, part, expected, scale in _answers(largest, o, batches):
            inner = inner_problem(algorithm, q)
            prepared = prepare(algorithm, q, t, s, part.weight)
            try:
                with workers():
                    y = run(algorithm, inner, t, s, part, prepared, side)
                compare(algorithm, inner, t, s, kind, y, expected, scale)
            except Mismatch as mismatch:
                raise Mismatch(f"{describe(algorithm, q, t, s)}: {mismatch}") from None
            compared += 1
    return compared


def _answers(p: Problem, o: Operands, batches: Sequence[int]) -> Iterator[
        tuple[Problem, Operands, torch.Tensor, torch.Tensor]]:
    """For each batch size: the problem, its operands, what is exact and how large sums are."""
    sums = p.direction == "backward_weight"  # over the images
    expected, scale = (None, None) if sums else (exact(p, o), spread(p, o))
    for n in batches:
        q = p.with_(n=n)
        part = o.first(q)
        if sums:
            yield q, part, exact(q, part), spread(q, part)
        else:
            yield q, part, expected[:n], scale[:n]


def describe(algorithm: Algorithm, p: Problem, t: Target, s: Schedule) -> str:
    return f"{p} on {t}: {algorithm.name} {s.to_json()}"


# problems and schedules


STEPS = (*ACTIVATIONS, "leaky_relu:0.2", "elu:0.5", "clamp:-2.0:3.0")
KINDS = {"dense": 30, "plain": 20, "pointwise": 18, "depthwise": 20, "grouped": 12}  # percent


def random_problem(rng: random.Random, flops: float = 1e6) -> Problem:
    """A small problem of any kind: at most so many operations an image."""
    while True:
        try:
            p = _any_problem(rng)
        except InvalidProblem:
            continue
        if p.with_(n=1).flops <= flops:
            return p


def _any_problem(rng: random.Random) -> Problem:
    kind = rng.choices(tuple(KINDS), KINDS.values())[0]
    c, k, groups = _channels(rng, kind)
    r, s = (1, 1) if kind == "pointwise" else _two(rng, (1, 2, 3, 3, 3, 3, 4, 5, 5, 6, 7, 9, 11))
    stride = (1, 1) if kind == "plain" else _two(rng, (1, 1, 1, 1, 2, 2, 3, 4))
    dilation = (1, 1) if kind == "plain" else _two(rng, (1, 1, 1, 1, 2, 3))
    spans = ((r - 1) * dilation[0] + 1, (s - 1) * dilation[1] + 1)
    bare = kind == "pointwise" and rng.random() < 0.8
    padding = (0, 0, 0, 0) if bare else _padding(rng, *spans)
    h, w = (rng.choice((rng.randint(1, 9), rng.randint(1, 20), rng.randint(10, 70)))
            for _ in range(2))
    bias, residual = rng.random() < 0.5, rng.random() < 0.3
    activation = rng.choice((None, "relu", STEPS[(c + 3 * h + 7 * w) % len(STEPS)]))
    epilogue = Epilogue(bias, residual, activation, rng.choice((1, 1, 1, 2)))
    return Problem(rng.randint(0, 3), c, h, w, k, r, s, stride, padding, dilation, groups,
                   epilogue=epilogue)


def more_filters(p: Problem) -> Problem:
    """Some depthwise problems with two, three or four filters a channel."""
    some = p.groups == p.c == p.k and (p.h + p.w) % 3 == 0
    return p.with_(k=p.c * (2 + p.h % 3)) if some else p


def _two(rng: random.Random, choices: Sequence[int]) -> tuple[int, int]:
    """Two values, equal more often than not."""
    first = rng.choice(choices)
    return first, first if rng.random() < 0.7 else rng.choice(choices)


def _channels(rng: random.Random, kind: str) -> tuple[int, int, int]:
    """Input channels, output channels, groups."""
    if kind == "depthwise":
        return (_width(rng, 70),) * 3
    if kind == "grouped":
        groups = rng.randint(2, 6)
        return groups * _width(rng, 18), groups * _width(rng, 18), groups
    return _width(rng, 70), _width(rng, 70), 1


def _width(rng: random.Random, most: int) -> int:
    """Small as often as large, and often next to a number of whole vectors."""
    if rng.random() < 0.3:
        near = rng.choice([lanes for lanes in (4, 8, 16, 32, 48, 64) if lanes < most])
        return near + rng.randint(-1, 1)
    return round(math.exp(rng.uniform(0, math.log(most))))


def _padding(rng: random.Random, span_h: int, span_w: int) -> tuple[int, int, int, int]:
    """None, as much as keeps the size, uneven, or more than the filter reaches."""
    kind = rng.choice(("none", "same", "same", "uneven", "large"))
    if kind == "none":
        return (0, 0, 0, 0)
    if kind == "same":
        return (span_h // 2, span_h // 2, span_w // 2, span_w // 2)
    extra = 3 if kind == "large" else -1
    top, bottom, left, right = (rng.randint(0, max(0, span + extra))
                                for span in (span_h, span_h, span_w, span_w))
    return (top, bottom, left, right)


def random_schedule(algorithm: Algorithm, p: Problem, t: Target, rng: random.Random) -> Schedule:
    """A schedule of the space; most often the one of four that is quickest to compile."""
    space, start = algorithm.space(p, t), algorithm.default(p, t)
    drawn = [space.sample(rng, start) for _ in range(4 if rng.random() < 0.8 else 1)]
    return quickest(drawn)


def quickest(schedules: Sequence[Schedule]) -> Schedule:
    """The one that is compiled soonest."""
    return min(schedules, key=_unrolled)


def _unrolled(s: Schedule) -> int:
    """About how many instructions are written for a tile."""
    names = [name for name in s if name.startswith(("tile", "rows", "vectors", "unroll"))]
    return math.prod(int(s[name]) for name in names)


# processes

TESTS = Path(__file__).parents[1]
# where a process finds `support` and the modules of all rooms
PLACES = [str(TESTS), *sorted(str(path) for path in TESTS.iterdir()
                               if path.is_dir() and path.name != "support")]


class Crash(AssertionError):
    """A process did not come to the end of its function."""


def in_process(function: str, *args: object, limit: float = 900) -> Any:
    """The JSON-able result of `module:function` of a test module, run in a process of its own.

    Lines printed by the function say what it is about to do: after a crash, the last is shown.
    """
    module, name = function.split(":")
    code = (f"import sys, json; sys.path[:0] = {PLACES!r}; import {module}; "
            f"print(json.dumps({module}.{name}(*json.loads({json.dumps(args)!r}))))")
    try:
        done = forks.run(code, limit)
    except forks.Late as late:
        raise Crash(f"not done after {limit} s: {str(late)[-1000:]}") from None
    last = (done.stdout.splitlines() or ["the import"])[-1]
    if done.returncode:
        raise Crash(f"ended with {done.returncode} at {last}\n{done.stderr[-3000:]}")
    return json.loads(last)

"""A convolution of volumes as convolutions of their slices, one for each tap of the depth.

Slices are images. The taps of a stretch of outputs are added up one after the other: each adds to
what the one before wrote. Slices of padding are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.cached import cached
from ..core.errors import InvalidProblem
from ..core.plan import Plan
from ..core.problem import Epilogue, Problem
from ..core.target import Target
from ..kernels import precision
from ..kernels.activations import joined
from ..kernels.cpu import memory
from ..runtime.executable import Executable
from ..runtime.images import channels_last
from ..runtime.turning import laid_out
from ..runtime.types import element_of, is_on_unit
from ..runtime.weights import as_floats, prepared_taps
from .calls import Call
from .devices import target_of
from .running import ENGINE

PYTHON = 5e-5  # seconds around a call
MARGIN, THIN = 0.9, 2.0  # of torch's estimate that ours may take; it is too low for Tx1x1 taps
SLOW, ROWS = 4.5, 20480  # how much longer torch takes for small volumes, and up to which size
Place = tuple[bool, bool]  # whether a tap is the first and the last of a sum
TOGETHER = 8 << 20  # bytes of output slices whose sums are added up at once: few calls, near caches


class Stretch(NamedTuple):
    """Output slices that follow each other, a step apart, and meet the same taps."""

    first: int
    size: int
    taps: tuple[int, ...]

    @property
    def places(self) -> list[tuple[int, Place]]:
        """The taps, and whether each begins and ends the sum."""
        last = len(self.taps) - 1
        return [(tap, (i == 0, i == last)) for i, tap in enumerate(self.taps)]


class Depth(NamedTuple):
    """A convolution along the depth."""

    size: int
    taps: int
    stride: int
    before: int
    after: int
    dilation: int

    @property
    def step(self) -> int:
        """From an output of a stretch to the next."""
        return 1

    @property
    def span(self) -> int:
        """Slices under one dilated filter."""
        return (self.taps - 1) * self.dilation + 1

    @property
    def outputs(self) -> int:
        return (self.size + self.before + self.after - self.span) // self.stride + 1

    def source(self, output: int, tap: int) -> int:
        """The slice that an output meets with a tap."""
        return output * self.stride + tap * self.dilation - self.before

    def met(self, output: int) -> tuple[int, ...]:
        """The taps that meet no padding."""
        return tuple(tap for tap in range(self.taps) if 0 <= self.source(output, tap) < self.size)

    def stretches(self, most: int) -> Iterator[Stretch]:
        """All outputs, at most so many together; with a stride, inputs do not follow each other."""
        for taps, group in groupby(range(self.outputs), self.met):
            outputs = list(group)
            yield from _cut(outputs, taps, most if self.stride == 1 else 1)


class Spread(NamedTuple):
    """A transposed convolution along the depth."""

    size: int
    outputs: int
    taps: int
    step: int
    before: int
    dilation: int

    def source(self, output: int, tap: int) -> int:
        """The slice whose product with a tap goes to an output."""
        return (output + self.before - tap * self.dilation) // self.step

    def met(self, output: int) -> tuple[int, ...]:
        """The taps that reach an output."""
        return tuple(tap for tap in range(self.taps)
                     if (output + self.before - tap * self.dilation) % self.step == 0
                     and 0 <= self.source(output, tap) < self.size)

    def stretches(self, most: int) -> Iterator[Stretch]:
        """All outputs, those of each phase of the stride apart, at most so many together."""
        for phase in range(self.step):
            for taps, group in groupby(range(phase, self.outputs, self.step), self.met):
                yield from _cut(list(group), taps, most)


def _cut(outputs: list[int], taps: tuple[int, ...], most: int) -> Iterator[Stretch]:
    """In equal parts of at most so many."""
    count = len(outputs)
    parts = -(-count // most)
    for a, b in pairwise(count * i // parts for i in range(parts + 1)):
        yield Stretch(outputs[a], b - a, taps)


@dataclass(frozen=True)
class Volume:
    """How the volumes of a problem are convolved; without stretches, torch does it."""

    images: Problem  # all output slices, as one problem
    depth: Depth | Spread
    stretches: tuple[Stretch, ...] = ()
    plans: dict[Place, Plan] = field(default_factory=dict)

    @cached
    def runs(self) -> dict[Place, Executable]:
        return {place: ENGINE.build(plan) for place, plan in self.plans.items()}

    def __call__(self, call: Any) -> Tensor:
        """The result of a `Call`, or a `Transposed` one, channels-last."""
        p, depth, count = self.images, self.depth, len(call.x)
        x, y = slices(call.x), _empty(p.n, p)
        residual = None if call.residual is None else slices(call.residual)
        spare = _empty(_most(self.stretches) * depth.step, p)
        taps = {place: _Taps(run, call, place[1]) for place, run in self.runs.items()}
        for image in range(count):
            start = image * depth.outputs
            self._one(taps, x[image * depth.size:], y[start:], spare,
                      None if residual is None else residual[start:])
        _, k, h, w = p.result_shape
        return y.as_strided(*channels_last((count, k, depth.outputs, h, w)))

    def _one(self, taps: dict[Place, _Taps], x: Tensor, y: Tensor, spare: Tensor,
             residual: Tensor | None) -> None:
        """One volume. Sums go to and fro between two places, so that the last is the result's."""
        for stretch in self.stretches:
            (first, count, _), step = stretch, self.depth.step
            here = slice(first, first + (count - 1) * step + 1, step)
            out, other = y[here], spare[:count * step:step]
            if len(stretch.taps) % 2 == 0:
                out, other = other, out
            before = None if residual is None else residual[here]
            for tap, place in stretch.places:
                source = self.depth.source(first, tap)
                before = taps[place](tap, x[source:source + count], before, out)
                out, other = other, out


class _Taps:
    """The taps at one place of a sum, with their weights and what they read for each channel."""

    def __init__(self, run: Executable, call: Any, ends: bool) -> None:
        self._run, self._weights = run, prepared_taps(call.weight, run).value
        self._channels = joined(call.bias, call.slope if ends else None, call.weight.shape[0])

    def __call__(self, tap: int, x: Tensor, before: Tensor | None, out: Tensor) -> Tensor:
        return self._run(x, self._weights[tap], self._channels, before, out)


def is_ours(x: Tensor) -> bool:
    """Whether volumes of the type can be run slice by slice, which is done in float32."""
    return (x.is_cpu and x.dtype != torch.float64 and element_of(x.dtype) is not None
            and not is_on_unit(x.dtype))


def widened(call: Call) -> Call:
    """In float32: sums go from tap to tap through memory, and must not be rounded there."""
    if call.x.dtype == torch.float32:
        return call
    kept = [None if t is None else as_floats(t) for t in (call.weight, call.bias, call.slope)]
    return call._replace(x=call.x.float(), weight=kept[0], bias=kept[1], slope=kept[2],
                         residual=None if call.residual is None else call.residual.float())


def volume_of(call: Call) -> Volume:
    """How a call is run, planned once; slices are float32, whatever the volumes are."""
    x, weight, bias, residual, *options, max_error, slope = call
    key = ("volume", x.shape, weight.shape, bias is None, residual is None, slope is None,
           *(tuple(some) for some in options[:3]), *options[3:], torch.get_num_threads(),
           precision.asked() if max_error is None else max_error)
    found: Volume | None = ENGINE.executables.get(key)
    return ENGINE.executables.put(key, _planned(call)) if found is None else found


def _planned(call: Call) -> Volume:
    """By the slices, unless torch should be faster with the whole."""
    depth = depth_of(call)
    if depth.outputs < 1:
        raise InvalidProblem(f"the dilated filter ({depth.span} slices) does not fit into the "
                             f"padded input ({depth.size + depth.before + depth.after})")
    p, t = images_of(call, len(call.x) * depth.outputs), target_of(call.x)
    if call.algorithm == "vendor" or not all(map(depth.met, range(depth.outputs))):
        return Volume(p, depth)
    volume, seconds = by_taps(p, depth, lambda q: ENGINE.plan(
        q, t, algorithm=call.algorithm, max_error=call.max_error))
    if call.algorithm is None and not pays(seconds * len(call.x), p, t, depth,
                                           len(call.x)):
        return Volume(p, depth)
    return volume


def by_taps(p: Problem, depth: Depth | Spread,
            plan: Callable[[Problem], Plan]) -> tuple[Volume, float]:
    """The plans of all taps, and the seconds that one volume should take."""
    slice_bytes = 4 * prod(p.result_shape[1:])
    stretches = tuple(depth.stretches(max(1, TOGETHER // slice_bytes)))
    places = [(stretch.size, place) for stretch in stretches for _, place in stretch.places]
    many = p.with_(n=_most(stretches))
    plans = {place: plan(many.with_(epilogue=_epilogue(p, *place)))
             for place in dict.fromkeys(place for _, place in places)}
    return Volume(p, depth, stretches, plans), sum(
        _seconds(plans[place], count) for count, place in places)


def pays(seconds: float, p: Problem, t: Target, depth: Depth, volumes: int) -> bool:
    """Whether torch's convolution of the whole should take longer; with groups it was faster."""
    whole = p.with_(c=p.c * depth.taps)  # as many products, in as long sums
    theirs = ENGINE.plan(whole, t, algorithm="vendor").seconds
    share = THIN if (p.r, p.s) == (1, 1) and p.k >= t.lanes else MARGIN
    if _is_small(p, depth, volumes):
        share *= SLOW * max(1.0, 2 * t.lanes / p.k)
    return p.groups == 1 and seconds < share * theirs


def _is_small(p: Problem, depth: Depth, volumes: int) -> bool:
    """Whether torch does without oneDNN: one volume of few rows and channels, a small filter."""
    return volumes == 1 and min(p.r, p.s) <= 3 and p.c * depth.size * p.h <= ROWS


def _seconds(plan: Plan, count: int) -> float:
    """The time of so many slices: weights are read anew, however few there are."""
    algorithm = ENGINE.planner.algorithm(plan.algorithm)
    return PYTHON + algorithm.cost(plan.inner.with_(n=count), plan.target, plan.schedule)


def _epilogue(p: Problem, begins: bool, ends: bool) -> Epilogue:
    """Of slices that begin or end a sum: what begins has the bias, what ends the activation."""
    return Epilogue(begins and p.epilogue.bias, not begins or p.epilogue.residual,
                    p.epilogue.activation if ends else None)


def _most(stretches: Sequence[Stretch]) -> int:
    return max(stretch.size for stretch in stretches)


def depth_of(call: Call) -> Depth:
    front, back, *_ = call.padding
    return Depth(call.x.shape[2], call.weight.shape[2], call.stride[0], front, back,
                 call.dilation[0])


def images_of(call: Call, count: int) -> Problem:
    """So many slices as one problem."""
    _, c, _, h, w = call.x.shape
    k, _, _, r, s = call.weight.shape
    (_, down, across), (_, _, *sides), (_, *apart) = call[4:7]
    top, bottom, left, right = sides
    tail = Epilogue(call.bias is not None, call.residual is not None, call.activation)
    return Problem(count, c, h, w, k, r, s, (down, across), (top, bottom, left, right),
                   (apart[0], apart[1]), call.groups, epilogue=tail)


def _empty(count: int, p: Problem) -> Tensor:
    _, k, h, w = p.result_shape
    return memory.empty(count, h, w, k).permute(0, 3, 1, 2)


def slices(x: Tensor) -> Tensor:
    """(N, C, D, H, W) as N * D images, channels-last; turned where they do not lie so."""
    return laid_out(x, torch.channels_last_3d).transpose(1, 2).flatten(0, 1)


def planes(y: Tensor) -> Tensor:
    """A channels-last volume in planes."""
    return laid_out(y, torch.contiguous_format).flatten().view(y.shape)

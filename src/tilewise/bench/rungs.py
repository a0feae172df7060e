"""The rungs of the ladder: which schedule each one is, and what it teaches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..algorithms.matrix import PRECISIONS
from ..conv.running import ENGINE
from ..core.errors import NoAlgorithm
from ..core.plan import Plan
from ..core.problem import Epilogue, Problem
from ..core.schedule import Schedule
from ..core.target import Target
from ..planner.planner import inner_problem
from ..planner.search import shortlist
from ..runtime.engine import random_operands

DIRECT, POINTWISE, WINOGRAD = "cpu_direct", "cpu_pointwise", "cpu_winograd"


@dataclass(frozen=True)
class Rung:
    """Something that runs the problem, with what it moves and needs."""

    name: str
    plan: Plan
    run: Callable[[Tensor], Tensor]
    bytes: int
    workspace: int


@dataclass(frozen=True)
class Step:
    """How a rung is made from those before it, and what to say of it."""

    name: str
    make: Callable[[Problem, Target, Sequence[Rung]], Rung]
    why: str
    why_not: str


def plain(p: Problem) -> Problem:
    """The convolution alone; what follows it runs as separate passes."""
    return p.with_(epilogue=Epilogue())


def _rung(name: str, p: Problem, t: Target, algorithm: str, schedule: Schedule,
          inner: Problem | None = None) -> Rung:
    """A schedule of an algorithm; raises NoAlgorithm with the reasons where it cannot run."""
    method, inner = ENGINE.planner.algorithm(algorithm), inner or plain(p)
    reasons = method.reject(inner, t)
    if not reasons and schedule not in method.space(inner, t):
        reasons = [f"schedule {schedule} is not in the space of {algorithm}"]
    if reasons:
        raise NoAlgorithm(p, t, {algorithm: reasons})
    plan = Plan(p, t, algorithm, method.version, schedule, inner, method.cost(inner, t, schedule),
                "estimate", method.bound(inner, t, schedule))
    return _of_plan(name, plan)


def _of_plan(name: str, plan: Plan) -> Rung:
    p = plan.problem
    executable = ENGINE.build(plan)
    _, weight, bias, residual = random_operands(p)
    prepared = executable.prepare(weight)
    method = ENGINE.planner.algorithm(plan.algorithm)
    return Rung(name, plan, lambda x: executable(x, prepared, bias, residual),
                plan.inner.bytes + _passes(plan),
                method.workspace(plan.inner, plan.target, plan.schedule))


def _passes(plan: Plan) -> int:
    """Bytes of the passes before and after the kernel, at least."""
    written = plan.inner.output_bytes
    after = sum((3 if step == "residual" else 2) * written for step in plan.after)
    return after + 2 * plan.problem.input_bytes * len(plan.before)


def _default(p: Problem, t: Target) -> Any:
    """The direct method's own choice, without what later rungs add."""
    found = ENGINE.planner.algorithm(DIRECT).default(plain(p), t)
    return found.with_(split=1, streaming=False)


def _narrow(p: Problem, t: Target) -> Any:
    """One sum at a time, nothing kept."""
    return _default(p, t).with_(tile_h=1, tile_w=1, vectors=1, unroll=1, block_rows=1,
                                block_cols=1, k_parts=1)


def _scalar(p: Problem, t: Target, _: Sequence[Rung]) -> Rung:
    if t.row.machines != Target("cpu", "scalar", 1).row.machines:
        raise NoAlgorithm(p, t, {DIRECT: ["the scalar row is for x86-64"]})
    scalar = t.with_(isa="scalar")
    return _rung("scalar loops", p, scalar, DIRECT, _narrow(p, scalar))


def _vectors(p: Problem, t: Target, _: Sequence[Rung]) -> Rung:
    return _rung("vectors", p, t, DIRECT, _narrow(p, t))


def _cache_tiles(p: Problem, t: Target, _: Sequence[Rung]) -> Rung:
    whole = _default(p, t)
    fits = [rows for rows in (28, 16, 14, 8, 7, 4, 2, 1) if rows <= p.conv_h
            and 4 * p.group_c * p.padded_w * rows * p.stride[0] <= t.l2 / 2]
    schedule = _narrow(p, t).with_(block_rows=max(fits, default=1), k_parts=whole.k_parts)
    cols = [b for b in (1024, 64, 16, 4, 1)
            if schedule.with_(block_cols=b) in ENGINE.planner.algorithm(DIRECT).space(plain(p), t)]
    return _rung("cache tiles", p, t, DIRECT, schedule.with_(block_cols=cols[0]))


def _small(p: Problem, width: int) -> int:
    return max(w for w in (4, 2, 1) if w <= width)


def _unrolled(p: Problem, t: Target, _: Sequence[Rung]) -> Rung:
    """Every window of the input written out, then one matrix product."""
    if p.groups > 1:
        raise NoAlgorithm(p, t, {POINTWISE: [f"groups is {p.groups}, needs 1"]})
    depth = p.c * p.r * p.s
    q = p.with_(c=depth, h=p.conv_h, w=p.conv_w, r=1, s=1, stride=(1, 1), padding=(0, 0, 0, 0),
                dilation=(1, 1))
    method = ENGINE.planner.algorithm(POINTWISE)
    schedule = method.default(plain(q), t).with_(
        tile_w=_small(p, p.conv_h * p.conv_w), vectors=1, unroll=4, streaming=False)
    _, weight, bias, residual = random_operands(p)
    product = _rung("unrolled input + GEMM", q, t, POINTWISE, schedule)
    executable = ENGINE.build(product.plan)
    prepared = executable.prepare(weight.permute(0, 2, 3, 1).reshape(p.k, depth, 1, 1))
    copied, padded = plain(q).input_bytes, 2 * p.input_bytes if any(p.padding) else 0
    # estimated as the product alone: only the order of magnitude counts
    return Rung(product.name, replace(product.plan, problem=p, inner=plain(p)),
                lambda x: executable(unroll(p, x), prepared, bias, residual),
                product.bytes + p.input_bytes + padded + copied, product.workspace + copied)


def unroll(p: Problem, x: Tensor) -> Tensor:
    """Channels-last windows as channels: (N, R*S*C, rows, columns)."""
    top, bottom, left, right = p.padding
    wide = F.pad(x.permute(0, 2, 3, 1), (0, 0, left, right, top, bottom)).contiguous()
    n, h, w, c = wide.stride()
    windows = wide.as_strided(
        (p.n, p.conv_h, p.conv_w, p.r, p.s, p.c),
        (n, h * p.stride[0], w * p.stride[1], h * p.dilation[0], w * p.dilation[1], c))
    return windows.reshape(p.n, p.conv_h, p.conv_w, -1).permute(0, 3, 1, 2)


def _fused(p: Problem, t: Target, _: Sequence[Rung]) -> Rung:
    schedule = _cache_tiles(p, t, ()).plan.schedule.with_(tile_w=_small(p, p.conv_w), unroll=4)
    space = ENGINE.planner.algorithm(DIRECT).space(plain(p), t)
    cols = [b for b in (1024, 64, 16, 4, 1) if schedule.with_(block_cols=b) in space]
    return _rung("fused implicit GEMM", p, t, DIRECT, schedule.with_(block_cols=cols[0]))


def _register_tile(p: Problem, t: Target, _: Sequence[Rung]) -> Rung:
    return _rung("register tile", p, t, DIRECT, _default(p, t).with_(unroll=1))


def _unrolled_loop(p: Problem, t: Target, _: Sequence[Rung]) -> Rung:
    return _rung("unrolled loop", p, t, DIRECT, _default(p, t).with_(unroll=4))


def _split(p: Problem, t: Target, _: Sequence[Rung]) -> Rung:
    parts = next((n for n in (4, 2) if p.group_c % n == 0), None)
    if parts is None:
        raise NoAlgorithm(p, t, {DIRECT: [f"{p.group_c} input channels cannot be halved"]})
    return _rung("split channels", p, t, DIRECT, _default(p, t).with_(split=parts))


def _tuned(p: Problem, t: Target, _: Sequence[Rung]) -> Rung:
    """The fastest of the most promising schedules, by measurement."""
    method, inner = ENGINE.planner.algorithm(DIRECT), plain(p)
    plans = [_rung("tuned schedule", p, t, DIRECT, s).plan
             for s in shortlist(method, inner, t, "exhaustive")]
    best = ENGINE.planner.measure(plans)[0]
    return _rung("tuned schedule", p, t, DIRECT, best.schedule)


def _winograd(size: int) -> Callable[[Problem, Target, Sequence[Rung]], Rung]:
    def make(p: Problem, t: Target, _: Sequence[Rung]) -> Rung:
        method, inner = ENGINE.planner.algorithm(WINOGRAD), plain(p)
        reasons = method.reject(inner, t)
        if reasons:
            raise NoAlgorithm(p, t, {WINOGRAD: reasons})
        return _rung(f"Winograd F({size}x{size})", p, t, WINOGRAD, _blocked(p, t, size, inner))

    return make


def _blocked(p: Problem, t: Target, size: int, inner: Problem) -> Schedule:
    """The cheapest blocking by the cost model for tiles of one size."""
    method = ENGINE.planner.algorithm(WINOGRAD)
    space, start = method.space(inner, t), method.default(inner, t)
    likely = [start.with_(tile_h=min(size, p.conv_h), tile_w=min(size, p.conv_w), order=order,
                          groups=groups, k_parts=1)
              for order in ("channels", "positions", "shared") for groups in (1, 2, 4, 8, 16, 32)]
    legal = [s for s in likely if s in space]
    if not legal:
        raise NoAlgorithm(p, t, {WINOGRAD: [f"no tile of {size}x{size} for this output"]})
    return min(legal, key=lambda s: method.cost(inner, t, s))


def _fused_epilogue(p: Problem, t: Target, before: Sequence[Rung]) -> Rung:
    """The last rung once more, with all that it can fuse."""
    if not p.epilogue.steps:
        raise NoAlgorithm(p, t, {"epilogue": ["nothing follows the convolution"]})
    plan = before[-1].plan
    inner = inner_problem(ENGINE.planner.algorithm(plan.algorithm), p)
    return _rung("fused epilogue", p, t, plan.algorithm, plan.schedule, inner)


def _planners_choice(p: Problem, t: Target, _: Sequence[Rung]) -> Rung:
    return _of_plan("the planner's choice", ENGINE.plan(p, t))


def _matrix_unit(products: int) -> Callable[[Problem, Target, Sequence[Rung]], Rung]:
    def make(p: Problem, t: Target, _: Sequence[Rung]) -> Rung:
        if not t.row.matrix:
            raise NoAlgorithm(p, t, {"matrix unit": [f"{t.isa} has no matrix unit"]})
        refused = {}
        for name in (f"{WINOGRAD}_{PRECISIONS[products]}", f"{DIRECT}_{PRECISIONS[products]}"):
            method = ENGINE.planner.algorithm(name)
            inner = inner_problem(method, p)
            refused[name] = method.reject(inner, t)
            if not refused[name]:
                return _rung(f"matrix unit, {products} products", p, t, name,
                             method.default(inner, t), inner)
        raise NoAlgorithm(p, t, refused)

    return make


STEPS = (
    Step("scalar loops", _scalar, "one multiplication at a time, each waiting for the sum before "
         "it", ""),
    Step("vectors", _vectors, "one instruction multiplies a whole vector of output channels",
         "too few output channels to fill a vector"),
    Step("cache tiles", _cache_tiles, "a padded block of the input is copied once and stays in the "
         "second cache while all output channels use it",
         "the input was in a cache already; the multiply-adds wait for each other, not for memory"),
    Step("unrolled input + GEMM", _unrolled, "several pixels share each loaded weight in a matrix "
         "product, which pays for writing every window out",
         "writing every window out costs more than the matrix product gains"),
    Step("fused implicit GEMM", _fused, "the same product reads the windows where they are: the "
         "unrolled copy and its memory are gone",
         "the copy was cheap here, small enough for a cache"),
    Step("register tile", _register_tile, "a tile of pixels times channels fills the registers: "
         "each load feeds many multiply-adds, and none waits for the one before",
         "the small tile was enough: the output has too few pixels or channels for a larger one"),
    Step("unrolled loop", _unrolled_loop, "fewer branches and address updates for each "
         "multiply-add", "the loop's overhead was hidden behind the multiply-adds already"),
    Step("split channels", _split, "input channels divided over tasks give all threads work",
         "there is work for all threads without it: partial sums are written and read again for "
         "nothing (compare the rung after this one with the one before it)"),
    Step("tuned schedule", _tuned, "the best of several tilings by measurement, not by estimate",
         "the estimate had found as good a schedule"),
    Step("Winograd F(2x2)", _winograd(2), "fewer multiplications an output (4 instead of 9 for a "
         "3x3 filter), for some additions",
         "the transforms cost more than the saved multiplications"),
    Step("Winograd F(4x4)", _winograd(4), "larger tiles need fewer still (2.25 an output for a "
         "3x3 filter); the error grows a little",
         "larger transforms, or tiles that overhang the image, eat the gain"),
    Step("fused epilogue", _fused_epilogue, "bias, activation and pooling are applied in "
         "registers; the output is written once",
         "the passes were cheap: the output is in a cache"),
    Step("matrix unit, 6 products", _matrix_unit(6), "floats as sums of three bfloat16 parts, "
         "multiplied on the matrix unit: as accurate as float32",
         "splitting the values and six products cost more than the matrix unit gains"),
    Step("matrix unit, 3 products", _matrix_unit(3), "two parts and half the products, for callers "
         "who admit the error", "the transforms and the splitting take most of the time, not the "
         "products"),
    Step("the planner's choice", _planners_choice, "what tilewise.conv2d runs: the cheapest by the "
         "cost model, within the admitted error",
         "what tilewise.conv2d runs: estimated, not measured, and within the error that is "
         "admitted by default; tilewise tune measures"),
)

"""Generated kernels of gradients against float64, with every buffer next to an unmapped page."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import harness
import pytest
import torch
from cases import ROWS, Jobs, check_counts, check_variety, jobs_of, run_cases, runs
from guarded import launch_guarded
from harness import DIRECTIONS, GENERATED, WEIGHT_GRADIENTS, Mismatch
from torch.nn import functional as F

from tilewise.algorithms.reference import solve
from tilewise.core import ISA, Epilogue, Problem, Schedule, Target
from tilewise.kernels.cpu.between.masks import make_pack, make_unpack, unpack_scratch
from tilewise.kernels.cpu.conv.winograd_geometry import Geometry
from tilewise.kernels.cpu.emit.launch import launcher
from tilewise.kernels.cpu.prepare import winograd as winograd_prepare
from tilewise.planner.planner import inner_problem
from tilewise.runtime import masks
from tilewise.runtime.executable import mirror

GRADIENTS = ("backward_data", "backward_weight")
CHUNKS = 1  # under pytest-xdist jobs take turns, and each imports torch
SHAPES = 128  # of each direction, on each row of ISA
BATCHES = 10  # sizes that share a shape, and so a kernel; some shapes are also run empty
LEAST = 1000  # distinct problems of a direction on each row, empty ones not counted
# problems each algorithm runs on each row
FLOOR = {"backward_data": 60, "backward_weight": 90}
MASKS = 60  # problems on each row, for each way to make a mask
FUSED = 30  # shapes of those whose mask a kernel makes; each runs with two batch sizes
LARGEST = 5  # filter of those: masks know nothing of it, and large ones take seconds to compile
WAYS = ("contiguous", "channels_last", "turned", "taps_first")  # strides, which share a kernel
PREPARED = 24  # shapes of weights on each row; each is prepared from all these strides
FILTERS = ((3, 3), (5, 5), (2, 3), (1, 4), (7, 1), (3, 3))
REPEATED = ("n2c20h19w17k24r3s3p1_f32_backward_weight",
            "n3c24h30w30k40r1s1_f32_backward_weight",
            "n2c12h17w15k18r3s3u2p1g3_f32_backward_weight",
            "n3c21h20w21k21r3s3p1g21_f32_backward_weight")


# in processes of their own: a kernel may crash


def run_random_cases(row: str, direction: str, chunk: int) -> dict[str, Any]:
    """One chunk of the cases of a row: what ran, and what was wrong."""
    return run_cases(row, direction, SHAPES, BATCHES, chunk, CHUNKS)


def run_repeatedly(row: str) -> dict[str, Any]:
    """Whether a schedule gives the same bits in every run, on one thread and on two."""
    target, failures = Target.host(row, harness.THREADS), []
    ran = dict.fromkeys(WEIGHT_GRADIENTS, 0)
    for p in map(Problem.parse, REPEATED):
        o = harness.operands(p, "floats", seed=1)
        for name, a in WEIGHT_GRADIENTS.items():
            if a.reject(p, target):
                continue
            prepared = harness.prepare(a, p, target, Schedule(), o.weight)
            for s in _default_and_others(a, p, target):
                what = harness.describe(a, p, target, s)
                print(what)
                first, *others = [harness.run(a, p, target.with_(threads=threads), s, o, prepared)
                                  for threads in (1, 1, 2, 2, 2)]
                failures += [what for y in others if not torch.equal(first, y)]
                ran[name] += 1
    return {"ran": ran, "failures": failures}


def _default_and_others(algorithm: Any, p: Problem, target: Target) -> list[Schedule]:
    rng = random.Random(f"{algorithm.name} of {p}")
    return [algorithm.default(p, target),
            *(harness.random_schedule(algorithm, p, target, rng) for _ in range(2))]


def _mask_problem(rng: random.Random, able: Any = None) -> Problem:
    """A small problem that asks for a mask; sizes are odd as often as even."""
    while True:
        p = harness.random_problem(rng)
        activation, pool = rng.choice((("relu", 1), ("relu", 2), (None, 2)))
        if p.conv_h < pool or p.conv_w < pool:
            continue
        p = p.with_(n=rng.randint(0, 3), epilogue=replace(p.epilogue, activation=activation,
                                                          pool=pool, mask=True))
        if able is None or able(p):
            return p


def torch_tail(p: Problem, sums: torch.Tensor, grad: torch.Tensor) -> tuple[Any, Any]:
    """ReLU and pooling by torch: the result, and where its gradient goes."""
    sums = sums.contiguous().requires_grad_()
    y = sums if p.epilogue.activation is None else sums.relu()
    y = F.max_pool2d(y, 2) if p.epilogue.pool == 2 and p.n else y
    y = y.view(p.n, p.k, p.out_h, p.out_w) if p.n else sums.new_zeros(0, p.k, p.out_h, p.out_w)
    spread, = torch.autograd.grad(y, sums, grad) if p.n else (torch.zeros_like(sums),)
    return y.detach(), spread


def unpacked(mask: torch.Tensor, channels: int, lanes: int) -> torch.Tensor:
    """The bits as (N, K, H, W); a byte has at most as many as a vector has lanes."""
    bits = mask[..., None] >> torch.arange(min(8, lanes), dtype=torch.uint8) & 1
    return bits.flatten(-2)[..., :channels].permute(0, 3, 1, 2).bool()


def demand(condition: bool, what: str) -> None:
    if not condition:
        raise Mismatch(what)


def pack_guarded(p: Problem, t: Target, sums: torch.Tensor,
                 side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`masks.pack` with every buffer at an unmapped page."""
    p = masks._bare(p)
    found = launch_guarded(
        launcher(make_pack, p, Schedule(), t.row), {"x": harness.laid_out(sums, p)},
        {"y": p.n * p.out_h * p.out_w * p.k, "mask": masks.empty(p, t).numel()}, p.n, t.threads,
        side)
    return (found["y"].view(p.n, p.out_h, p.out_w, p.k).permute(0, 3, 1, 2),
            found["mask"].view(masks.shape(p, t)))


def unpack_guarded(p: Problem, t: Target, grad: torch.Tensor, mask: torch.Tensor,
                   side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`masks.unpack` with every buffer at an unmapped page."""
    p = masks._bare(p)
    found = launch_guarded(
        launcher(make_unpack, p, Schedule(), t.row),
        {"x": harness.laid_out(grad, p), "mask": mask.flatten()},
        {"y": p.n * p.conv_h * p.conv_w * p.k, "bias": p.k, "scratch": unpack_scratch(p, t.lanes)},
        p.n, t.threads, side)
    return found["y"].view(p.n, p.conv_h, p.conv_w, p.k).permute(0, 3, 1, 2), found["bias"]


def check_pack(p: Problem, t: Target, seed: int) -> None:
    """Integers have ties, which go to the first; floats have none."""
    rng = torch.Generator().manual_seed(seed)
    for kind, side in (("integers", "end"), ("floats", "start")):
        shapes = (p.n, p.k, p.conv_h, p.conv_w), (p.n, p.k, p.out_h, p.out_w)
        sums, grad = (torch.randint(-2, 3, shape, generator=rng).float() if kind == "integers"
                      else torch.randn(shape, generator=rng) for shape in shapes)
        y, mask = pack_guarded(p, t, sums, side)
        expected, spread = torch_tail(p, sums, grad)
        demand(torch.equal(y, expected), f"{kind}: results differ")
        check_unpack(p, t, grad, mask, spread, side)
        ones = torch_tail(p, sums, torch.ones_like(grad))[1].bool()
        demand(torch.equal(unpacked(mask, p.k, t.lanes), ones), f"{kind}: bits differ")


def check_unpack(p: Problem, t: Target, grad: torch.Tensor, mask: torch.Tensor,
                 spread: torch.Tensor, side: str) -> None:
    """A gradient behind the mask, and its sum: short sums in float32 against float64."""
    found, bias = unpack_guarded(p, t, grad, mask, side)
    demand(torch.equal(found, spread), "gradients differ")
    sums = spread.double().sum((0, 2, 3))
    terms = spread.double().abs().sum((0, 2, 3))
    bound = 2.0**-24 * (p.conv_w + p.conv_h + p.n) * terms
    demand(bool(((bias.double() - sums).abs() <= bound).all()), "gradients of the bias differ")


def check_fused_mask(p: Problem, t: Target, s: Schedule, seed: int) -> None:
    """The mask of a kernel against torch's autograd on the same kernel's sums.

    Weights are prepared without code of ours, which other tests compare with this definition.
    """
    a = GENERATED["cpu_winograd"]
    bare = p.with_(epilogue=replace(p.epilogue, activation=None, pool=1, mask=False))
    for kind, side in (("integers", "end"), ("floats", "start")):
        o = harness.operands(p, kind, seed)
        prepared = exact_u(p, s, t.lanes, o.weight)
        y, mask = harness.run_masked(a, p, t, s, o, prepared, side)
        sums = harness.run(a, bare, t, s, o, prepared, side)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed))
        expected, spread = torch_tail(p, sums, grad)
        if p.epilogue.bias and p.epilogue.residual and p.epilogue.pool > 1:
            # the kernel adds the bias after pooling and so last: other roundings, other ties
            demand(torch.allclose(y, expected, rtol=1e-5, atol=1e-5), f"{kind}: results differ")
            continue
        demand(torch.equal(y, expected), f"{kind}: results differ")
        bits = unpacked(mask, p.k, t.lanes)
        torchs = torch_tail(p, sums, torch.ones_like(grad))[1].bool()
        # windows are compared before the bias is added: where its rounding makes values equal,
        # the gradient may go to another one of them
        wrong = bits != torchs
        demand(not (wrong & ~_tied(p, sums)).any(), f"{kind}: bits differ")
        demand(torch.equal(_a_window(p, bits), _a_window(p, torchs)),
               f"{kind}: windows pass a gradient not once")
        if not wrong.any():
            check_unpack(p, t, grad, mask, spread, side)


def _a_window(p: Problem, bits: torch.Tensor) -> torch.Tensor:
    """How many bits a window has."""
    size = p.epilogue.pool
    return F.avg_pool2d(bits.float(), size) * size**2 if size > 1 and p.n else bits


def _tied(p: Problem, sums: torch.Tensor) -> torch.Tensor:
    """Values as large as the largest of their window."""
    if p.epilogue.pool == 1 or not p.n:
        return torch.zeros_like(sums, dtype=torch.bool)
    largest = F.max_pool2d(sums, 2).repeat_interleave(2, 2).repeat_interleave(2, 3)
    return sums == F.pad(largest, (0, p.conv_w % 2, 0, p.conv_h % 2), value=float("nan"))


def run_masks(row: str) -> dict[str, Any]:
    """Masks of separate passes."""
    target, rng, failures = Target.host(row, harness.THREADS), random.Random(f"masks {row}"), []
    for seed in range(MASKS):
        p = _mask_problem(rng)
        print(what := f"pack {p}")
        try:
            check_pack(p, target, seed)
        except Mismatch as mismatch:
            failures.append(f"{what}: {mismatch}")
    return {"ran": MASKS, "failures": failures}


def run_fused_masks(row: str) -> dict[str, Any]:
    """Masks of a kernel: each shape without images or with some, and with other ones."""
    target, rng, failures = Target.host(row, harness.THREADS), random.Random(f"fused {row}"), []
    winograd, ran = GENERATED["cpu_winograd"], []

    def able(p: Problem) -> bool:
        return (max(p.r, p.s) <= LARGEST
                and not winograd.reject(inner_problem(winograd, p), target))

    for seed in range(FUSED):
        p = _mask_problem(rng, able)
        s = (winograd.default(p, target) if seed % 2 else
             harness.random_schedule(winograd, p, target, rng))
        for q in (p.with_(n=n) for n in rng.sample(range(4), 2)):
            print(what := harness.describe(winograd, q, target, s))
            try:
                check_fused_mask(q, target, s, seed)
                ran.append(str(q))
            except Mismatch as mismatch:
                failures.append(f"{what}: {mismatch}")
    return {"ran": ran, "failures": failures}


def exact_u(p: Problem, s: Any, lanes: int, weight: torch.Tensor) -> torch.Tensor:
    """U by its definition in float64, in the order of the kernel's panels."""
    g: Any = Geometry(p, s, lanes)
    down, across = (torch.tensor([[float(v) for v in row] for row in matrix], dtype=torch.float64)
                    for matrix in (g.down.G, g.across.G))
    u = torch.einsum("ir,kcrs,js->ijck", down, weight.double(), across).float()
    u = F.pad(u.reshape(g.positions, p.c, p.k), (0, g.k_vectors * lanes - p.k, 0, g.depth - p.c))
    blocks = [u[..., first:first + g.block_k] for first in range(0, u.shape[-1], g.block_k)]
    if s.order == "channels":
        return torch.cat([block.flatten() for block in blocks])
    return torch.cat([block.flatten(1) for block in blocks], 1).flatten()


def _strided(weight: torch.Tensor, how: str) -> torch.Tensor:
    """The same values with other strides."""
    if how == "mirrored":
        return mirror(weight, 1).contiguous().transpose(0, 1).flip(2, 3)
    orders = {"contiguous": (0, 1, 2, 3), "channels_last": (0, 2, 3, 1), "turned": (1, 0, 3, 2),
              "taps_first": (2, 3, 0, 1)}
    order = orders[how]
    back = [order.index(i) for i in range(4)]
    return weight.permute(order).contiguous().permute(back)


def check_prepared(p: Problem, t: Target, s: Schedule, how: str, seed: int) -> None:
    weight = torch.randn(p.k, p.c, p.r, p.s, generator=torch.Generator().manual_seed(seed))
    given = _strided(weight, how)
    expected = exact_u(p, s, t.lanes, weight)
    values = given.as_strided((given.numel(),), (1,), 0)  # as they lie in memory
    for side in ("start", "end"):
        u = launch_guarded(launcher(winograd_prepare.make, p, s, t.row),
                           {"x": torch.tensor(given.stride()), "weight": values},
                           {"y": Geometry(p, s, t.lanes).weight_floats}, 1, t.threads, side)["y"]
        # rounded once; sums of a few terms in float64 may round the other way
        error = (u.double() - expected.double()).abs()
        demand(bool((error <= 2.0**-23 * expected.abs().double() + 1e-14).all()),
               f"U differs by {float(error.max()):.1e}")


def run_prepared(row: str) -> dict[str, Any]:
    target, rng, failures = Target.host(row, harness.THREADS), random.Random(f"U {row}"), []
    for seed in range(PREPARED):
        r, taps = FILTERS[seed % len(FILTERS)]
        p = Problem(1, rng.randint(1, 40), r, taps, rng.randint(1, 70), r, taps)
        s = Schedule(tile_h=1 if r == 1 else rng.randint(1, 4),
                     tile_w=1 if taps == 1 else rng.randint(2, 4),
                     order=("channels", "positions", "shared")[seed // len(FILTERS) % 3],
                     vectors=rng.randint(1, min(4, -(-p.k // target.lanes))))
        for number, how in enumerate(WAYS):
            print(what := f"{p} {s.to_json()} {how}")
            try:
                check_prepared(p, target, s, how, len(WAYS) * seed + number)
            except Mismatch as mismatch:
                failures.append(f"{what}: {mismatch}")
    return {"ran": PREPARED * len(WAYS), "failures": failures}


# the tests


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    with jobs_of(request) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("direction", GRADIENTS)
@pytest.mark.parametrize("row", ROWS)
@runs("run_random_cases")
def test_random_gradients(jobs: Jobs, row: str, direction: str, chunk: int) -> None:
    assert jobs.result("run_random_cases", row, direction, chunk)["failures"] == []


@pytest.mark.slow
@pytest.mark.parametrize("direction", GRADIENTS)
@pytest.mark.parametrize("row", ROWS)
def test_random_gradients_are_many_and_reach_every_algorithm(jobs: Jobs, row: str,
                                                             direction: str) -> None:
    results = [jobs.result("run_random_cases", row, direction, chunk) for chunk in range(CHUNKS)]
    check_counts(results, LEAST, FLOOR[direction], 15)
    check_variety(results, Target.host(row).lanes)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
@runs("run_repeatedly")
def test_runs_are_equal_on_any_number_of_threads(jobs: Jobs, row: str) -> None:
    result = jobs.result("run_repeatedly", row)
    assert result["failures"] == []
    assert min(result["ran"].values()) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
@runs("run_masks")
def test_masks_are_those_of_autograd(jobs: Jobs, row: str) -> None:
    assert jobs.result("run_masks", row) == {"ran": MASKS, "failures": []}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
@runs("run_fused_masks")
def test_masks_of_a_kernel_are_those_of_autograd(jobs: Jobs, row: str) -> None:
    result = jobs.result("run_fused_masks", row)
    assert result["failures"] == []
    assert len(set(result["ran"])) >= MASKS
    problems = [Problem.parse(text) for text in result["ran"]]
    assert {p.n for p in problems} == {0, 1, 2, 3}
    assert {(p.epilogue.activation, p.epilogue.pool) for p in problems} == {
        ("relu", 1), ("relu", 2), (None, 2)}
    assert {(p.conv_h % 2, p.conv_w % 2) for p in problems if p.epilogue.pool == 2} == {
        (0, 0), (0, 1), (1, 0), (1, 1)}
    lanes = Target.host(row).lanes
    for tail in (True, False):
        assert any(bool(p.k % lanes) is tail and p.k >= lanes for p in problems)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
@runs("run_prepared")
def test_prepared_weights_are_those_of_float64(jobs: Jobs, row: str) -> None:
    assert jobs.result("run_prepared", row) == {"ran": PREPARED * len(WAYS), "failures": []}


@pytest.mark.parametrize("direction", GRADIENTS)
@pytest.mark.parametrize("row", ISA)
def test_defaults_are_in_their_space(row: str, direction: str) -> None:
    rng, target = random.Random(f"{direction} of {row}"), Target("cpu", row, 2)
    seen = dict.fromkeys(DIRECTIONS[direction], 0)
    for flops in [1e6, 1e9] * 150:
        p = harness.random_problem(rng, flops).with_(direction=direction, epilogue=Epilogue())
        for name, algorithm in DIRECTIONS[direction].items():
            q = inner_problem(algorithm, p)
            if not algorithm.reject(q, target):
                seen[name] += 1
                s = algorithm.default(q, target)
                assert s in algorithm.space(q, target), harness.describe(algorithm, q, target, s)
    assert min(seen.values()) >= 10, seen


# the harness itself


@pytest.mark.parametrize("direction", GRADIENTS)
def test_exact_gradients_are_those_of_autograd(direction: str) -> None:
    rng = random.Random("exact gradients")
    for seed in range(60):
        p = harness.random_problem(rng, flops=2e5).with_(direction=direction, epilogue=Epilogue())
        if not p.n:
            continue
        o = harness.operands(p, "floats", seed)
        x = (o.x if direction == "backward_weight" else torch.zeros(p.n, p.c, p.h, p.w)).double()
        w = (o.weight if direction == "backward_data"
             else torch.zeros(p.k, p.group_c, p.r, p.s)).double()
        grad = (o.weight if direction == "backward_weight" else o.x).double()
        top, bottom, left, right = p.padding
        y = F.conv2d(F.pad(x.requires_grad_(), (left, right, top, bottom)), w.requires_grad_(),
                     None, p.stride, 0, p.dilation, p.groups)
        expected, = torch.autograd.grad(y, x if direction == "backward_data" else w, grad)
        for found in (harness.exact(p, o), solve(p, o.x, o.weight)):
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)

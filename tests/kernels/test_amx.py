"""The matrix unit: what runs on it, how exactly, and that nothing else changes."""

from __future__ import annotations

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support import generated_code, harness
from support.harness import GENERATED, ON_MATRIX, Mismatch, in_process
from support.matrix_unit import needs_amx, planned, precision, products_of
from torch.nn import functional as F

import tilewise
from tilewise.algorithms import ALGORITHMS
from tilewise.core import Epilogue, Problem, Schedule, Target
from tilewise.core.code import Code
from tilewise.kernels.cpu.emit.parts import split_tensor
from tilewise.planner import Planner
from tilewise.planner.planner import inner_problem
from tilewise.runtime.engine import PRECISIONS, random_operands
from tilewise.runtime.executable import Executable
from tilewise.tools.sharing import noted

FORWARD = {name: a for name, a in ON_MATRIX.items() if "forward" in a.directions}
PRODUCTS = (1, 3, 6)
LEAST = harness.sample(1000, 320)  # problems for each number of products, empty ones not counted
BATCHES = 16  # of each shape, which share a kernel
FLOOR = 150  # problems of each algorithm and number of products
CHUNKS = 2
ENOUGH = 5  # failures that tell what is wrong
DEEP_ONES = (("cpu_winograd", "n2c1100h5w6k40r3s3p1_f32_forward+bias"),
             ("cpu_direct", "n1c600h4w5k40r3s3p1_f32_forward+relu"),
             ("cpu_direct", "n2c600h7w9k40r3s3p1_f32_forward+bias+relu+pool2"),
             ("cpu_direct", "n2c600h5w8k40r1s1_f32_forward+bias+residual+relu+pool2"),
             ("cpu_direct", "n3c3h23w31k40r7s7u2p3_f32_forward+bias+relu"),
             ("cpu_direct", "n3c8h14w31k40r3s4p2_f32_forward+bias+relu+pool2"),
             ("cpu_direct", "n8c1100h9w9k70r1s1_f32_forward"),
             ("cpu_direct", "n3c1100h1w1k70r1s1_f32_forward+bias+relu"),
             ("cpu_winograd", "n2c40h9w10k70r3s3p1_f32_backward_data"),
             ("cpu_direct", "n2c40h9w10k70r3s5p1_f32_backward_data"),
             ("cpu_direct", "n2c40h9w10k70r1s1_f32_backward_data"))
DEEP = "n8c512h28w28k512r3s3p1_f32_forward+bias+relu"


def versions(name: str) -> list[Any]:
    """An algorithm with each number of products."""
    return [a for a in ON_MATRIX.values() if a.name.rpartition("_")[0] == name]


# other rows


def test_rows_generate_what_they_did() -> None:
    """Recorded before the matrix unit was used, where cpu_direct pools, when it began to; of the
    unit, before Arm had one too."""
    recorded = json.loads(Path(generated_code.__file__).with_suffix(".json").read_text())
    found = {name: generated_code.hash_of(*kernel, Schedule(**recorded[name]["schedule"]))
             for kernel in generated_code.recorded() for name in [generated_code.name_of(*kernel)]}
    assert found == {name: entry["hash"] for name, entry in recorded.items()}


def test_plain_floats_on_the_unit_s_row_are_those_of_avx512() -> None:
    plain = [kernel for kernel in generated_code.kernels(("amx",)) if kernel[0].unit is None]
    assert plain
    for algorithm, p, t in plain:
        s, narrow = algorithm.default(p, t), t.with_(isa="avx512")
        assert (generated_code.hash_of(algorithm, p, t, s)
                == generated_code.hash_of(algorithm, p, narrow, s))


def test_a_1x1_filter_sees_every_pixel_as_a_row() -> None:
    p = Problem.parse("n2c32h14w9k32r1s1_f32_forward")
    for algorithm in ON_MATRIX.values():
        seen = algorithm.seen_by_kernel(p)
        assert (seen.h, seen.w) == (14 * 9, 1), algorithm.name  # the next image continues it
        assert algorithm.seen_by_kernel(p.with_(stride=(2, 1))).h == 14


def test_other_rows_have_no_unit() -> None:
    for algorithm in ON_MATRIX.values():
        for row in ("avx512", "avx2", "generic"):
            said = algorithm.reject(Problem.parse(DEEP), Target("cpu", row, 2))
            assert f"instructions are {row}, needs a matrix unit" in said


def test_tasks_end_where_windows_do() -> None:
    p, t = Problem.parse("n1c64h15w15k64r3s3p1_f32_forward+pool2"), Target("cpu", "amx", 2)
    algorithm = ON_MATRIX["cpu_direct_bf16"]
    s = algorithm.default(p, t)
    legal = [rows for rows in range(1, 60)
             if s.with_(block_rows=rows) in algorithm.space(p, t)]
    assert legal == [2, 4, 8, 14, 16, 28, 56]


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("shape", ["c64{}k64r3s3p1", "c40{}k70r3s3u2p1", "c3{}k64r7s7u2p3",
                                   "c256{}k64r1s1", "c64{}k64r1s1u2", "c40{}k64r3s3p2d2"])
@pytest.mark.parametrize("end", ["+bias+relu", "+pool2"])
def test_a_direct_convolution_is_the_same_code_at_every_size(
        products: int, shape: str, end: str) -> None:
    """Also of images that a task covers, and that one multiply does."""
    t = Target("cpu", "amx", 2)
    a = next(a for a in versions("cpu_direct") if a.products == products)
    found = set()
    for size in ("h56w56", "h9w13", "h4w3"):
        p = Problem.parse(f"n1{shape.format(size)}_f32_forward{end}")
        s = Schedule(tile_w=32, vectors=2, block_rows=8, k_parts=1, streaming=False)
        assert s in a.space(p, t)
        found.add(str(a.kernel().make(Code(a.seen_by_kernel(p)), s, t.row, *a.more).ir))
    assert len(found) == 1


# parts


def test_parts_add_up() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for parts, bound in ((1, 2.0 ** -8), (2, 2.0 ** -16), (3, 2.0 ** -24)):
        rest = x.double() - split_tensor(x, parts).double().sum(0)
        assert ((rest / x).abs() <= bound).all()


# in processes of their own: a kernel may crash


def able(p: Problem, t: Target, products: int) -> list[str]:
    return [name for name, a in FORWARD.items()
            if a.products == products and not a.reject(inner_problem(a, p), t)]


def run_random(products: int, chunk: int, row: str = "amx", least: int = LEAST,
               flops: float = 1e6) -> dict[str, Any]:
    """Shapes with several batch sizes until a chunk's share of the problems has run."""
    target, rng = Target.host(row, harness.THREADS), random.Random(f"{products} {chunk}")
    ran: Counter[str] = Counter()
    failures, seen, ends = [], set(), set()
    share = least / CHUNKS / sum(a.products == products and a.is_for(target)
                                 for a in FORWARD.values())
    for number in range(10_000):
        if sum(ran.values()) >= least / CHUNKS or len(failures) == ENOUGH:
            break
        p = harness.random_problem(rng, flops)
        if number % 8 == 0 and min(p.conv_h, p.conv_w) > 1:  # few draw it themselves
            p = p.with_(epilogue=Epilogue(p.epilogue.bias, activation="relu", pool=2))
        names = able(p, target, products)
        if not names:
            continue
        name = min(names, key=lambda name: ran[name])
        if ran[name] >= share:
            continue
        a, batches = FORWARD[name], rng.sample(range(1, 20), BATCHES)
        p = inner_problem(a, p).with_(n=max(batches))
        start = a.default(p, target)
        s = start if number % 2 else a.space(p, target).sample(rng, start)
        print(harness.describe(a, p, target, s), batches)
        try:
            harness.check(a, p, target, s, number, [0, *batches] if number % 5 == 0 else batches)
            fresh = {str(p.with_(n=n)) for n in batches} - seen
            seen |= fresh
            ran[name] += len(fresh)
            end = p.epilogue
            ends |= {f"bias {end.bias}", f"residual {end.residual}", f"pool {end.pool}",
                     f"activation {end.activation is not None}"}
        except Mismatch as mismatch:
            failures.append(str(mismatch))
    return {"ran": ran, "failures": failures, "ends": sorted(ends)}


@pytest.fixture(scope="module")
def outcomes() -> dict[int, dict[str, Any]]:
    with ThreadPoolExecutor(CHUNKS) as pool:
        jobs = {(products, chunk): pool.submit(in_process, "test_amx:run_random", products, chunk)
                for products in PRODUCTS for chunk in range(CHUNKS)}
        found: dict[int, dict[str, Any]] = {}
        for (products, _), job in jobs.items():
            one = found.setdefault(products, {"ran": Counter(), "failures": [], "ends": set()})
            one["ran"].update(job.result()["ran"])
            one["failures"] += job.result()["failures"]
            one["ends"].update(job.result()["ends"])
    return found


@needs_amx
@pytest.mark.slow
@pytest.mark.parametrize("products", PRODUCTS)
def test_random_problems_stay_within_the_declared_error(outcomes: Any, products: int) -> None:
    outcome = outcomes[products]
    assert outcome["failures"] == []
    assert sum(outcome["ran"].values()) >= LEAST
    assert len(outcome["ends"]) == 4 * 2  # with and without each part of an epilogue
    offering = [a.name for a in FORWARD.values() if a.products == products]
    assert min(outcome["ran"][name] for name in offering) >= FLOOR


def run_deep(row: str = "amx", count: int = len(DEEP_ONES)) -> dict[str, list[str]]:
    """Depths that take several passes, and gradients of inputs: random ones are shallow."""
    target = Target.host(row, harness.THREADS)
    failures, ran = [], []
    for name, text in DEEP_ONES[:count]:
        p = Problem.parse(text)
        for a in versions(name):
            if not a.is_for(target):
                continue
            try:
                harness.check(a, p, target, a.default(inner_problem(a, p), target))
                ran.append(a.name)
            except Mismatch as mismatch:
                failures.append(str(mismatch))
    return {"ran": ran, "failures": failures}


@needs_amx
def test_deep_problems_and_gradients_of_inputs() -> None:
    outcome = in_process("test_amx:run_deep")
    assert outcome["failures"] == []
    assert len(outcome["ran"]) == sum(len(versions(name)) for name, _ in DEEP_ONES)


@pytest.mark.parametrize(("name", "text"), [
    ("cpu_direct", "n1c2048h9w9k64r1s1_f32_forward"),
    ("cpu_direct", "n1c2048h9w9k64r3s3p1_f32_forward"),
    ("cpu_winograd", "n1c2048h9w9k64r3s3p1_f32_forward")])
def test_passes_share_their_code(name: str, text: str) -> None:
    target, p = Target("cpu", "amx", 2), Problem.parse(text)
    for a in versions(name):
        s = a.default(p, target)
        module = a.kernel().make(a.seen_by_kernel(p), s, target.row, *a.more)
        lines = str(module.ir).splitlines()
        made = [line for line in lines if line.startswith("define") and "product_" in line]
        assert 2 <= len(made) <= 3


# what a precision admits


def test_precision_decides_how_many_products() -> None:
    assert products_of(planned(DEEP, "highest")) in (0, 6)
    high = planned(DEEP, "high")
    assert products_of(high) == 3
    assert high.error <= PRECISIONS["high"]


def test_a_caller_s_bound_decides_alone() -> None:
    target = Target("cpu", "amx", 2, l1=48 << 10, l2=2 << 20, l3=32 << 20)
    p, planner = Problem.parse(DEEP), Planner(ALGORITHMS)
    assert products_of(planner.plan(p, target, max_error=1e-4)) == 3
    assert products_of(planner.plan(p, target, max_error=1e-5)) in (0, 6)


@needs_amx
def test_explain_tells_what_another_precision_would_give() -> None:
    text = str(tilewise.explain(DEEP, target=Target.host("amx", 2)))
    assert "products keep 16 bits, need 24" in text
    assert "cpu_winograd_bf16x3" in text


@needs_amx
def test_gradients_of_inputs_run_on_the_unit() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 128, 28, 28).contiguous(memory_format=torch.channels_last)
    weight, x = torch.randn(128, 128, 3, 3), x.requires_grad_()
    exact = F.conv_transpose2d(torch.ones(2, 128, 28, 28).double(), weight.double(), padding=1)
    with precision("high"), noted() as plans:
        tilewise.conv2d(x, weight, padding=1).sum().backward()
    products = {plan.problem.direction: products_of(plan) for plan in plans}
    assert products == {"forward": 3, "backward_data": 3}
    assert x.grad is not None
    assert float((x.grad - exact).norm() / exact.norm()) < PRECISIONS["high"]


@needs_amx
def test_what_is_prepared_is_told_apart_by_all_it_depends_on() -> None:
    """Of problems that one weight may meet: same key, same bits."""
    target, planner = Target.host("amx", 2), Planner(ALGORITHMS)
    seen: dict[str, torch.Tensor] = {}
    for algorithm in [GENERATED["cpu_direct"], GENERATED["cpu_pointwise"],
                      GENERATED["cpu_winograd"], *FORWARD.values()]:
        for end in ("u1", "u2", "p1d2", "p2", "p1+pool2"):
            geometry, _, pool = end.partition("+")
            size = 1 if algorithm.name == "cpu_pointwise" else 3
            p = Problem.parse(f"n2c3h20w20k40r{size}s{size}{geometry}_f32_forward"
                              + (f"+{pool}" if pool else ""))
            if algorithm.reject(inner_problem(algorithm, p), target):
                continue
            weight = random_operands(p)[1]
            run = Executable(planner.plan(p, target, algorithm=algorithm.name), algorithm)
            made = run.prepare(weight).flatten().view(torch.int32)
            assert torch.equal(seen.setdefault(run.weight_key, made), made), run.weight_key
    assert len(seen) > 10


# beside others


def high(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return tilewise.conv2d(x, weight, padding=1, max_error=1e-4)


def in_fork_and_beside_torch() -> list[float]:
    """Errors of the unit's kernels: after torch's own, in many threads, and after a fork."""
    import os
    import threading

    torch.manual_seed(0)
    x, weight = torch.randn(2, 128, 28, 28), torch.randn(128, 128, 3, 3)
    x = x.contiguous(memory_format=torch.channels_last)
    exact = F.conv2d(x.double(), weight.double(), padding=1)

    def error() -> float:
        return float((high(x, weight) - exact).square().mean().sqrt()
                     / exact.square().mean().sqrt())

    def of_torch() -> float:
        y = F.conv2d(x.bfloat16(), weight.bfloat16(), padding=1).double()
        return float((y - exact).square().mean().sqrt() / exact.square().mean().sqrt()) / 1000

    found = [run() for _ in range(3) for run in (error, of_torch)]
    threads = [threading.Thread(target=lambda: found.extend(error() for _ in range(5)))
               for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, str(error()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return [*found, float(os.read(read, 100))]


@needs_amx
def test_after_torch_in_threads_and_after_a_fork() -> None:
    errors = in_process("test_amx:in_fork_and_beside_torch")
    assert len(errors) == 6 + 20 + 1
    assert max(errors) < 5e-5


@needs_amx
def test_the_unit_is_really_used() -> None:
    target = Target.host("amx", 2)
    p = Problem.parse("n2c128h28w28k128r3s3p1_f32_forward")
    plan = Planner(ALGORITHMS).plan(p, target, max_error=1e-4)
    assert plan.algorithm == "cpu_winograd_bf16x3"

"""Gradients of weights on the matrix unit: how exactly, how often the same, and when."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support import harness
from support.harness import ON_MATRIX, Mismatch, in_process
from support.matrix_unit import needs_amx, planned, precision, products_of

import tilewise
from tilewise.core import Epilogue, Problem, Target
from tilewise.runtime.engine import PRECISIONS
from tilewise.tools.sharing import noted

PRODUCTS = (1, 3, 6)
LEAST = harness.sample(300, 150)  # problems for each number of products, empty ones not counted
BATCHES = 28  # of each shape, which share a kernel
LARGEST = 5  # filter: larger ones take seconds to compile
# several blocks of items, odd numbers of tiles, more than one part, every order
BLOCKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("cpu_winograd_weight_bf16x6", {"order": "parts", "parts": 3, "tiles": 32}),
    ("cpu_winograd_weight_bf16x3", {"order": "bands", "parts": 2, "tiles": 32}),
    ("cpu_winograd_weight_bf16x6", {"order": "bands", "parts": 1, "tiles": 64, "vectors": 1}),
    ("cpu_winograd_weight_bf16x3", {"order": "shared", "parts": 1, "tiles": 32,
                             "blocks": 2}),
    ("cpu_direct_weight_bf16x6", {"parts": 3, "tiles": 32}),
    ("cpu_direct_weight_bf16x3", {"parts": 1, "tiles": 256, "vectors": 1}),
    ("cpu_direct_weight_bf16", {"parts": 2, "tiles": 96}))
PROBLEM = Problem.parse("n3c80h19w21k43r3s3p1_f32_backward_weight")
PIXELS = Problem.parse("n3c83h7w7k43r1s1_f32_backward_weight")  # odd in every part and block
RUNS = [*((PROBLEM, *block) for block in BLOCKS),
        *((PIXELS, *block) for block in BLOCKS if block[0].startswith("cpu_direct"))]
DEEP = "n8c512h28w28k512r3s3p1_f32_backward_weight"
STRIDED = "n16c256h28w28k256r3s3u2p1_f32_backward_weight"


def names(products: int) -> list[str]:
    return [name for name, a in ON_MATRIX.items()
            if a.products == products and "backward_weight" in a.directions]


# in processes of their own: a kernel may crash


def run_random(products: int, row: str = "amx", least: int = LEAST,
               count: int = BATCHES) -> dict[str, Any]:
    """Shapes with so many batch sizes; algorithms take turns, and so do schedules."""
    target, rng = Target.host(row, harness.THREADS), random.Random(f"weights {products}")
    ran: Counter[str] = Counter()
    orders: Counter[str] = Counter()
    failures: list[str] = []
    while sum(ran.values()) < least and len(failures) < 10:
        p = harness.random_problem(rng).with_(direction="backward_weight", epilogue=Epilogue())
        able = [name for name in names(products) if not ON_MATRIX[name].reject(p, target)]
        if not able:
            continue
        name = min(able, key=lambda name: ran[name])
        if max(p.r, p.s) > LARGEST or ran[name] > least / len(names(products)):
            continue
        a, batches = ON_MATRIX[name], rng.sample(range(1, 30), count)
        p, number = p.with_(n=max(batches)), sum(ran.values())
        s = a.default(p, target)
        if number // count % 4 > 1:
            s = a.space(p, target).sample(rng, s)
        print(harness.describe(a, p, target, s), batches)
        try:
            harness.check(a, p, target, s, number, [0, *batches] if number % 3 == 0 else batches)
        except Mismatch as mismatch:
            failures.append(str(mismatch))
        ran[name] += count
        orders[str(s["order"])] += 1
    return {"ran": ran, "orders": orders, "failures": failures}


def run_blocks(row: str = "amx") -> dict[str, Any]:
    """Every order, and whether one gives the same bits in every run and on any threads."""
    target, failures = Target.host(row, harness.THREADS), []
    for p, name, tunables in RUNS:
        a, o = ON_MATRIX[name], harness.operands(p, "floats", seed=1)
        s = a.default(p, target).with_(**tunables)
        assert s in a.space(p, target), s
        try:
            harness.check(a, p, target, s)
        except Mismatch as mismatch:
            failures.append(str(mismatch))
        prepared = harness.prepare(a, p, target, s, o.weight)
        first, *others = [harness.run(a, p, target.with_(threads=threads), s, o, prepared)
                          for threads in (1, 2, 2)]
        failures += [f"other bits: {name} {p} {s}" for y in others if not torch.equal(first, y)]
    return {"ran": len(RUNS), "failures": failures}


@pytest.fixture(scope="module")
def outcomes() -> dict[Any, dict[str, Any]]:
    with ThreadPoolExecutor(2) as pool:
        jobs = {products: pool.submit(in_process, "test_amx_weight:run_random", products)
                for products in PRODUCTS}
        jobs[0] = pool.submit(in_process, "test_amx_weight:run_blocks")
        return {what: job.result() for what, job in jobs.items()}


@needs_amx
@pytest.mark.slow
@pytest.mark.parametrize("products", PRODUCTS)
def test_random_gradients_stay_within_the_declared_error(outcomes: Any, products: int) -> None:
    outcome = outcomes[products]
    assert outcome["failures"] == []
    assert min(outcome["ran"][name] for name in names(products)) >= LEAST // 3
    assert set(outcome["orders"]) >= ({"parts", "bands"} if products > 1 else {"parts"})


@needs_amx
@pytest.mark.slow
def test_every_order_is_right_and_repeats_itself(outcomes: Any) -> None:
    assert outcomes[0] == {"ran": len(RUNS), "failures": []}


def test_parts_need_no_room_for_threads_without_one() -> None:
    p, t = Problem.parse(STRIDED), Target("cpu", "amx", 2)
    algorithm = ON_MATRIX["cpu_direct_weight_bf16x3"]
    s = algorithm.default(p, t)
    assert s["order"] == "parts"
    assert algorithm.workspace(p, t, s) == algorithm.workspace(p, t.with_(threads=64), s)


# what a precision admits


def test_precision_decides_how_many_products() -> None:
    for text in (DEEP, STRIDED):
        assert products_of(planned(text, "highest")) in (0, 6)
        high = planned(text, "high")
        assert products_of(high) == 3
        assert high.error <= PRECISIONS["high"]
    assert products_of(planned(STRIDED, "medium")) == 1


@needs_amx
def test_gradients_of_weights_run_on_the_unit() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 256, 28, 28).relu().contiguous(memory_format=torch.channels_last)
    weight = torch.randn(256, 256, 3, 3).requires_grad_()
    grad = torch.randn(8, 256, 28, 28)
    exact = torch.nn.grad.conv2d_weight(x.double(), weight.shape, grad.double(), padding=1)
    found = {}
    for setting in ("highest", "high"):
        weight.grad = None
        with precision(setting), noted() as plans:
            tilewise.conv2d(x, weight, padding=1).backward(grad)
        plan = next(plan for plan in plans if plan.problem.direction == "backward_weight")
        assert weight.grad is not None
        error = float((weight.grad - exact).norm() / exact.norm())
        assert error <= plan.error <= PRECISIONS[setting]
        found[setting] = products_of(plan)
    assert found == {"highest": 0, "high": 3}

"""Infinities, NaN and huge values stay where torch has them, also in the Winograd domain."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tilewise
from tilewise.conv.running import ENGINE
from tilewise.core import Schedule, Target

LAST = torch.channels_last
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    ENGINE.executables.clear()
    yield
    ENGINE.executables.clear()


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(2, 64, 16, 16).contiguous(memory_format=LAST)
    return x, torch.randn(64, 64, 3, 3) / 24


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The same NaN, the same infinities, and finite values within rounding."""
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(found), kind(expected))
    finite = torch.isfinite(expected)
    assert finite.any()
    largest = float(expected[finite].abs().max())
    torch.testing.assert_close(found[finite] / largest, expected[finite] / largest,
                               rtol=0, atol=1e-5)


def by_winograd(x: torch.Tensor, weight: torch.Tensor, **options: object) -> torch.Tensor:
    return tilewise.conv2d(x, weight, padding=1, algorithm="cpu_winograd", **options)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_one_value_that_is_not_finite(value):
    x, weight = operands()
    x[1, 7, 5, 9] = value
    expected = F.conv2d(x, weight, padding=1)
    assert 0 < (~torch.isfinite(expected)).sum() <= 9 * 64
    assert_same(by_winograd(x, weight), expected)
    assert_same(tilewise.conv2d(x, weight, padding=1), expected)


@pytest.mark.parametrize("order", ["channels", "positions", "shared"])
@pytest.mark.parametrize("name", ["cpu_winograd", "cpu_winograd_bf16x3"])
def test_every_order_tells(order, name):
    p = tilewise.Problem.parse("n2c64h16w16k70r3s3p1_f32_forward")
    t = Target.host(threads=2)
    algorithm = ENGINE.planner.algorithm(name)
    if not algorithm.is_for(t):
        pytest.skip("no matrix unit")
    s: Schedule = algorithm.default(p, t).with_(order=order, k_parts=1)
    run = ENGINE.build(ENGINE.planner.plan(p, t, algorithm=name, schedule=s))
    x, weight = operands()[0], torch.randn(70, 64, 3, 3)
    x[0, 63, 15, 15] = INF
    ready = run.ready(weight, lambda: weight)
    assert_same(run(x, ready, None, None), F.conv2d(x, weight, padding=1))


@pytest.mark.parametrize("scale", [1e37, 3e38])
def test_huge_values_do_not_overflow_inside(scale):
    x, weight = operands()
    x, weight = scale * x.sign(), 1e-3 * weight
    expected = F.conv2d(x, weight, padding=1)
    assert torch.isfinite(expected).all()
    assert_same(by_winograd(x, weight), expected)


def test_a_weight_that_is_not_finite():
    x, weight = operands()
    weight[3, 2, 1, 1] = INF
    assert_same(by_winograd(x, weight), F.conv2d(x, weight, padding=1))


def test_the_epilogue_hides_nothing():
    """ReLU makes zeros of what is -inf, pooling drops it."""
    x, weight = operands()
    x[0, 0, 4, 4] = -INF
    bias, residual = torch.randn(64), torch.randn_like(x)
    expected = F.max_pool2d(F.relu(F.conv2d(x, weight, bias, padding=1) + residual), 2)
    found = by_winograd(x, weight, bias=bias, residual=residual, activation="relu", pool=2)
    assert_same(found, expected)


def test_blocks_with_norms_and_again():
    x, _ = operands()
    conv, norm = nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64).eval()
    norm.running_mean.normal_()
    block = tilewise.nn.Block(conv, norm, "relu")
    bad = x.clone(memory_format=torch.preserve_format)
    bad[0, 1, 8, 8] = INF
    with torch.no_grad():
        for given in (x, bad, x, bad):
            assert_same(block(given), norm(conv(given)).relu())


def test_gradients():
    x, weight = operands()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    grad = torch.randn(2, 64, 16, 16).contiguous(memory_format=LAST)
    grad[1, 3, 7, 7] = INF
    by_winograd(x, weight).backward(grad)
    expected, = torch.autograd.grad(F.conv2d(x, weight, padding=1), x, grad)
    assert_same(x.grad, expected)


def test_with_a_mask():
    x, weight = operands()
    x[0, 0, 4, 4] = INF
    weight.requires_grad_()
    expected = F.max_pool2d(F.relu(F.conv2d(x, weight, padding=1)), 2)
    found = by_winograd(x, weight, activation="relu", pool=2)
    assert_same(found.detach(), expected.detach())


def test_a_weight_is_let_go():
    import gc
    import weakref

    x, weight = operands()
    by_winograd(x, weight)
    ref = weakref.ref(weight)
    del weight
    gc.collect()
    assert ref() is None


FORKED = """
import os, torch, tilewise
x = torch.randn(2, 64, 56, 56).contiguous(memory_format=torch.channels_last)
x[0, 1, 30, 30] = float("inf")
weight = torch.randn(64, 64, 3, 3)
expected = tilewise.conv2d(x, weight, padding=1)
pid = os.fork()
if pid == 0:
    found = tilewise.conv2d(x, weight, padding=1)
    os._exit(0 if found.numpy().tobytes() == expected.numpy().tobytes() else 1)
print("child", os.waitpid(pid, 0)[1])
"""


def test_in_a_forked_child():
    """Where torch's own threads are gone, and would be waited for."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True,
                          timeout=300, check=False)
    assert "child 0" in done.stdout, done.stderr

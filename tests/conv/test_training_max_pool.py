"""Max-pools with gradients: torch's values and gradients bit by bit, and a byte a result kept."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from support import faults
from support.harness import sample
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise
from tilewise.bench.judged import Mismatch
from tilewise.conv.max_pool import pooled
from tilewise.core.isa import ISA
from tilewise.core.target import Target
from tilewise.kernels.cpu import memory
from tilewise.kernels.cpu.between import largest as kernels
from tilewise.runtime import largest, pools, windows

LAST = torch.channels_last
HOST = Target.host(threads=2)
ROWS = [name for name, row in ISA.items() if row.lanes <= HOST.lanes
        and HOST.row.machines == row.machines and not row.matrix and name != "scalar"]
WINDOWS = (((3, 3), (2, 2)), ((3, 3), (2, 2)), ((2, 2), (2, 2)), ((5, 3), (1, 2)), ((2, 4), (3, 1)))
empty = memory.empty


class Mutation(NamedTuple):
    apply: faults.Patch


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    prepare(monkeypatch)
    yield
    forget()


def prepare(patch: pytest.MonkeyPatch) -> None:
    """Many tasks for little work, memory full of NaN, and nothing made before."""
    patch.setattr(largest, "ALONE", 0)
    patch.setattr(pools, "WORTH", 64)
    patch.setattr(torch, "get_num_threads", lambda: 3)
    patch.setattr(memory, "empty", lambda *shape: empty(*shape).fill_(torch.nan))
    forget()


def forget() -> None:
    largest._forward.clear()
    largest._backward.clear()


def drawn(rng: random.Random, c: int) -> tuple[Tensor, tuple[Any, ...]]:
    taps, steps = rng.choice(WINDOWS)
    options = (taps, steps, [rng.randint(0, t // 2) for t in taps], 1, rng.random() < 0.5)
    torch.manual_seed(rng.randrange(1 << 30))
    x = torch.randint(-4, 5, (rng.randint(1, 3), c, *(t + rng.randint(0, 9) for t in taps)))
    x = x.float().contiguous(memory_format=LAST)
    for value in ("nan", "nan", "inf", "-inf"):
        x.permute(0, 2, 3, 1).view(-1)[rng.randrange(x.numel())] = float(value)
    if rng.random() < 0.3:
        x[:, c // 2] = float("-inf")
    return x, options


def require_torchs(rng: random.Random, c: int) -> None:
    x, options = drawn(rng, c)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = pooled(mine, *options), F.max_pool2d(theirs, *options)
    if found is None or not torch.equal(found.nan_to_num(0.5), expected.nan_to_num(0.5)):
        raise Mismatch(f"values of {tuple(x.shape)} by {options}")
    grad = torch.randn(expected.shape)
    found.backward(grad)
    expected.backward(grad)
    if mine.grad is None or theirs.grad is None or not torch.equal(mine.grad, theirs.grad):
        raise Mismatch(f"gradients of {tuple(x.shape)} by {options}")


@pytest.mark.parametrize("row", ROWS)
def test_random_pools(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_ISA", row)
    rng = random.Random(row)
    for c in (1, 3, 16, 37, 70, 150):
        for _ in range(sample(20, 4)):
            require_torchs(rng, c)


def check(mutation: Mutation) -> None:
    with faults.patched(mutation.apply), pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        for c in (16, 37):
            for seed in range(6):
                require_torchs(random.Random(seed), c)


MUTATIONS = {
    "the last of the largest": Mutation(faults.replaced(
        kernels.Vector, "above", lambda self, other: ~other.above_or_nan(self))),
    "NaN loses": Mutation(faults.replaced(
        kernels.Vector, "is_nan", lambda self: self.above(self))),
    "numbers begin inside the images": Mutation(faults.changed(
        windows.Windows, "numbered", lambda lines: [line._replace(size=0) for line in lines])),
    "a value is in one window": Mutation(faults.changed(
        windows.Windows, "_windows_of", lambda line: line._replace(taps=min(1, line.taps)))),
    "rows of numbers are too short": Mutation(faults.replaced(
        kernels, "_largest", lambda f, window, y, block, row, largest=kernels._largest:
        largest(f, window, y, block, row - 1))),
    "windows to the right are one apart": Mutation(faults.replaced(
        kernels, "_spread", lambda f, window, y, block, down, across, spread=kernels._spread:
        spread(f, window, y, block, down, 1))),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_training_max_pool")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])


def test_a_byte_a_result_is_kept() -> None:
    x, kept = torch.randn(2, 24, 30, 30).contiguous(memory_format=LAST).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = pooled(x, 3, 2, 1)
    assert y is not None
    assert [t.untyped_storage().nbytes() for t in kept] == [y.numel()]
    assert y._base is None


def test_gradients_of_gradients() -> None:
    x = torch.randn(2, 5, 9, 8).contiguous(memory_format=LAST)
    grad = torch.randn(2, 5, 5, 4)
    found = []
    for pool in (pooled, F.max_pool2d):
        leaf, factor = x.clone().requires_grad_(), grad.clone().requires_grad_()
        y: Any = pool(leaf * leaf, 3, 2, 1)
        (first,) = torch.autograd.grad(y, leaf, factor, create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), (leaf, factor))))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_many_gradients_at_once() -> None:
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=LAST).requires_grad_()
    many = torch.randn(3, 2, 4, 3, 3)
    found = [torch.autograd.grad(pool(x, 2), x, many, is_grads_batched=True)[0]
             for pool in (pooled, F.max_pool2d)]
    assert torch.equal(*found)


def test_windows_of_a_large_image_take_no_time() -> None:
    """Each value's are found in one step."""
    assert len(windows.Windows(3, 2, 1).turned(50_000)) == 50_000


def test_what_is_torchs() -> None:
    x = torch.randn(1, 4, 40, 40).contiguous(memory_format=LAST)
    assert pooled(x, 3) is None  # without gradients
    x.requires_grad_()
    assert pooled(x, 3, 2, 1) is not None
    assert pooled(x, 3, dilation=2) is None
    assert pooled(x, 17) is None  # more values than a byte has
    assert pooled(x, 3, padding=2) is None  # which torch refuses
    assert pooled(x.contiguous(), 3) is None
    assert pooled(x.double(), 3) is None
    with torch.no_grad():
        assert pooled(x, 3) is None


def test_models_pool_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = largest.backward
    monkeypatch.setattr(largest, "backward", lambda *args: calls.append(args) or run(*args))
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
                          nn.MaxPool2d(3, 2, 1), nn.Conv2d(16, 16, 3, bias=False),
                          nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    tilewise.optimize(model)(torch.randn(2, 3, 20, 20)).sum().backward()
    assert [args[3][0].taps for args in calls] == [2, 3]

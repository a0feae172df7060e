"""A process that meets many image sizes keeps what it still uses, by its own counters."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tilewise.core.errors import OutOfMemory
from tilewise.core.lru import Lru
from tilewise.kernels.cpu import memory
from tilewise.kernels.cpu.memory import Pool
from tilewise.runtime import weights
from tilewise.runtime.forms import FEW, MANY
from tilewise.runtime.weights import Made, fold, made

MB = 1 << 20


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """An empty pool in the place of the process's; what it maps is counted."""
    gc.collect()
    fresh = Pool(1 << 30)
    monkeypatch.setattr(memory, "POOL", fresh)
    return fresh


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes that the system was asked for."""
    sizes: list[int] = []
    ask = memory._map
    monkeypatch.setattr(memory, "_map", lambda size: sizes.append(size) or ask(size))
    return sizes


def forward(size: int, layers: int = 40) -> None:
    """Outputs of a model, two alive at a time; sizes far enough apart to share no blocks."""
    y = memory.empty(size * MB // 4)
    for _ in range(layers):
        y = memory.empty(size * MB // 4)
    del y


def test_blocks_that_nobody_takes_any_more_go(pool: Pool) -> None:
    for size in (1, 2, 4, 8, 16, 32):
        for _ in range(20):
            forward(size)
    assert pool.kept == 2 * 32 * MB


def test_what_is_refused_is_not_counted(pool: Pool) -> None:
    with pytest.raises(OutOfMemory):
        pool.take(1 << 50)
    assert (pool.used, pool.most_used) == (0, 0)


def test_blocks_of_one_burst_go(pool: Pool) -> None:
    """Also where others of their size are in use all the time."""
    held = [memory.empty(MB) for _ in range(20)]
    held.clear()
    assert pool.kept == 20 * 4 * MB
    for _ in range(20):
        forward(4)
    assert pool.kept == 2 * 4 * MB


def step(pool: Pool, sizes: tuple[int, ...]) -> int:
    """A forward pass whose results are kept; a backward pass in which each makes room for one of
    half its size, which shares no block with it. The most bytes that were held at once."""
    results, found, most = [memory.empty(size * MB // 4) for size in sizes for _ in range(8)], [], 0
    while results:
        count = results.pop().numel() // 2
        found.append(memory.empty(count))
        most = max(most, pool.used + pool.kept)
    return most


def test_in_use_and_free_are_no_more_than_were_in_use(
        pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (1, 3, 8, 20)
    in_use = 8 * sum(sizes) * MB
    assert step(pool, sizes) > 1.4 * in_use  # below ALWAYS nothing goes
    monkeypatch.setattr(memory, "ALWAYS", 0)
    for _ in range(3):
        assert step(pool, sizes) <= in_use
        assert pool.used == 0
    assert pool.most_used == in_use


def test_sizes_in_turns_are_mapped_once(pool: Pool, mapped: list[int]) -> None:
    for _ in range(30):
        for size in (1, 4, 16):
            forward(size)
    assert sorted(mapped) == sorted([MB, 4 * MB, 16 * MB] * 2)


def test_a_size_that_returns_late_is_kept_longer(pool: Pool, mapped: list[int]) -> None:
    """A model with thousands of layers, one of which is large."""
    for _ in range(12):
        forward(64, layers=1)
        forward(1, layers=2500)
    assert mapped.count(64 * MB) <= 8  # found too early gone a few times, then kept
    mapped.clear()
    for _ in range(3):
        forward(64, layers=1)
        forward(1, layers=2500)
    assert mapped == []


class Counted:
    """Makes forms of one weight, and counts."""

    def __init__(self) -> None:
        self.weight, self.made = torch.randn(8, 8, 3, 3), 0

    def __call__(self, form: int) -> Made:
        def make() -> Tensor:
            self.made += 1
            return self.weight + form

        return made(form, make, self.weight)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Lru[Made]:
    """An empty cache of prepared weights in the place of the process's."""
    fresh: Lru[Made] = Lru(1 << 30, weigh=Made.bytes)
    monkeypatch.setattr(weights, "MADE", fresh)
    monkeypatch.setattr(weights, "FORMS", weights.Forms(fresh))
    return fresh


def test_of_many_forms_of_a_weight_the_last_used_stay(cache: Lru[Made]) -> None:
    one, other = Counted(), Counted()
    other(0)
    for form in range(18):
        one(form)
    assert one.made == 18
    assert len(cache) == FEW + 1, "another weight's form is not touched"
    assert cache.total == (FEW + 1) * one.weight.numel() * 4
    one(17), one(16)
    assert one.made == 18


def test_a_repeated_call_counts_as_a_use(cache: Lru[Made]) -> None:
    """It asks the entry, not the cache."""
    one = Counted()
    first = one(0)
    one(1)
    assert first.is_of((one.weight,))
    one(2)
    one(0)
    assert one.made == 3
    one(1)
    assert one.made == 4


@pytest.mark.parametrize("forms", [2, 3, 5, MANY])
def test_forms_in_turns_are_soon_all_kept(forms: int, cache: Lru[Made]) -> None:
    one = Counted()
    rounds: list[int] = []
    for _ in range(6):
        before = one.made
        for form in range(forms):
            one(form)
        rounds.append(one.made - before)
    assert rounds[-2:] == [0, 0]
    assert sum(rounds) <= 2 * forms
    assert len(cache) == forms


def test_more_forms_in_turns_than_are_kept(cache: Lru[Made]) -> None:
    one = Counted()
    for _ in range(4):
        for form in range(MANY + 4):
            assert torch.equal(one(form).value, one.weight + form)
    assert len(cache) == MANY


def test_a_weight_that_changes_gets_no_more_forms(cache: Lru[Made]) -> None:
    one = Counted()
    for form in (0, 1, 2, 0):  # the first comes back once
        one(form)
    for _ in range(MANY):
        one.weight.add_(1)
        one(0)
    for form in range(10, 10 + MANY):
        one(form)
    assert len(cache) == FEW + 1


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_norms_are_folded_in_parts(layout: torch.memory_format,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Float64 of a whole weight is memory that malloc would keep."""
    weight, largest = torch.randn(40, 24, 3, 3).contiguous(memory_format=layout), []
    mean, variance, scale, shift = torch.rand(4, 40) + 0.5
    factor = scale.double() * (variance.double() + 1e-5).rsqrt()
    expected = (weight.double() * factor[:, None, None, None]).float()
    double: Callable[[Tensor], Tensor] = Tensor.double
    monkeypatch.setattr(Tensor, "double", lambda t: largest.append(t.numel()) or double(t))
    monkeypatch.setattr(weights, "FOLDED", 1000)
    folded, _ = fold(weight, None, mean, variance, scale, shift, 1e-5)
    assert max(largest) <= 1000
    assert torch.equal(folded, expected)
    assert folded.stride() == weight.stride()

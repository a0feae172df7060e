"""What tilewise keeps is bounded, and what it hands out is nobody else's."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import in_process
from torch.nn import functional as F

import tilewise
from tilewise.conv.running import ENGINE
from tilewise.core.lru import Lru
from tilewise.kernels.cpu import memory
from tilewise.kernels.cpu.emit.launch import KERNELS
from tilewise.kernels.cpu.emit.threads import Frame
from tilewise.kernels.cpu.memory import POOL, Pool
from tilewise.runtime.weights import MADE

MB = 1 << 20


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    caches = (POOL, MADE, KERNELS, ENGINE.executables)
    before = [cache.limit for cache in caches]
    yield
    for cache, limit in zip(caches, before):
        cache.limit = limit


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """An empty pool in the place of the process's."""
    gc.collect()
    fresh = Pool(64 * MB)
    monkeypatch.setattr(memory, "POOL", fresh)
    return fresh


def overlap(tensors: list[torch.Tensor]) -> bool:
    """Whether two of them share memory."""
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors)
    return any(one[1] > other[0] for one, other in pairwise(spans))


def test_overlaps_are_noticed() -> None:
    y = torch.empty(10)
    assert overlap([y[:5], y[4:]])
    assert not overlap([y[:5], y[5:]])


# the pool


def test_a_block_comes_back_when_its_tensor_dies(pool: Pool) -> None:
    y = memory.empty(MB)
    address = y.data_ptr()
    assert address % (2 * MB) == 0  # where huge pages begin
    assert pool.kept == 0
    del y
    assert pool.kept == 4 * MB
    y = memory.empty(MB)
    assert y.data_ptr() == address
    assert pool.kept == 0


def test_a_view_keeps_the_block(pool: Pool) -> None:
    y = memory.empty(4, MB)
    view = y[2].view(1024, 1024).t()
    view.fill_(3)
    del y
    gc.collect()
    assert pool.kept == 0
    others = [memory.empty(4, MB).fill_(9) for _ in range(3)]
    assert (view == 3).all()
    del view, others
    assert pool.kept == 4 * 16 * MB


def test_small_tensors_are_not_pooled(pool: Pool) -> None:
    y = memory.empty(1000)
    del y
    assert pool.kept == 0


def test_sizes_near_each_other_share_a_block(pool: Pool) -> None:
    y = memory.empty(MB - 1000)
    address = y.data_ptr()
    del y
    y = memory.empty(MB - 5000)
    assert y.data_ptr() == address
    for size in (1, 4096, 4097, 3 * MB + 1, 100 * MB - 7):
        assert size <= memory._size_class(size) <= max(4096, 1.125 * size + 4096)


def test_a_free_block_serves_what_is_a_little_smaller(pool: Pool) -> None:
    places = {}
    for size in (3 * MB, 2 * MB + MB // 4, MB):  # the second fits into the first, not the third
        tensor = memory.empty(size // 4)
        places[size] = tensor.data_ptr()
        del tensor
    assert places[3 * MB] == places[2 * MB + MB // 4] != places[MB]
    assert pool.kept == 4 * MB


def test_live_tensors_never_overlap(pool: Pool) -> None:
    rng, live = random.Random(0), []
    for step in range(200):
        if live and rng.random() < 0.5:
            tensor, value = live.pop(rng.randrange(len(live)))
            assert bool((tensor == value).all())
            del tensor
        else:
            live.append((memory.empty(rng.randint(140_000, 600_000)).fill_(step), step))
        assert pool.kept <= pool.limit
    assert not overlap([tensor for tensor, _ in live])


def test_the_limit_holds_whatever_it_is_set_to(pool: Pool) -> None:
    live = [memory.empty(MB).fill_(i) for i in range(8)]
    pool.limit = 10 * MB
    del live[4:]
    assert pool.kept == 8 * MB
    pool.limit = 5 * MB
    assert pool.kept == 4 * MB
    pool.limit = 0
    assert pool.kept == 0
    assert [int(y.max()) for y in live] == [0, 1, 2, 3]  # what is in use stays
    live.clear()
    assert pool.kept == 0
    pool.limit = 4 * MB
    memory.empty(MB)
    memory.empty(2 * MB)  # would not fit
    assert pool.kept in (0, 4 * MB)


def test_the_least_recently_used_size_goes_first(pool: Pool) -> None:
    pool.limit = 20 * MB
    for size in (1, 2, 1, 4):  # in millions of floats: 4, 8, 4, 16 MB
        memory.empty(size * MB)
    assert pool.kept == 20 * MB
    y = memory.empty(MB)
    assert pool.kept == 16 * MB
    del y


def test_blocks_of_a_dead_pool(pool: Pool) -> None:
    y = memory.empty(MB).fill_(1)
    del pool
    gc.collect()
    assert (y == 1).all()


# through the public function


@pytest.mark.parametrize("activation", [None, "relu"])
def test_prepared_weights_stay_for_inference_and_go_in_training(activation: str | None) -> None:
    x = torch.randn(1, 64, 30, 30).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(64, 64, 3, 3, requires_grad=True)
    call = partial(tilewise.conv2d, x, weight, padding=1, activation=activation)
    before = MADE.total
    with torch.no_grad():
        call()
    assert MADE.total > before
    call().sum().backward()
    assert MADE.total == before
    frozen = weight.detach()
    x.requires_grad_()
    tilewise.conv2d(x, frozen, padding=1, activation=activation).sum().backward()
    assert MADE.total > before  # frozen: the next gradient needs the same


def test_outputs_that_live_never_share_memory() -> None:
    x, weight = torch.randn(1, 8, 150, 150), torch.randn(8, 8, 3, 3)
    answer = tilewise.conv2d(x, weight, padding=1)
    live = [tilewise.conv2d(x, weight, padding=1) for _ in range(6)]
    live += [tilewise.conv2d(y, weight, padding=1) for y in live]
    assert not overlap(live)
    live[0].zero_()
    assert all(torch.equal(y, answer) for y in live[1:6])


def test_outputs_outlive_the_limit() -> None:
    x, weight = torch.randn(1, 8, 150, 150), torch.randn(8, 8, 3, 3)
    y = tilewise.conv2d(x, weight, padding=1)
    copy = y.clone()
    tilewise.set_memory_limit(pool=0, weights=0)
    again = tilewise.conv2d(x, weight, padding=1)
    assert (POOL.kept, MADE.total) == (0, 0)
    tilewise.set_memory_limit(pool=1 << 30, weights=1 << 30)
    assert torch.equal(y, copy)
    assert torch.equal(again, copy)


def test_outputs_go_through_autograd_and_back_to_the_pool() -> None:
    tilewise.set_memory_limit(pool=1 << 30)
    x, weight = torch.randn(1, 8, 150, 150), torch.randn(8, 8, 3, 3, requires_grad=True)

    def step() -> None:
        y = tilewise.conv2d(x, weight, padding=1, activation="relu", algorithm="cpu_direct")
        y = tilewise.conv2d(y, weight, padding=1, algorithm="cpu_direct")
        y.square().mean().backward()

    step()
    gc.collect()
    before = POOL.kept
    for _ in range(5):
        step()
    gc.collect()
    assert POOL.kept == before


# finalisers run inside anything: they must not wait for a lock


def finishes(run: Callable[[], object]) -> bool:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()


def test_a_tensor_can_die_while_the_pool_is_in_use(pool: Pool) -> None:
    held = [memory.empty(MB)]
    with pool._lock:
        assert finishes(held.clear)
        held.append(1)
        held.clear()  # also in the thread that is inside
    memory.empty(8 * MB)
    assert pool.kept >= 4 * MB


def test_an_entry_can_be_dropped_while_the_cache_is_in_use() -> None:
    cache: Lru[str] = Lru(10)
    cache.put("a", "x")
    cache.put("b", "y")
    with cache._lock:
        assert finishes(lambda: cache.drop("a"))
        cache.drop("b")
    assert cache.get("a") is None
    assert cache.get("b") is None
    assert (len(cache), cache.total) == (0, 0)


def test_a_weight_can_die_while_the_cache_is_in_use() -> None:
    weights = [torch.randn(8, 8, 3, 3)]
    tilewise.conv2d(torch.randn(1, 8, 9, 9), weights[0], algorithm="cpu_direct")
    count = len(MADE)
    with MADE._lock:
        assert finishes(weights.clear)
    MADE.get("anything")
    assert len(MADE) == count - 1


def test_threads_that_allocate_and_collect() -> None:
    """Cycles of outputs and weights, collected wherever a thread happens to be."""
    tilewise.set_memory_limit(pool=8 * MB, weights=MB)
    x, answers = torch.randn(1, 8, 140, 140), {}

    def run(thread: int) -> None:
        rng = torch.Generator().manual_seed(thread)
        for _ in range(15):
            weight = torch.randn(8, 8, 3, 3, generator=rng)
            y = tilewise.conv2d(x, weight, algorithm="cpu_direct")
            cycle = [weight, y]
            cycle.append(cycle)
            answers[thread] = (weight.clone(), y)
            del weight, y, cycle
            gc.collect(0)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    for weight, y in answers.values():
        assert torch.allclose(y, F.conv2d(x, weight), atol=1e-3)


# caches


def test_lru_keeps_the_last_used_within_its_limit() -> None:
    cache: Lru[int] = Lru(10, weigh=lambda entry: entry)
    for key, weight in (("a", 4), ("b", 4), ("a", 3)):
        cache.put(key, weight)
    assert cache.total == 7
    assert cache.get("b") == 4
    cache.put("c", 5)  # a is the least recently used
    assert (cache.get("a"), cache.get("b"), cache.get("c"), cache.total) == (None, 4, 5, 9)
    assert cache.put("d", 11) == 11  # too heavy to stay, still handed back
    assert (len(cache), cache.total) == (0, 0)
    cache.put("e", 2)
    cache.limit = 1
    assert (len(cache), cache.total) == (0, 0)


def test_counts_stay_within_their_limits() -> None:
    tilewise.set_cache_limit(kernels=3, executables=5)
    tilewise.set_memory_limit(weights=40_000)
    x, weights = torch.randn(1, 8, 12, 12), [torch.randn(8, 8, 3, 3) for _ in range(12)]
    for i in range(8):
        for weight in weights:
            tilewise.conv2d(x[:, :, i:], weight, algorithm="cpu_direct")
            assert len(KERNELS) <= 3
            assert len(ENGINE.executables) <= 5
            assert MADE.total <= 40_000
    assert (len(KERNELS), len(ENGINE.executables)) == (3, 5)
    assert MADE.total > 0


# when the system refuses


def test_free_blocks_are_given_back_before_memory_is_refused(
        pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.empty(4 * MB)
    assert pool.kept == 16 * MB
    system, asked = memory._map, []

    def refuse(size: int) -> Any:
        asked.append(pool.kept)
        if pool.kept or size > 64 * MB:
            raise OSError(12, "Cannot allocate memory")
        return system(size)

    monkeypatch.setattr(memory, "_map", refuse)
    assert memory.empty(8 * MB).numel() == 8 * MB
    assert asked == [16 * MB, 0]
    with pytest.raises(MemoryError, match=r"96 MB asked for.* 32 MB of free blocks.*needs"):
        memory.empty(24 * MB)
    with pytest.raises(tilewise.TilewiseError):
        memory.empty(24 * MB)
    assert memory.empty(MB).numel() == MB  # and life goes on


# a long life


def many_kernels() -> float:
    """MB that a process grows by while hundreds of kernels are loaded and freed."""
    from tilewise.core.isa import ISA
    from tilewise.core.target import Target
    from tilewise.kernels.cpu.emit import jit
    from tilewise.kernels.cpu.prepare import fingerprint

    row, kept = ISA[Target.host().isa], []

    def load(count: int) -> float:
        for i in range(count):
            code = jit.load(fingerprint._module, "fingerprint", row, "keep", "glance")
            if i % 300 == 0:
                kept.append(code.function("glance", ctypes.c_void_p))
        return resident()

    before = load(500)
    after = load(700)
    for entry in kept:  # outlive the linkers they came from
        entry(ctypes.addressof(Frame()))
    return after - before


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_kernels_leave_nothing_behind() -> None:
    assert in_process(many_kernels) < 3  # 6 when each left 9 KB


def resident() -> float:
    """MB of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MB


def three_hundred_shapes() -> dict[str, Any]:
    """Resident memory while shape follows shape, with every limit tight."""
    torch.set_num_threads(2)
    tilewise.set_memory_limit(pool=16 * MB, weights=2 * MB)
    tilewise.set_cache_limit(kernels=8, executables=16)
    rng, sizes, wrong, most = random.Random(0), [], 0, 0
    shapes = [(h, w) for h in range(20, 60) for w in range(100, 160, 6)]
    weight = torch.ones(32, 1, 1, 1) * 2
    for h, w in rng.sample(shapes, 300):  # not compared with torch, which keeps 100 KB a shape
        x = torch.randn(rng.randint(1, 2), 32, h, w).to(memory_format=torch.channels_last)
        y = tilewise.conv2d(x, weight.clone(), groups=32, algorithm="cpu_depthwise")
        wrong += not torch.equal(y, 2 * x)
        most = max(most, POOL.kept)
        held = (POOL.kept <= POOL.limit and MADE.total <= MADE.limit
                and len(KERNELS) <= 8 and len(ENGINE.executables) <= 16)
        wrong += not held
        sizes.append(resident())
    return {"wrong": wrong, "most_kept": most, "resident": sizes}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_levels_off(tmp_path: Path) -> None:
    found = in_process(three_hundred_shapes, timeout=300, TILEWISE_CACHE_DIR=str(tmp_path))
    assert found["wrong"] == 0
    assert found["most_kept"] > 0
    first, last = max(found["resident"][:100]), max(found["resident"][-50:])
    print(f"resident after 100 shapes {first:.0f} MB, after 300 {last:.0f} MB")
    assert last - first < 20  # 100 KB a shape; outputs alone are 150 MB

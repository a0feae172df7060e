"""Ctrl-C at any moment: nothing crashes, nothing is left locked, the next call is right."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import llvmlite.binding as llvm
import pytest
import torch
from support.processes import in_process
from torch.nn import functional as F

import tilewise
from tilewise.conv.running import ENGINE
from tilewise.core.apart import apart
from tilewise.core.files import cache_directory
from tilewise.core.lru import Lru
from tilewise.kernels.cpu import memory
from tilewise.kernels.cpu.emit import threads
from tilewise.kernels.cpu.emit.launch import KERNELS
from tilewise.kernels.cpu.memory import POOL, Pool
from tilewise.runtime import weights


def forget(objects: bool) -> None:
    """As a process that has compiled nothing yet; with `objects`, nor has any before it."""
    ENGINE.executables.clear()
    KERNELS.clear()
    if objects:
        for path in cache_directory().glob("*.o"):
            path.unlink(missing_ok=True)


# at random moments


def interrupt_at_random(count: int, seed: int) -> dict[str, int]:
    """Compile, load and run, interrupted `count` times; after each, the answer must be right."""
    torch.set_num_threads(2)
    x, weight = torch.randn(1, 1, 400, 400), torch.ones(1, 1, 1, 2)
    answer, rng, wrong = F.conv2d(x, weight), random.Random(seed), 0
    came: list[int] = []

    def interrupt(*_: object) -> None:
        came.append(1)
        raise KeyboardInterrupt

    def run() -> torch.Tensor:
        return tilewise.conv2d(x, weight, algorithm="cpu_pixels")

    signal.signal(signal.SIGALRM, interrupt)
    run()
    for turn in range(count):
        anew = turn % 10 == 0  # compiled takes twenty times as long as loaded
        forget(objects=anew)
        threads._RUNTIME.address = threads._POOL if turn % 4 > 1 else 0
        with suppress(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 0.1 if anew else 0.005))
            while len(came) == turn:  # Python ignores an interrupt inside a finaliser
                run()
        wrong += not torch.allclose(run(), answer, atol=1e-5)
        wrong += POOL.kept > POOL.limit or POOL._lock.locked() or KERNELS._lock.locked()
    return {"came": len(came), "wrong": wrong}


def test_interrupts_at_random_moments(tmp_path: Path) -> None:
    found = in_process(interrupt_at_random, 200, random.randrange(1 << 30),
                       TILEWISE_CACHE_DIR=str(tmp_path), OMP_WAIT_POLICY="passive")
    assert found == {"came": 200, "wrong": 0}


# beside the main thread


def test_llvm_is_never_called_where_an_interrupt_can_land(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its wrappers free what they hold twice if they are interrupted between two lines."""
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    callers = []
    lock = llvm.ffi.lib._lock
    enter = type(lock).__enter__
    monkeypatch.setattr(type(lock), "__enter__",
                        lambda self: callers.append(threading.get_ident()) or enter(self))
    forget(objects=False)
    for _ in range(2):  # compiled, then loaded
        tilewise.conv2d(torch.ones(1, 3, 9, 9), torch.ones(4, 3, 3, 3), algorithm="cpu_direct")
        forget(objects=False)
    assert callers
    assert threading.main_thread().ident not in callers


def test_threads_of_python_are_started_where_no_interrupt_can_land(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a callback from C is lost, and with it a part of the result."""
    x, weight = torch.randn(1, 8, 20, 20), torch.randn(8, 8, 3, 3)
    callers = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start",
                        lambda self: callers.append(threading.get_ident()) or start(self))
    monkeypatch.setattr(threads._RUNTIME, "address", threads._address(threads._RUNTIME.pool))
    torch.set_num_threads(2)
    y = tilewise.conv2d(x, weight, algorithm="cpu_direct")
    assert torch.allclose(y, F.conv2d(x, weight), atol=1e-4)
    assert callers
    assert threading.main_thread().ident not in callers


@contextmanager
def alarm_after(seconds: float) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_waits_for_what_was_begun() -> None:
    ended = []
    with pytest.raises(KeyboardInterrupt), alarm_after(0.02):
        apart(lambda: (time.sleep(0.2), ended.append(True)))
    assert ended == [True]


def test_work_apart_returns_and_raises_as_it_would_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert apart(lambda: apart(threading.get_ident)) != threading.get_ident()
    with pytest.raises(KeyError, match="what"):
        apart(lambda: {}["what"])

    def refuse(*args: Any) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    assert apart(threading.get_ident) == threading.get_ident()


# before every line of what finalisers and callers share


def lines_before(run: Callable[[], object], module: Any, stop: int) -> bool:
    """Run with an interrupt before the line number `stop` of a module's; whether it came."""
    left, source = [stop], Path(module.__file__).read_text().splitlines()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != module.__file__:
            return None
        # leaving a `with` is one step for real interrupts
        if event == "line" and not source[frame.f_lineno - 1].strip().startswith("with "):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            run()
    finally:
        sys.settrace(None)
    return left[0] <= 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_pool_interrupted_before_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    block = memory.SMALL // 4  # floats of the smallest that is pooled

    def use() -> None:
        first, second = memory.empty(block), memory.empty(3 * block)
        del first
        third = memory.empty(block)
        del second, third
        memory.empty(9 * block)  # more than is kept

    stop, came = 0, True
    while came:
        stop += 1
        pool = Pool(8 * memory.SMALL)
        monkeypatch.setattr(memory, "POOL", pool)
        memory.empty(2 * block)
        came = lines_before(use, memory, stop)
        assert not pool._lock.locked(), stop
        for size in (1, 2, 3, 5):
            assert memory.empty(size * block).numel() == size * block
        held = sum(len(regions) * size for size, regions in pool._free.items())
        assert held <= pool.kept <= pool.limit, stop
        pool.limit = 0
        assert (pool.kept, pool.give_back()) == (0, 0), stop
    assert stop > 50


def test_a_cache_interrupted_before_every_line() -> None:
    stop, came = 0, True
    while came:
        stop += 1
        cache: Lru[int] = Lru(10, weigh=lambda entry: entry)
        cache.put("a", 4)

        def use(cache: Lru[int] = cache) -> None:
            cache.put("b", 5)
            cache.drop("a")
            cache.put("b", 6)
            cache.put("c", 7)
            cache.get("c")

        came = lines_before(use, sys.modules[Lru.__module__], stop)
        assert not cache._lock.locked(), stop
        cache.put("b", 3)
        assert cache.total == sum(entry[1] for entry in cache._entries.values()) <= 10, stop
        cache.put("d", 9)
        assert (len(cache), cache.total) == (1, 9), stop
    assert stop > 20


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_in_a_finaliser_costs_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops what a finaliser raises; what it was to forget is forgotten all the same."""
    came = []

    def interrupted(*_: object) -> None:
        came.append(1)
        raise KeyboardInterrupt

    source = torch.randn(8, 8)
    key = ("of a test", id(source))
    weights.made("of a test", lambda: torch.ones(8), source)
    assert weights.MADE.peek(key) is not None
    with monkeypatch.context() as patch:
        patch.setattr(weights.MADE, "drop", interrupted)
        del source
    assert came
    assert weights.MADE.peek(key) is None

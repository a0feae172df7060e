"""Deliberate faults: each is applied in a process of its own; its check passes without it.

A test module has MUTATIONS, named tuples with a patch `apply`, and `check(mutation)`, which applies
the patch within `patched` and raises Mismatch where the harness notices something.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tilewise.algorithms.common import PACKERS
from tilewise.bench.guarded import Mismatch
from tilewise.kernels.cpu.emit import launch
from tilewise.kernels.cpu.prepare import direct_matrix, winograd

from .harness import in_process

LANES = os.cpu_count() or 1
SIGNALS = ("SIGSEGV", "SIGBUS", "SIGILL")  # of unmapped pages, and of tiles not configured
Patch = Callable[[pytest.MonkeyPatch], None]


def replaced(owner: Any, name: str, value: Any) -> Patch:
    return lambda patch: patch.setattr(owner, name, value)


def changed(owner: Any, name: str, change: Callable[[Any], Any]) -> Patch:
    """The patch that passes a cached property's value, or a function's result, through `change`."""
    original = vars(owner)[name]
    if hasattr(original, "compute"):  # a cached property
        return replaced(owner, name, property(lambda self: change(original.compute(self))))
    return replaced(owner, name, lambda *args, **options: change(original(*args, **options)))


@contextmanager
def patched(apply: Patch) -> Iterator[None]:
    """The patch in force, nothing compiled before, and nothing kept: objects know no patches."""
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as cache:
        patch.setenv("TILEWISE_CACHE_DIR", cache)
        launch.KERNELS.clear()
        for known in (PACKERS, direct_matrix.RUNS, winograd.MAKERS, winograd.RUNS):
            known.clear()
        apply(patch)
        yield


def outcomes(module: str) -> dict[str, list[str]]:
    """What was said of every mutation of a test module, by as many processes as there are cores."""
    with ThreadPoolExecutor(LANES) as pool:
        lanes = pool.map(lambda lane: in_process("support.faults:run_lane", module, lane),
                         range(LANES))
        return {name: said for lane in lanes for name, said in lane.items()}


def run_lane(module: str, lane: int) -> dict[str, list[str]]:
    """Every so many-th mutation."""
    tests = import_module(module)
    sound: dict[str, list[str]] = {}  # what a check said without its fault: many share one
    said = {}
    for name in list(tests.MUTATIONS)[lane::LANES]:
        mutation = tests.MUTATIONS[name]
        without = mutation._replace(apply=_nothing)
        if repr(without) not in sound:
            sound[repr(without)] = _in_fork(tests.check, without)
        said[name] = sound[repr(without)] + _in_fork(tests.check, mutation)
    return said


def _nothing(patch: pytest.MonkeyPatch) -> None:
    """The patch that changes nothing."""


def assert_noticed(said: list[str]) -> None:
    without, mutated = said
    assert without == "passed"
    assert mutated in SIGNALS or mutated.startswith("noticed: ")


def _in_fork(check: Callable[[Any], object], mutation: Any) -> list[str]:
    """The lines said by a copy of this process; if it was killed, the signal is the last."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            _say_what_happens(check, mutation, lambda text: os.write(write, text.encode()))
        except Exception as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        lines = said.read().splitlines()
    status = os.waitpid(child, 0)[1]
    return lines + ([signal.Signals(os.WTERMSIG(status)).name] if os.WIFSIGNALED(status) else [])


def _say_what_happens(check: Callable[[Any], object], mutation: Any,
                      say: Callable[[str], object]) -> None:
    """`passed`, or what the check noticed."""
    try:
        check(mutation)
        say("passed\n")
    except Mismatch as mismatch:
        say(f"noticed: {mismatch}\n")

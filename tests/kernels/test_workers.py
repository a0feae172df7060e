"""Processes that compile ahead of need."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import pytest

import tilewise
from tilewise.algorithms import ALGORITHMS
from tilewise.core import Problem, Target
from tilewise.kernels.cpu import between
from tilewise.kernels.cpu.emit import jit, workers
from tilewise.kernels.cpu.emit.requests import Request

HOST = Target.host(threads=2)
PROBLEMS = [Problem.parse(f"n1c{c}h9w9k16r3s3p1_f32_forward+bias+relu") for c in (8, 12, 20, 24)]
DIRECT = next(a for a in ALGORITHMS if a.name == "cpu_direct")


def wait_for(happened: Callable[[], bool]) -> None:
    """Not for ever: a worker that cannot start must fail a test, not stop it."""
    end = monotonic() + 60
    while not happened():
        assert monotonic() < end
        sleep(0.01)


def requests() -> list[Request]:
    return [DIRECT.request(p, HOST, DIRECT.default(p, HOST)) for p in PROBLEMS]


KERNELS = sorted({a.kernel().__name__ for a in ALGORITHMS if hasattr(a, "request")} | {
    f"{between.__name__}.{module.name}" for module in pkgutil.iter_modules(between.__path__)})


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_kernel_needs_torch_to_be_written(kernel: str) -> None:
    code = (f"import sys, types; sys.path[:] = {sys.path!r}; p = types.ModuleType('tilewise'); "
            f"p.__path__ = [{str(Path(tilewise.__file__).parent)!r}]; sys.modules['tilewise'] = p; "
            f"import {kernel}; assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def test_a_request_survives_the_journey() -> None:
    for request in requests():
        again = Request.from_line(request.to_line())
        assert again.key == request.key
        assert str(again.module().ir) == str(request.module().ir)


def test_workers_compile_what_this_process_then_takes(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(workers, "cores", lambda: 2)
    ahead, asked = workers.Ahead(), requests()
    assert ahead.ask(asked) == 1
    wait_for(lambda: not ahead._waiting)  # until the worker has begun all
    for request in asked:
        image = ahead.take(request)
        assert image == jit.compile_object(request.module())
    assert not ahead._begun
    assert not ahead._made


def test_one_core_has_no_workers(monkeypatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 1)
    assert workers.Ahead().ask(requests()) == 0


def test_a_worker_that_dies_costs_nothing_but_time(monkeypatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 2)
    monkeypatch.setattr(workers, "START", "raise SystemExit(3)")
    ahead, asked = workers.Ahead(), requests()
    ahead.ask(asked)
    assert [ahead.take(request) for request in asked] == [None] * len(asked)


def test_what_is_begun_is_not_begun_again(monkeypatch) -> None:
    """Two threads may look at the same graph; the first waits for the worker it knows."""
    monkeypatch.setattr(workers, "cores", lambda: 2)
    monkeypatch.setattr(workers, "PATIENCE", 5.0)
    ahead, asked = workers.Ahead(), requests()
    ahead.ask(asked)
    wait_for(lambda: len(ahead._begun) == len(asked))
    first = ahead._begun.copy()
    assert ahead.ask(asked) == 0
    assert ahead._begun == first
    assert all(ahead.take(request) for request in asked)


def test_sources_that_changed_are_not_compiled(monkeypatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 2)
    monkeypatch.setattr(workers, "ORIGIN", "another version")
    ahead, asked = workers.Ahead(), requests()
    ahead.ask(asked)
    assert [ahead.take(request) for request in asked] == [None] * len(asked)


@pytest.mark.parametrize("executable", [None, "", "/opt/app/server"])
def test_an_application_is_not_started_again(monkeypatch, executable) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 8)
    monkeypatch.setattr(workers.sys, "executable", executable)
    assert workers.Ahead().ask(requests()) == 0

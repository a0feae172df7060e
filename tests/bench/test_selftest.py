"""Random problems of every algorithm: few of them, and a fault that is noticed."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.ending import end_process, never_end
from support.faults import patched, replaced
from typer.testing import CliRunner

from tilewise.algorithms import ALGORITHMS
from tilewise.bench import guarded, selftest
from tilewise.bench.judged import Mismatch, exact, operands, scatter, spread
from tilewise.cli.app import app
from tilewise.core import Algorithm, Problem, Schedule, Target
from tilewise.core.isa import NO_ISA, available
from tilewise.kernels.cpu import emit
from tilewise.kernels.cpu.emit import launch

FEW = 12
NEED_MATRIX = ("cpu_phases_bf16x3", "cpu_phases_bf16x1")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Commands set torch's number of threads for the process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("row", [isa.name for isa in available()])
def test_every_algorithm_of_a_row_runs(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "SECONDS", 3600.0)  # however busy the machine is
    t = Target.host(row, threads=2)
    found = selftest.selftest(t, problems=FEW)
    assert found.wrong == []
    assert 0 < found.worst <= 1
    # phases by parts of floats alone refuse all without the unit
    assert found.ran == {a.name: FEW for a in ALGORITHMS if a.device == "cpu"
                         and a.takes == "addresses" and a.is_for(t)
                         and (t.row.matrix or a.name not in NEED_MATRIX)}


def test_a_fault_is_told() -> None:
    fma = emit.Function.fma
    wrong = replaced(emit.Function, "fma", lambda f, a, b, c: fma(f, a, b, c) + a * a * a)
    with patched(wrong):
        found = selftest.selftest(Target.host(threads=1), problems=2)
    launch.KERNELS.clear()  # wrong ones are not for other tests
    assert len({text.partition(":")[0] for text in found.wrong}) >= 5


@pytest.mark.parametrize("offset, side", [(-1, "end"), (8, "start")])
def test_code_that_writes_beside_its_memory_is_told(offset: int, side: str) -> None:
    class Wild(Algorithm):
        def build(self, p: Problem, t: Target, s: Schedule) -> Any:
            def launch(x: int, weight: int, bias: int, residual: int, y: int, *others: int) -> None:
                ctypes.c_float.from_address(y + 4 * offset).value = 1.0

            return launch

    p = Problem.parse("n1c1h2w2k2r1s1_f32_forward")
    o = operands(p, "floats", 0)
    with pytest.raises(Mismatch, match="wrote beside y"):
        selftest._run(Wild(), p, Target.host(threads=1), Schedule(), o, o.weight, side)


def test_a_single_value_may_have_any_stride() -> None:
    one = torch.tensor(1.0).expand(1)
    assert guarded._same_bytes(one, torch.ones(1))
    assert not guarded._same_bytes(one, torch.zeros(1))


def test_code_that_ends_its_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it may on a machine that nobody has tried; those that follow still have their turn."""
    monkeypatch.setattr(selftest, "tried", end_process)
    monkeypatch.setattr(selftest, "ALGORITHMS", ALGORITHMS[:2])
    before = os.environ.get("OMP_WAIT_POLICY")
    found = selftest.selftest(Target.host(threads=1), processes=1)
    assert [text.partition(",")[0] for text in found.wrong] == [a.name for a in ALGORITHMS[:2]]
    assert os.environ.get("OMP_WAIT_POLICY") == before


def test_code_that_never_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under an emulator that hangs; those that follow still have their turn."""
    monkeypatch.setattr(selftest, "tried", never_end)
    monkeypatch.setattr(selftest, "ALGORITHMS", ALGORITHMS[:2])
    monkeypatch.setattr(selftest, "SECONDS", 0.0)
    monkeypatch.setattr(selftest, "LATE", 0.5)
    found = selftest.selftest(Target.host(threads=1), processes=1)
    assert [text.partition(",")[0] for text in found.wrong] == [a.name for a in ALGORITHMS[:2]]
    assert all("after its time" in text for text in found.wrong)


def test_a_machine_without_a_row_has_nothing_to_test() -> None:
    assert selftest.selftest(Target("cpu", NO_ISA.name, 2)).ran == {}


def test_the_command_prints_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "SECONDS", 2.0)
    monkeypatch.setattr("tilewise.core.cores.cores", lambda: 1)
    said = CliRunner().invoke(app, ["doctor", "--selftest", "--threads", "1"])
    assert said.exit_code == 0
    assert said.stdout.startswith("tilewise ")
    assert " 0 wrong, " in said.stdout
    assert len(said.stdout.splitlines()) == 1
    monkeypatch.setattr("tilewise.core.cores.cores", lambda: 0)  # in this process
    said = CliRunner().invoke(app, ["doctor", "--selftest", "--json", "--threads", "1"])
    assert json.loads(said.stdout)["wrong"] == []


def test_what_is_pooled_is_judged_by_all_that_is_convolved() -> None:
    """The column that sees the image is left out: what is pooled is zero, and has no size."""
    p = Problem.parse("n1c2h1w1k4r5s5p7-6x6-0_f32_forward+pool2")
    o = operands(p, "floats", 1)
    assert not exact(p, o).any()
    assert spread(p, o).any()


def test_only_the_mean_of_few_results_may_scatter() -> None:
    assert [scatter(n) for n in (0, 1, 4, 9, 1000)] == [3, 3, 1.5, 1, 1]

"""Kernels of Arm's rows under emulation, against float64, between unmapped pages.

A sample, for CI; scripts/emulate_arm.py runs thousands of problems a machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
from support import emulated, faults, mutations
from support.cases import Jobs, jobs_of, runs
from support.emulated import MACHINES
from support.harness import sample
from support.mutations import PADDED, Mutation

from tilewise.kernels.cpu.emit import threads

# shapes that are drawn, and how many of them are run
SHAPES = {"forward": (400, 18), "backward_data": (128, 14), "backward_weight": (128, 10)}
SIZES = 4  # batch sizes that share a shape
LEAST = {"forward": 72, "backward_data": 40, "backward_weight": 40}
# vectors of 128 bits, and of one more length: every length goes forward
ON = {"forward": ("generic", "neon", "sve256", "sve512"), "backward_data": ("neon", "sve512"),
      "backward_weight": ("neon", "sve256")}
CASES = [(machine, direction) for direction, machines in ON.items() for machine in machines]
OTHERS = ("test_gradients:run_masks", "test_gradients:run_fused_masks",
          "test_gradients:run_prepared", "test_few_rows:run_random", "test_grids:run_random")
IN_TURN = [(function, ("neon", "sve256")[number % 2]) for number, function in enumerate(OTHERS)]
EVERY = sample(1, 7)  # of the faults that are noticed on x86


@pytest.fixture(autouse=True)
def tools() -> None:
    """Their lack is an error: these tests are named by hand."""
    assert emulated.missing() == [], f"apt-get install {' '.join(emulated.PACKAGES)}"


# in processes of their own


def run_random(machine: str, direction: str) -> dict[str, Any]:
    shapes, count = SHAPES[direction]
    return emulated.run(machine, "support.cases:run_cases", MACHINES[machine].row, direction,
                        shapes, SIZES, 0, 1, count)


def run_other(function: str, machine: str) -> dict[str, Any]:
    more = [8] if function.startswith("test_grids") else []
    return emulated.run(machine, function, MACHINES[machine].row, *more)


# the tests


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    with jobs_of(request) as found:
        yield found


@pytest.mark.parametrize("machine, direction", CASES)
@runs("run_random")
def test_random_problems(jobs: Jobs, machine: str, direction: str) -> None:
    result = jobs.result("run_random", machine, direction)
    assert result["failures"] == []
    assert result["calls"] >= result["compared"] >= 2 * LEAST[direction]
    assert 0 < result["worst"] <= 1
    for name, ran in result["ran"].items():
        assert ran, name


@pytest.mark.parametrize("function, machine", IN_TURN)
@runs("run_other")
def test_masks_weights_few_rows_and_phases(jobs: Jobs, function: str, machine: str) -> None:
    result = jobs.result("run_other", function, machine)
    assert result["failures"] == []
    assert result["calls"] > 0


# deliberate faults


def check(mutation: Mutation) -> None:
    with emulated.emulated("neon"), mock.patch.dict(os.environ, TILEWISE_ISA="neon"):
        mutations.check(mutation)


def flushing_for_ever() -> faults.Patch:
    """The control register is written once, and not as it was."""
    write = threads._write_control

    def once(f: Any, value: Any) -> None:
        if not getattr(f, "was_written", False):
            f.was_written = True
            write(f, value)

    return faults.replaced(threads, "_write_control", once)


MUTATIONS = {
    "denormals stay zero": Mutation(flushing_for_ever(), "cpu_direct", PADDED),
    **dict(list(import_module("test_mutations").MUTATIONS.items())[::EVERY]),
}
# it exchanges halves of a vector of eight, and changes nothing in one of four
MUTATIONS.pop("channels of another group", None)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_emulated")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])

"""Products of bfloat16 on an emulated Arm, against float64, between unmapped pages.

A sample, for CI; scripts/emulate_arm.py runs thousands of problems.
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
from support.faults import replaced
from support.harness import sample
from support.mutations import PADDED, Mutation

from tilewise.core import ISA
from tilewise.kernels.cpu.emit import bfmmla

ROW = MACHINES["bf16"].row
FLOPS = 2e5  # of an image: the emulator does not have the unit, and computes bit by bit
FEW = 40  # problems for each number of products
DEEP = 2  # of the problems of many channels; one of them is for AMX alone
EVERY = sample(1, 8)  # of the faults that are noticed on AMX


# in processes of their own


def run_products(products: int) -> dict[str, Any]:
    return emulated.run("bf16", "test_amx:run_random", products, 0, ROW, FEW, FLOPS)


def run_deep(count: int) -> dict[str, Any]:
    return emulated.run("bf16", "test_amx:run_deep", ROW, count)


# the tests


@pytest.fixture(autouse=True)
def tools() -> None:
    """Their lack is an error: these tests are named by hand."""
    assert emulated.missing() == [], f"apt-get install {' '.join(emulated.PACKAGES)}"


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    with jobs_of(request) as found:
        yield found


@pytest.mark.parametrize("products", ISA[ROW].matrix.products)
@runs("run_products")
def test_random_problems(jobs: Jobs, products: int) -> None:
    result = jobs.result("run_products", products)
    assert result["failures"] == []
    assert sum(result["ran"].values()) >= FEW / 2
    assert 0 < result["worst"] <= 1


@pytest.mark.parametrize("count", [DEEP])
@runs("run_deep")
def test_many_channels(jobs: Jobs, count: int) -> None:
    result = jobs.result("run_deep", count)
    assert result["failures"] == []
    assert set(result["ran"]) == {"cpu_direct_bf16", "cpu_direct_bf16x3"}


# deliberate faults


def check(mutation: Mutation) -> None:
    with emulated.emulated("bf16"), mock.patch.dict(os.environ, TILEWISE_ISA=ROW):
        mutations.check(mutation)


def one_half_twice(self: bfmmla.Registers, *where: Any) -> None:
    LOAD(self, *where)
    self.b = [operand for operand in self.b[::2] for _ in range(2)]


LOAD = bfmmla.Registers.load_right
# those of a kernel that Arm has as well; here no tiles have to be configured
SHARED = {name: mutation for name, mutation in import_module("test_amx_mutations").MUTATIONS.items()
          if mutation.algorithm in ("cpu_direct_bf16", "cpu_direct_bf16x3")
          and name != "tiles are not configured"}
OTHERWISE = {  # a step is shorter here: problems that run into the same code
    "padding beside joined taps is not cleared": "n2c1h9w19k21r3s3u1x2p1_f32_forward",
    "a pass reads the weights of the one before": "n1c300h3w5k21r3s3p1_f32_forward"}
MUTATIONS = {
    "rows and halves of sums are swapped": Mutation(
        replaced(bfmmla, "TURNED", bfmmla.TURNED[::-1]), "cpu_direct_bf16", PADDED),
    "columns of weights are their neighbours": Mutation(
        replaced(bfmmla.Registers, "load_right", one_half_twice), "cpu_direct_bf16x3", PADDED),
    **{name: mutation._replace(problem=OTHERWISE.get(name, mutation.problem))
       for name, mutation in list(SHARED.items())[::EVERY]}}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_emulated_matrix")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])

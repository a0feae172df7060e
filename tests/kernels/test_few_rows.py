"""Linear layers of few rows: weights in fewer bits, how exactly, and between unmapped pages."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support import faults, harness
from support.faults import changed, replaced
from support.harness import Mismatch, in_process
from support.mutations import Mutation, next_bias, whole_vectors
from torch.nn import functional as F

from tilewise.algorithms import ALGORITHMS
from tilewise.algorithms.cpu_few_rows import CpuFewRows
from tilewise.bench.drawn import random_linear
from tilewise.bench.guarded import launch_guarded
from tilewise.core import Problem, Schedule, Target
from tilewise.core.isa import available
from tilewise.kernels.cpu import emit
from tilewise.kernels.cpu.conv import few_rows
from tilewise.kernels.cpu.emit.launch import launcher
from tilewise.kernels.cpu.prepare import few_rows as few_rows_prepare

STORED = (32, 24, 16)
FEW: dict[int, Any] = {a.stored: a for a in ALGORITHMS if isinstance(a, CpuFewRows)}
SHAPES = 5  # of each number of bits and row of instructions
FLOOR = 8 * SHAPES * len(STORED)
ODD = "n7c203h1w1k29r1s1_f32_forward+bias+relu"


def linear(x: torch.Tensor, weight: torch.Tensor, bits: int) -> torch.Tensor:
    """By the kernel, between unmapped pages."""
    p = Problem(x.shape[0], x.shape[1], 1, 1, weight.shape[0], 1, 1)
    t, s, few = Target.host(threads=harness.THREADS), Schedule(streams=4), FEW[bits]
    o = harness.Operands(x[:, :, None, None], weight[:, :, None, None], None, None)
    prepared = few.prepare(p, t, s, o.weight).view(torch.int32)  # NaN would not equal itself
    return harness.run(few, p, t, s, o, prepared).flatten(1)


# weights in fewer bits


@pytest.mark.parametrize(("dropped", "unit"), [(8, 2.0 ** -16), (16, 2.0 ** -8)])
def test_weights_are_rounded_to_nearest_even(dropped: int, unit: float) -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    kept = few_rows.rounded(x, dropped).view(torch.float32)
    assert ((kept.double() - x).abs() <= unit * x.abs()).all()
    assert not (kept.view(torch.int32) & (1 << dropped) - 1).any()
    steps = torch.tensor([0.5, 1.5, 2.5, 1.25, 1.75]) * 2 * unit
    even = torch.tensor([0.0, 2, 2, 1, 2]) * 2 * unit
    kept = few_rows.rounded(1 + steps, dropped).view(torch.float32)
    assert torch.equal(kept, 1 + even)


def test_sixteen_bits_are_bfloat16() -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(few_rows.rounded(x, 16).view(torch.float32), x.bfloat16().float())


@pytest.mark.parametrize("dropped", [8, 16])
def test_infinities_and_nan_stay(dropped: int) -> None:
    bits = torch.tensor([0x7F80_0000, -0x80_0000, 0x7F80_0001, 0x7FFF_FFFF, -1, -0x7F_FFFF, 0,
                         -0x8000_0000], dtype=torch.int32)
    kept = few_rows.rounded(bits.view(torch.float32), dropped).view(torch.float32)
    assert torch.equal(kept.isnan(), torch.tensor([0, 0, 1, 1, 1, 1, 0, 0]).bool())
    assert kept[:2].tolist() == [torch.inf, -torch.inf]
    assert torch.equal(kept[6:].view(torch.int32), bits[6:])


@pytest.mark.parametrize(("bits", "most"), [(32, 1 << 16), (24, 1 << 16), (16, 1 << 8)])
def test_integers_of_as_many_bits_are_exact(bits: int, most: int) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(-1, 2, (3, 150), generator=rng).float()
    weight = torch.randint(-most, most + 1, (37, 150), generator=rng).float()
    y = linear(x, weight, bits)
    assert torch.equal(y.double(), x.double() @ weight.double().t())


@pytest.mark.parametrize("bits", STORED)
def test_values_that_are_no_numbers_stay_where_they_are(bits: int) -> None:
    weight = torch.ones(9, 70)
    weight[2, 69], weight[4, 0], weight[8, 33] = torch.nan, torch.inf, -torch.inf
    x = torch.ones(2, 70)
    y = linear(x, weight, bits)
    assert torch.equal(y.nan_to_num(0.5), F.linear(x, weight).nan_to_num(0.5))
    x[1, 69] = torch.inf
    y = linear(x, torch.ones(9, 70), bits)
    assert torch.equal(y, F.linear(x, torch.ones(9, 70)))


@pytest.mark.parametrize("bits", [24, 16])
@pytest.mark.parametrize("c", [1, 64, 203, 320])
def test_prepared_weights_are_those_of_torch(bits: int, c: int) -> None:
    p, s = Problem(1, c, 1, 1, 29, 1, 1), Schedule(streams=4)
    weight = torch.randn(p.k, c, 1, 1)
    weight.view(-1)[::7] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 3.4e38]).repeat(
        weight.numel())[:weight.view(-1)[::7].numel()]
    for isa in available():
        geometry = few_rows.Geometry(p, s, isa.lanes, bits)
        expected = geometry.pack_weight(weight).reshape(p.k, -1)
        launch = launcher(few_rows_prepare.make, p, s, isa, bits)
        found = launch_guarded(launch, {"weight": weight.flatten().view(torch.int32)},
                               {"y": p.k * geometry.row_floats}, 1, 2, "end")["y"]
        assert torch.equal(found.view(torch.int32).reshape(p.k, -1), expected)


def test_as_many_bytes_as_bits_say() -> None:
    p, t = Problem(1, 4096, 1, 1, 64, 1, 1), Target.host(threads=2)
    weight = torch.randn(64, 4096, 1, 1)
    made = [few.prepare(p, t, few.default(p, t), weight) for few in FEW.values()]
    assert [8 * m.numel() * m.element_size() // weight.numel() for m in made] == [32, 24, 16]
    assert made[0].data_ptr() == weight.data_ptr()


def test_more_bits_err_less_than_is_declared() -> None:
    p = Problem.parse("n1c4096h1w1k4096r1s1_f32_forward")
    t = Target("cpu", "avx2", 2)
    errors = [few.error(p, t, few.default(p, t)) for few in FEW.values()]
    assert [few.bits for few in FEW.values()] == [24, 16, 8]
    assert errors[0] < 5e-6 < errors[1] < 2e-5 < errors[2] < 5e-3


# random problems, in a process of their own: a kernel may crash


def run_random(row: str) -> dict[str, Any]:
    """Odd sizes, all numbers of streams, one to eight rows, on a row of instructions."""
    rng, target = random.Random(f"few rows on {row}"), Target.host(row, harness.THREADS)
    failures, ran = [], 0
    for number in range(SHAPES * len(STORED)):
        p = random_linear(rng)
        few, s = FEW[STORED[number % 3]], Schedule(streams=rng.choice((2, 4, 8)))
        assert s in few.space(p, target)
        try:
            ran += harness.check(few, p, target, s, number, range(1, 9)) // 2
        except Mismatch as mismatch:
            failures.append(str(mismatch))
    return {"ran": ran, "failures": failures}


@pytest.mark.parametrize("row", [isa.name for isa in available()])
def test_random_problems(row: str) -> None:
    assert in_process("test_few_rows:run_random", row) == {"ran": FLOOR, "failures": []}


# deliberate faults


def check(mutation: Mutation) -> None:
    few = next(few for few in FEW.values() if few.name == mutation.algorithm)
    with faults.patched(mutation.apply):
        harness.check(few, Problem.parse(mutation.problem), Target.host(threads=harness.THREADS),
                      Schedule(streams=4))


def fault(apply: faults.Patch, bits: int = 24) -> Mutation:
    return Mutation(apply, FEW[bits].name, ODD)


MUTATIONS = {
    "the byte below the upper half is left out": fault(replaced(few_rows, "BYTE", 0)),
    "the other half is not cleared": fault(replaced(few_rows, "UPPER", -1), 16),
    "bytes are those of the next value": fault(replaced(
        emit.Words, "shifted", lambda words, by, shifted=emit.Words.shifted:
        shifted(words, by + 8 if by < 0 else by))),
    "halves are swapped": fault(changed(
        few_rows_prepare, "prepare", lambda rows: rows << 16 | rows >> 16 & 0xFFFF), 16),
    "weights are cut off, not rounded": fault(replaced(
        few_rows_prepare, "_rounded", lambda value, dropped: value.words().masked(
            -1 << dropped + 2))),
    "rows lie closer": fault(changed(few_rows.Geometry, "row_floats", lambda n: n - 1), 32),
    "a task is left out": fault(changed(few_rows.Geometry, "tasks", lambda tasks: tasks - 1)),
    "a stream is shorter": fault(changed(few_rows.Geometry, "places", lambda places: places - 1)),
    "nothing ends": fault(replaced(emit.Index, "minimum", lambda index, other: index), 32),
    "tails are loaded whole": fault(whole_vectors("load"), 32),
    "sums are stored whole": fault(whole_vectors("store")),
    "lanes are left out": fault(changed(emit.Vector, "shuffle", lambda v: v * v.f.vector(0.0))),
    "the bias is the neighbour's": fault(replaced(few_rows, "finish", next_bias)),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_few_rows")


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])

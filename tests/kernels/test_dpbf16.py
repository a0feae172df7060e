"""AVX-512's products of bfloat16 pairs: the code of the inner loop, and when it is chosen."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
from support import faults, mutations
from support.faults import replaced
from support.harness import ON_MATRIX, sample
from support.mutations import PADDED, Mutation

from tilewise.algorithms import ALGORITHMS
from tilewise.core import ISA, Problem, Target
from tilewise.core.isa import emulable
from tilewise.kernels.cpu.emit import dpbf16, jit
from tilewise.planner import Planner
from tilewise.runtime.engine import BITS, PRECISIONS

ROW = ISA["avx512_bf16"]
TARGET = Target("cpu", ROW.name, 2, l1=32 << 10, l2=1 << 20, l3=32 << 20)
POINTWISE = "n1c256h14w14k1024r1s1_f32_forward+bias+relu"
TAPS = "n1c256h14w14k256r3s3p1_f32_forward+bias+relu"
EVERY = sample(1, 12)  # of the faults that are noticed on AMX


def test_in_vectors_of_floats_it_is_avx512() -> None:
    plain = ISA["avx512"]
    assert replace(ROW, name=plain.name, needs=plain.needs, features=plain.features,
                   matrix=None, slow_on=()) == plain


# the code


def blocks(assembly: str) -> list[list[str]]:
    """Instructions between labels, without what follows the last jump back."""
    found: list[list[str]] = [[]]
    for line in assembly.splitlines():
        if re.match(r"[\w.$]+:", line):
            found.append([])
        elif re.match(r"\t[a-z]", line):
            found[-1].append(line.strip())
    return [block[:max((i for i, text in enumerate(block) if text.startswith("j")), default=0)]
            for block in found]


@pytest.mark.skipif("x86_64" not in ROW.machines or not emulable(), reason="for x86")
@pytest.mark.parametrize("text, taps", [(POINTWISE, 1), (TAPS, 3)])
def test_the_inner_loop_loads_little_and_spills_nothing(text: str, taps: int) -> None:
    """Of eight pairs, five rows and four vectors of columns."""
    p, a = Problem.parse(text), ON_MATRIX["cpu_direct_bf16"]
    s = a.default(p, TARGET)
    assert (s.tile_w, s.vectors) == (5, 4)
    inner = max(blocks(jit.assembly(a.request(p, TARGET, s).module())),
                key=lambda block: sum("vdpbf16ps" in text for text in block))
    counts = Counter(text.split()[0] for text in inner)
    assert counts["vdpbf16ps"] == taps * 8 * 5 * 4
    assert counts["vbroadcastss"] == taps * 8 * 5
    assert sum(text.startswith("vmovup") for text in inner) == taps * 8 * 4
    assert not [text for text in inner if "zmm" in text and "(%rsp)" in text]


# when


def planned(text: str, precision: str) -> Any:
    return Planner(ALGORITHMS).plan(Problem.parse(text), TARGET, max_error=PRECISIONS[precision],
                                    bits=BITS[precision])


def test_one_product_is_faster_than_floats_and_three_are_not() -> None:
    assert planned(POINTWISE, "medium").algorithm == "cpu_direct_bf16"
    for precision in ("high", "highest"):
        assert planned(POINTWISE, precision).algorithm not in ON_MATRIX
    said = ON_MATRIX["cpu_direct_bf16x3"].reject(Problem.parse(POINTWISE), TARGET)
    assert said == ["products are 3, needs fewer on dpbf16: there so many are slower than "
                    "float32's own"]


def test_few_sums_wait_for_each_other() -> None:
    """The estimate knows how many instructions are on their way at once."""
    a, p = ON_MATRIX["cpu_direct_bf16"], Problem.parse(POINTWISE)
    s = a.default(p, TARGET)
    assert a.cost(p, TARGET, s.with_(tile_w=2, vectors=1)) > 2 * a.cost(p, TARGET, s)


# deliberate faults


def check(mutation: Mutation) -> None:
    with mock.patch.dict(os.environ, TILEWISE_ISA=f"{ROW.name}_emulated"):
        mutations.check(mutation)


def one_row(self: dpbf16.Vectors, *where: Any) -> None:
    LEFT(self, *where)
    self.a = self.a[:1] * len(self.a)


def one_column(self: dpbf16.Vectors, *where: Any) -> None:
    RIGHT(self, *where)
    self.b = self.b[:1] * len(self.b)


LEFT, RIGHT = dpbf16.Vectors.load_left, dpbf16.Vectors.load_right
SHARED = [(name, mutation)
          for name, mutation in import_module("test_amx_mutations").MUTATIONS.items()
          if mutation.algorithm == "cpu_direct_bf16" and name != "tiles are not configured"]
MUTATIONS = {
    "the last pair is left out": Mutation(
        replaced(dpbf16, "PAIRS", dpbf16.PAIRS - 1), "cpu_direct_bf16",
        PADDED.replace("c5", "c48")),
    "all rows are the first": Mutation(
        replaced(dpbf16.Vectors, "load_left", one_row), "cpu_direct_bf16", PADDED),
    "all columns are the first": Mutation(
        replaced(dpbf16.Vectors, "load_right", one_column), "cpu_direct_bf16", PADDED),
    **dict(SHARED[::EVERY])}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_dpbf16")


@pytest.mark.skipif(not emulable(), reason="this machine can emulate no unit")
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])

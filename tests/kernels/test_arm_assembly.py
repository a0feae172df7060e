"""Code for Arm's rows, compiled across and read: sums stay in registers, and little stands beside.

Whether it computes the right thing is for tests/arm to say.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.emulated import TRIPLE, can_compile
from support.generated_code import kernels
from support.tiles import UNROLL, tile_module

from tilewise.core import ISA, Isa
from tilewise.kernels.cpu.emit import jit

ROWS = ("neon", "sve256", "sve512")
MATRIX = "neon_bf16"
TILES = {"neon": [(8, 2), (10, 2), (7, 3), (5, 4), (14, 1)],
         "sve256": [(14, 2), (9, 3), (6, 4), (14, 1)], "sve512": [(14, 2), (9, 3), (6, 4), (14, 1)]}
FEW = 8  # multiply-adds of a loop that is no register tile
MICROKERNEL = re.compile(r"tile|product")
# of the instructions of the loops that do most of the work; pixels lie apart and need addresses,
# and one product of bfloat16 reads as many registers as three
SHARE = {"cpu_pixels": 0.7, "cpu_direct_bf16": 0.7, "cpu_direct_bf16x3": 0.8}
LEAST = 0.75
FUNCTION = re.compile(r"\n([a-z]\w*):[^\n]*\n(.*?)\.Lfunc_end", re.S)
BRANCH = re.compile(r"\s+(?:b|b\.\w+|cbn?z|tbn?z)\s.*?(\.L\w+)$")


def loops(text: str) -> list[list[str]]:
    """Instructions of the innermost loops: from a label to a branch back to it."""
    lines, labels, found = text.splitlines(), {}, []
    for number, line in enumerate(lines):
        if line.startswith(".L") and line.endswith(":"):
            labels = {line[:-1]: number}  # of those before, the loop would not be innermost
        branch = BRANCH.match(line)
        if branch and branch[1] in labels:
            body = lines[labels[branch[1]] + 1:number + 1]
            found.append([part.strip() for part in body if re.match(r"\s+[a-z]", part)])
    return found


def multiplies(loop: list[str]) -> int:
    return sum(line.startswith(("fmla", "fmad", "bfmmla")) for line in loop)


def spills(loop: list[str]) -> list[str]:
    return [line for line in loop if re.search(r"\[(?:sp|x29)\b", line)]


def tile_loop(isa: Isa, rows: int, vectors: int) -> list[str]:
    can_compile()
    text = jit.assembly(tile_module(isa, rows, vectors, 256), TRIPLE)
    return max(loops(text), key=multiplies)


def microkernels(row: str, unit: str | None = None) -> list[tuple[str, str, list[str]]]:
    """Algorithm, function and loop of every register tile of default schedules."""
    can_compile()
    found = []
    for algorithm, p, t in kernels((row,)):
        if algorithm.unit != unit:
            continue
        text = jit.assembly(algorithm.request(p, t, algorithm.default(p, t)).module(), TRIPLE)
        found += [(algorithm.name, f"{name} of {p}", loop)
                  for name, body in FUNCTION.findall(text) if MICROKERNEL.match(name)
                  for loop in loops(body) if multiplies(loop) >= FEW]
    return found


@pytest.mark.parametrize("row", ROWS)
def test_sums_stay_in_registers(row: str) -> None:
    for rows, vectors in TILES[row]:
        loop = tile_loop(ISA[row], rows, vectors)
        assert multiplies(loop) == UNROLL * rows * vectors
        assert spills(loop) == []


@pytest.mark.parametrize("row", ROWS)
def test_no_microkernel_spills(row: str) -> None:
    found = microkernels(row)
    assert len(found) >= 40
    for name, function, loop in found:
        assert spills(loop) == [], (name, function)
    if row != "neon":
        return
    most = {name: max((loop for other, _, loop in found if other == name), key=multiplies)
            for name, _, _ in found}
    assert set(most) >= {"cpu_direct", "cpu_pointwise", "cpu_winograd", "cpu_pixels",
                         "cpu_direct_weight", "cpu_winograd_weight"}
    for name, loop in most.items():
        assert multiplies(loop) / len(loop) >= SHARE.get(name, LEAST), name


def test_products_of_bfloat16_stay_in_registers() -> None:
    found = [one for one in microkernels(MATRIX, unit="matrix")
             if any(line.startswith("bfmmla") for line in one[2])]
    assert len(found) >= 20
    for name, function, loop in found:
        assert spills(loop) == [], (name, function)
        assert not any(line.startswith(("fmla", "bfdot")) for line in loop), (name, function)
    for name in ("cpu_direct_bf16", "cpu_direct_bf16x3"):
        most = max((loop for other, _, loop in found if other == name), key=multiplies)
        assert multiplies(most) / len(most) >= SHARE[name], name


def test_plain_floats_beside_the_matrix_unit_are_those_of_neon() -> None:
    """To the instruction, so that they need not be run again."""
    can_compile()
    plain = [kernel for kernel in kernels((MATRIX,)) if kernel[0].unit is None][::4]
    assert len(plain) >= 6
    for algorithm, p, t in plain:
        s = algorithm.default(p, t.with_(isa="neon"))
        assert algorithm.default(p, t) == s
        with_unit, without = (jit.assembly(algorithm.request(p, row, s).module(), TRIPLE)
                              for row in (t, t.with_(isa="neon")))
        assert with_unit == without, f"{algorithm.name} {p}"


def test_spills_are_seen() -> None:
    """With the scheduler as LLVM has it for a generic Arm, and a load for every float."""
    eager = replace(ISA["neon"], by_element=False, attributes=())
    assert spills(tile_loop(eager, 14, 2))
    assert spills(tile_loop(ISA["neon"], 14, 2))  # too large

"""Every shipped schedule on every target, and the budgets of the defaults."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import pytest
from support.harness import LONG

import tilewise
from tilewise.core.gpu import GPUS
from tilewise.core.problem import DIRECTIONS
from tilewise.kernels.gpu.audit import main_loop, width
from tilewise.tools.gpu_audit import (
    STEPS,
    Entry,
    Row,
    as_json,
    as_markdown,
    as_text,
    audited,
    entries,
    gpu_audit,
)

# a process of its own for every core, unless pytest has several already
WORKERS = 1 if "PYTEST_XDIST_WORKER" in os.environ else None
KERNELS = (*DIRECTIONS, *STEPS)


SHARE = 10  # of other schedules than the defaults, one of so many is compiled in CI
HALVES = ("f16", "bf16")  # the same code but for a type: their defaults take turns in CI


def sampled(gpu: str) -> list[Entry]:
    """All with TILEWISE_LONG; else defaults in 32 and in 16 bits, and some others of every kind."""
    every = entries()
    others: dict[Any, list[Entry]] = {}
    for entry in every:
        if not is_needed(entry):
            others.setdefault(kind(entry), []).append(entry)
    # a kind that is one more begins one later, and so with another GPU
    chosen = [entry for number, some in enumerate(others.values())
              for entry in some[number % min(SHARE, len(some))::SHARE]]
    return [entry for entry in every if entry.gpu == gpu and (
        LONG or entry in chosen or (is_needed(entry) and entry.dtype in types(gpu)))]


def types(gpu: str) -> tuple[str, ...]:
    """Those whose defaults are compiled."""
    return ("f32", *(HALVES if LONG else HALVES[tuple(GPUS).index(gpu) % 2:][:1]))


def is_needed(entry: Entry | Row) -> bool:
    """All but weight gradients in products of parts, which the budget lets off."""
    return entry.is_default and (entry.dtype != "f32" or entry.precision == "ieee")


def kind(entry: Entry) -> tuple[str, str, str, bool]:
    return entry.kernel, entry.dtype, entry.precision, entry.is_default


def default(gpu: str, dtype: str, kernel: str = "forward", precision: str = "ieee") -> Row:
    row, = audited([entry for entry in entries([gpu], defaults_only=True)
                    if (entry.dtype, entry.kernel, entry.precision) == (dtype, kernel, precision)],
                   workers=1)
    return row


@pytest.mark.parametrize("gpu", GPUS)
def test_every_schedule_compiles_and_keeps_its_budget(gpu):
    rows = audited(sampled(gpu), WORKERS)
    broken = [f"{row}: {'; '.join(row.complaints)}" for row in rows if row.complaints]
    assert not broken, "\n".join(broken)
    defaults = [row for row in rows if is_needed(row)]
    assert {(row.kernel, row.dtype) for row in defaults} == {
        (kernel, dtype) for kernel in KERNELS for dtype in types(gpu)}
    assert {(row.load_bits, row.spills) for row in defaults} == {(128, 0)}


def test_a_sample_has_schedules_of_every_kind():
    compiled = {gpu: sampled(gpu) for gpu in GPUS}
    seen = {kind(entry) for some in compiled.values() for entry in some}
    assert seen == set(map(kind, entries()))
    for gpu, some in compiled.items():
        assert sum(not is_needed(entry) for entry in some) >= 4, gpu


def test_a_broken_budget_is_seen():
    good = default("sm_80", "f16")
    assert replace(good, spills=1).complaints == ["1 spills, needs none"]
    assert "needs 128" in replace(good, load_bits=32).complaints[0]
    assert replace(good, shared=1 << 20).complaints
    assert replace(good, products=0).complaints
    assert not replace(good, products=0, kernel="winograd_input").complaints


def test_fp16_on_hopper_can_keep_the_tensor_cores_busy():
    row = default("sm_90", "f16")
    assert row.schedule.startswith("128x128x64")
    assert row.math_cycles >= row.issue_cycles


@pytest.mark.parametrize("kernel", ["forward", "winograd_products"])
def test_fp32_on_ampere_multiplies_as_densely_as_by_hand(kernel):
    row = default("sm_80", "f32", kernel)
    assert row.products / row.loop >= 0.85
    assert row.registers <= 255
    assert row.spills == 0


def test_the_forms_agree():
    rows = [default("sm_80", "f16")] * 3
    assert len(json.loads(as_json(rows))) == 3
    assert len(as_text(rows).splitlines()) == 4
    assert len(as_markdown(rows).splitlines()) == 5
    assert "sm_80" in as_text(rows)


def test_unknown_gpus_are_refused():
    with pytest.raises(tilewise.TilewiseError, match="needs some of sm_80"):
        gpu_audit(["sm_75"])


@pytest.mark.parametrize("name, bits", [
    ("LDG.E.128.CONSTANT", 128), ("LDG.E.64", 64), ("LDG.E", 32), ("LDG.E.U16", 16),
    ("LDGSTS.E.BYPASS.128", 128), ("LDGSTS.E", 32), ("global_load_dwordx2", 64),
    ("buffer_load_dword", 32), ("global_load_ushort", 16),
])
def test_widths_of_loads(name, bits):
    assert width(name) == bits


def test_code_without_a_loop_has_none():
    assert main_loop([]) == []

"""Every shipped schedule on every target, and the budgets of the defaults."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

import tilewise
from tilewise.core.gpu import GPUS
from tilewise.core.problem import DIRECTIONS
from tilewise.frontend.gpu_audit import (
    STEPS,
    Row,
    as_json,
    as_markdown,
    as_text,
    entries,
    gpu_audit,
)
from tilewise.kernels.gpu.audit import main_loop, width


@cache
def table() -> list[Row]:
    return gpu_audit()


def defaults(**wanted: str) -> list[Row]:
    return [row for row in table() if row.is_default
            and all(getattr(row, name) == value for name, value in wanted.items())]


def test_every_schedule_compiles_for_every_target():
    assert len(table()) == len(entries())
    assert {row.gpu for row in table()} == {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert {row.kernel for row in table()} == {*DIRECTIONS, *STEPS}


def test_no_schedule_breaks_its_budget():
    broken = [f"{row}: {'; '.join(row.complaints)}" for row in table() if row.complaints]
    assert not broken, "\n".join(broken)


def test_a_broken_budget_is_seen():
    good = table()[0]
    assert replace(good, spills=1).complaints == ["1 spills, needs none"]
    assert "needs 128" in replace(good, load_bits=32).complaints[0]
    assert replace(good, shared=1 << 20).complaints
    assert replace(good, products=0).complaints


def test_defaults_load_128_bits_and_do_not_spill():
    found = [row for row in defaults() if row.dtype != "f32" or row.precision == "ieee"]
    assert len(found) == 6 * 3 * len(GPUS)  # directions and Winograd's steps, types
    assert {row.load_bits for row in found} == {128}
    assert {row.spills for row in found} == {0}


def test_fp16_on_hopper_can_keep_the_tensor_cores_busy():
    row, = (row for row in defaults(gpu="sm_90", kernel="forward", dtype="f16"))
    assert row.schedule.startswith("128x128x64")
    assert row.math_cycles >= row.issue_cycles


def test_fp32_on_ampere_multiplies_as_densely_as_by_hand():
    row, = defaults(gpu="sm_80", kernel="forward", dtype="f32", precision="ieee")
    assert row.products / row.loop >= 0.85
    assert row.registers <= 255
    assert row.spills == 0


def test_the_forms_agree():
    rows = table()[:3]
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

"""docs/adding-an-activation.md, performed in a copy of the package."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.copied import ROOT, Copy, block, page

from tilewise.core.isa import available

ROWS = [isa.name for isa in available()]
PAGE = page("adding-an-activation.md")
FILES = ("src/tilewise/core/activations.py", "src/tilewise/kernels/cpu/between/epilogue.py",
         "src/tilewise/kernels/gpu/epilogue.py")
DIFFS = {name: block(PAGE, "diff", f"In `{name}`") for name in FILES}

USE_IT = """
import json, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/kernels"]
import torch, tilewise, test_activations
from torch import nn
from torch.nn import functional as F

test_activations.STEPS, test_activations.ROWS = ("softsign",), sys.argv[2:]
test_activations.TURNS = len(test_activations.ROWS)  # every kernel, on one of the rows
rows = {row: test_activations.run_row(row)["failures"] for row in test_activations.ROWS}
x = torch.randn(1, 8, 12, 12)
model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Softsign()).eval()
with torch.no_grad():
    fast = tilewise.optimize(model, x)
    difference = float((fast(x) - model(x)).abs().max())
    (_, told), = tilewise.explain(fast, x).layers
print(json.dumps({"file": tilewise.__file__, "rows": rows, "difference": difference,
                  "step": told.problem.epilogue.activation, "after": told.plan.after}))
"""
# what is done to the row or the code, and what must notice
FAULTS = {
    "is wrong": ("kernels/cpu/between/epilogue.py", "f.vector(1.0, x.lanes) + x.absolute()",
                 "f.vector(1.001, x.lanes) + x.absolute()"),
    "has no emitter": ("kernels/cpu/between/epilogue.py", '"softsign":', '"softsgn":'),
}


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    made = Copy.into(tmp_path)
    for name, diff in DIFFS.items():
        made.patch(name, diff)
    return made


def used(copy: Copy, rows: list[str]) -> dict:
    """What it does on some rows of instructions."""
    done = copy.python("-c", USE_IT, str(ROOT / "tests"), *rows)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_it_is_one_row_and_one_function_a_backend() -> None:
    added = {name: [line for line in diff.splitlines() if line.startswith("+")]
             for name, diff in DIFFS.items()}
    assert [len(lines) for lines in added.values()] == [1, 1, 2]


@pytest.mark.slow
def test_it_is_then_fused_everywhere(copy: Copy) -> None:
    seen = used(copy, ROWS)
    assert Path(seen["file"]).is_relative_to(copy.path)
    assert len(seen["rows"]) >= 2
    assert not any(seen["rows"].values())
    assert seen["step"] == "softsign"
    assert seen["difference"] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(copy: Copy, fault: str) -> None:
    name, right, wrong = FAULTS[fault]
    file = copy.path / "tilewise" / name
    text = file.read_text(encoding="utf-8")
    assert text.count(right) == 1
    file.write_text(text.replace(right, wrong), encoding="utf-8")
    with pytest.raises(AssertionError):
        assert not any(used(copy, ROWS[-1:])["rows"].values())


def test_the_page_names_every_field() -> None:
    from dataclasses import fields

    from tilewise.core.activations import Activation

    table = set(re.findall(r"`(\w+)`", PAGE[PAGE.index("| field"):PAGE.index("## The code for C")]))
    assert {field.name for field in fields(Activation)} <= table

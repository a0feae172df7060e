"""docs/adding-an-operation.md, performed in a copy of the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.copied import Copy, block, page

PAGE = page("adding-an-operation.md")
FILES = ("src/tilewise/kernels/cpu/between/pointwise.py", "src/tilewise/model/chains.py",
         "src/tilewise/runtime/pointwise.py", "src/tilewise/model/operations.py")
DIFFS = {name: block(PAGE, "diff", f"In `{name}`") for name in FILES}

USE_IT = """
import json
import torch, tilewise
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.gate = nn.Conv2d(3, 16, 3), nn.Conv2d(8, 8, 3), nn.GLU(1)
    def forward(self, x):
        x = (self.a(x).abs() + 1) * 2
        return self.b(self.gate(x))

net, x = Net().eval(), torch.randn(2, 3, 20, 20)
model = tilewise.optimize(net)
with torch.inference_mode():
    found = [model(x) for _ in range(3)][-1]
    difference = float((found - net(x)).abs().max())
    told = tilewise.profile(model, x)
print(json.dumps({"file": tilewise.__file__, "difference": difference,
                  "steps": [line.step for line in told.lines],
                  "torch": sum(line.by == "torch" for line in told.lines)}))
"""


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    made = Copy.into(tmp_path)
    for name, diff in DIFFS.items():
        made.patch(name, diff)
    return made


def used(copy: Copy) -> dict:
    done = copy.python("-c", USE_IT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_they_are_then_steps_of_a_program(copy: Copy) -> None:
    seen = used(copy)
    assert Path(seen["file"]).is_relative_to(copy.path)
    assert "abs add mul" in seen["steps"]
    assert "gated linear unit" in seen["steps"]
    assert seen["torch"] == 0
    assert seen["difference"] < 1e-4


@pytest.mark.slow
def test_a_wrong_line_is_noticed(copy: Copy) -> None:
    file = copy.path / "tilewise" / "kernels/cpu/between/pointwise.py"
    text = file.read_text(encoding="utf-8")
    assert text.count("a.absolute()") == 1
    file.write_text(text.replace("a.absolute()", "-a"), encoding="utf-8")
    assert used(copy)["difference"] > 1e-2

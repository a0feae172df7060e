"""Machines that are not this one: Arm's code compiles, and where there is none torch computes."""

from __future__ import annotations

import subprocess
import sys

from support.generated_code import kernels
from support.harness import in_process

from tilewise.core import Problem, Schedule
from tilewise.core.isa import ISA
from tilewise.kernels.cpu.between import turn

ARM = "aarch64-unknown-linux-gnu"
NONE = """
import platform
platform.machine = lambda: "riscv64"
import torch, tilewise
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
                      nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 38 * 38, 1024)).eval()
x = torch.randn(2, 3, 40, 40)
weight = model[0].weight
assert torch.equal(tilewise.conv2d(x, weight, padding=1), F.conv2d(x, weight, padding=1))
with torch.no_grad():
    expected = model(x)
    for fast in (tilewise.optimize(model), tilewise.optimize(model, x)):
        assert torch.equal(fast(x), expected)
fast.train()(x).sum().backward()
assert model[0].weight.grad is not None
import numpy
image = numpy.random.rand(9, 12, 3).astype("f")
assert abs(tilewise.filter2d(image, numpy.ones((1, 1), "f")) - image).max() < 1e-6
assert tilewise.algorithms() == ["vendor", "reference"]
from tilewise.bench import health, machine
assert health.disturbed(machine.facts(1)) == []
assert "broken" not in [finding.state for finding in health.examine(1)]
print(tilewise.Target.host(threads=2))
print(tilewise.explain("n1c8h8w8k8r3s3p1_f32_forward"))
try:
    tilewise.Target.host("neon")
except tilewise.TilewiseError as error:
    print(error)
"""


def compiled_for_arm() -> list[str]:
    """The kernels; inline assembly that LLVM cannot read aborts the process."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(ARM).create_target_machine(
        cpu="generic", features="+neon", opt=3, reloc="pic")
    modules = {"turn": turn.make(Problem(1, 3, 1, 1, 1, 1, 1), Schedule(), ISA["neon"])}
    for algorithm, p, t in kernels(("neon",)):
        if algorithm.name not in modules:
            s = algorithm.default(p, t)
            modules[algorithm.name] = algorithm.request(p, t, s).module()
    for module in modules.values():
        module.ir.triple = ARM
        parsed = llvm.parse_assembly(str(module.ir))
        parsed.verify()
        assert machine.emit_object(parsed)[:4] == b"\x7fELF"
        assert "fpcr" in machine.emit_assembly(parsed).lower()
    return list(modules)


def test_kernels_compile_for_arm() -> None:
    found = in_process("test_machines:compiled_for_arm")
    assert {"cpu_direct", "cpu_pointwise", "cpu_winograd", "turn"} <= set(found)


def test_torch_computes_where_no_code_can_be_written() -> None:
    done = subprocess.run([sys.executable, "-c", NONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *plans, last = done.stdout.splitlines()
    assert first == "cpu:none:t2"
    assert "> vendor" in "\n".join(plans)
    assert last == "isa is 'neon', this machine has none"

"""Kernels as object files of other systems, which linkers there would have to take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
EMIT = """
import json, sys
sys.path.insert(0, sys.argv[1])
import llvmlite.binding as llvm
from support import objects
from support.generated_code import kernels
from tilewise.kernels.cpu.emit.jit import compile_object

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
row, *triples = sys.argv[2:]
chosen = {a.name: (a, p, t) for a, p, t in kernels((row,))
          if a.name in ("cpu_winograd", "cpu_direct")}
for triple in triples:
    found = []
    for a, p, t in chosen.values():
        module = a.request(p, t, a.default(p, t)).module()
        found.append(objects.read(compile_object(module, triple)))
    print(json.dumps([found[0].format, found[0].machine, len(found),
                      all(found[0].format == one.format for one in found),
                      sorted(set.intersection(*(one.defined for one in found))),
                      sorted(set.union(*(one.needed for one in found)))]))
"""
GOT = "_GLOBAL_OFFSET_TABLE_"  # of the linker itself
PROBE, FLOATS = "__chkstk", "_fltused"  # Windows has the first in every process, the other nowhere
X86 = {
    "x86_64-unknown-linux-gnu": ("elf", ["entry"], [GOT]),
    "x86_64-apple-darwin": ("macho", ["_entry"], []),
    "x86_64-pc-windows-msvc-elf": ("elf", ["entry"], [GOT, PROBE]),
    "x86_64-pc-windows-msvc": ("coff", ["entry"], [PROBE, FLOATS]),
}
ARM = {
    "aarch64-unknown-linux-gnu": ("elf", ["entry"], []),
    "arm64-apple-darwin": ("macho", ["_entry"], []),
    "aarch64-pc-windows-msvc-elf": ("elf", ["entry"], []),
    "aarch64-pc-windows-msvc": ("coff", ["entry"], []),
}


@pytest.mark.parametrize("row, machine, expected", [("avx2", "x86_64", X86),
                                                    ("neon", "aarch64", ARM)])
def test_objects_need_nothing_that_a_process_lacks(row: str, machine: str,
                                                   expected: dict[str, object]) -> None:
    """LLVM's targets are begun for a whole process, so it is one of its own."""
    done = subprocess.run([sys.executable, "-c", EMIT, str(TESTS), row, *expected],
                          capture_output=True, text=True, check=True)
    for (triple, (form, entry, needs)), line in zip(expected.items(), done.stdout.splitlines(),
                                                    strict=True):
        found = json.loads(line)
        assert found[:4] == [form, machine, 2, True], triple
        assert set(entry) <= set(found[4]), triple
        assert found[5] == needs, triple

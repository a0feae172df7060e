"""Kernels as object files of other systems, which linkers there would have to take."""

from __future__ import annotations

from typing import Any

import pytest
from support import objects
from support.generated_code import kernels
from support.harness import in_process

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


def emitted(row: str, triples: list[str]) -> list[Any]:
    """What the objects of two kernels are for each system; LLVM has all of its targets then."""
    import llvmlite.binding as llvm

    from tilewise.kernels.cpu.emit.jit import compile_object

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    chosen = {a.name: (a, p, t) for a, p, t in kernels((row,))
              if a.name in ("cpu_winograd", "cpu_direct")}
    told = []
    for triple in triples:
        first, second = [objects.read(compile_object(
            a.request(p, t, a.default(p, t)).module(), triple)) for a, p, t in chosen.values()]
        told.append([first.format, second.format, first.machine,
                     sorted(first.defined & second.defined), sorted(first.needed | second.needed)])
    return told


@pytest.mark.parametrize("row, machine, expected", [("avx2", "x86_64", X86),
                                                    ("neon", "aarch64", ARM)])
def test_objects_need_nothing_that_a_process_lacks(row: str, machine: str,
                                                   expected: dict[str, Any]) -> None:
    """LLVM's targets are begun for a whole process, so it is one of its own."""
    told = in_process("test_object_formats:emitted", row, list(expected))
    for (triple, (form, entry, needs)), found in zip(expected.items(), told, strict=True):
        assert found[:3] == [form, form, machine], triple
        assert set(entry) <= set(found[3]), triple
        assert found[4] == needs, triple

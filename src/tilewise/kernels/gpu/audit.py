"""What a compiled kernel tells of itself: registers, spills, shared memory, its main loop.

Nothing is run. NVIDIA's code is read with the disassembler that comes with Triton, AMD's as the
assembly that the compiler wrote. Cycles are those of the published limits: where the arithmetic
takes more of them than issuing the loop's instructions does, the matrix units can be kept busy.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...core.gpu import Gpu
from .launch import Launch

GRAIN = 256  # registers are given to NVIDIA's warps in so many
RESERVED = 1024  # bytes of shared memory that the system takes of every block
PRODUCTS = re.compile(r"[A-Z]*MMA|FFMA|v_mfma|v_(pk_)?fma|v_dot")
LOADS = re.compile(r"LDG(STS)?\.|UTMALDG|(global|buffer)_load")


class Instruction(NamedTuple):
    """One of the machine's, with the place it jumps to where it does."""

    place: int
    name: str
    jump: int | None


@dataclass(frozen=True)
class Report:
    """The figures of one kernel on one GPU."""

    registers: int  # a thread
    spills: int  # instructions that move registers to memory
    shared: int  # bytes a block
    occupancy: float  # warps a unit holds, of those it could
    loop: int  # instructions of the main loop; of all the code where there is none
    products: int  # of them multiply
    load_bits: int  # of the narrowest load among them; 0 where there is none
    math_cycles: float  # of a step, at the published limit
    issue_cycles: float  # of a step, to issue its instructions

    @property
    def share(self) -> float:
        """Of the main loop's instructions, those that multiply."""
        return self.products / max(1, self.loop)


def audit(launch: Launch, gpu: Gpu, cycles: float) -> Report:
    """Compile a launch and read the result; `cycles` are those in which a step multiplies.

    Without any, there is no loop to look at, and all of the code counts.
    """
    compiled = launch.compile(gpu)
    read = _nvidia if gpu.backend == "cuda" else _amd
    code, registers, spills, resident = read(compiled, launch, gpu)
    body = main_loop(code) if cycles else code
    loads = [width(i.name) for i in body if LOADS.match(i.name)]
    products = sum(bool(PRODUCTS.match(i.name)) for i in body)
    return Report(registers, spills, compiled.metadata.shared,
                  min(1.0, resident / (gpu.schedulers * gpu.most_warps)), len(body), products,
                  min(loads, default=0), cycles, len(body) * launch.warps / gpu.schedulers)


def main_loop(code: list[Instruction]) -> list[Instruction]:
    """Of all backward jumps, the body with the most products; of equals, the shortest."""
    bodies = [[i for i in code if end.jump <= i.place <= end.place]
              for end in code if end.jump is not None and end.jump < end.place]
    return max(bodies, default=[], key=lambda body: (
        sum(bool(PRODUCTS.match(i.name)) for i in body), -len(body)))


def width(name: str) -> int:
    """Bits that one load instruction moves for a thread.

    >>> width("LDGSTS.E.BYPASS.128"), width("LDG.E"), width("buffer_load_dwordx4")
    (128, 32, 128)
    """
    if name.startswith("UTMA") or name.endswith("lds"):
        return 128
    if "dword" in name:
        return 32 * int(name.partition("dwordx")[2][:1] or 1)
    for word, bits in ((".128", 128), (".64", 64), ("16", 16), ("short", 16), ("8", 8)):
        if word in name:
            return bits
    return 32


def _nvidia(compiled: Any, launch: Launch, gpu: Gpu) -> tuple[list[Instruction], int, int, int]:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, sass = (subprocess.run([str(tool), option, file.name], capture_output=True,
                                      text=True, check=True).stdout
                       for option in ("-res-usage", "-sass"))
    registers = int(_found(r"REG:(\d+)", usage))
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", sass)
    code = [Instruction(int(place, 16), name, _target(name, rest)) for place, name, rest in found]
    spills = sum(i.name.startswith("STL") for i in code)
    warps = gpu.registers // (-(-registers * gpu.warp // GRAIN) * GRAIN) * gpu.schedulers
    blocks = min(warps // launch.warps, gpu.shared // (compiled.metadata.shared + RESERVED),
                 gpu.schedulers * gpu.most_warps // launch.warps)
    return code, registers, spills, blocks * launch.warps


def _target(name: str, rest: str) -> int | None:
    jump = re.search(r"0x([0-9a-f]+)", rest) if name.startswith("BRA") else None
    return int(jump[1], 16) if jump else None


def _amd(compiled: Any, launch: Launch, gpu: Gpu) -> tuple[list[Instruction], int, int, int]:
    text = compiled.asm["amdgcn"]
    places: dict[str, int] = {}
    code: list[Instruction] = []
    for line in text.rpartition("s_endpgm")[0].splitlines():
        words = line.split(";")[0].split()
        if words and words[0].endswith(":"):
            places[words[0][:-1]] = len(code)
        elif words and words[0][0].islower():
            jump = places.get(words[-1]) if words[0].startswith(("s_cbranch", "s_branch")) else None
            code.append(Instruction(len(code), words[0], jump))
    registers = int(_found(r"\.vgpr_count:\s+(\d+)", text))
    spills = int(_found(r"\.vgpr_spill_count:\s+(\d+)", text))
    waves = int(_found(r"Occupancy:\s+(\d+)", text)) * gpu.schedulers
    blocks = min(waves // launch.warps, gpu.shared // max(1, compiled.metadata.shared))
    return code, registers, spills, blocks * launch.warps


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the compiler's output has no {pattern}")
    return match[1]

"""Objects in memory without LLVM: the same results, no write to code, and strange ones refused."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.tiles import tile_module

from tilewise.core.isa import ISA
from tilewise.core.target import Target
from tilewise.kernels.cpu.emit import jit
from tilewise.kernels.cpu.emit.compiler import Linked
from tilewise.kernels.cpu.emit.placed import Strange, laid_out, placed

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="objects for x86-64")
USES = """
import sys, torch, tilewise
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(8, 24, 3), torch.nn.GELU(), torch.nn.Conv2d(24, 8, 1))
with torch.inference_mode():
    found = tilewise.optimize(model.eval())(torch.randn(1, 8, 20, 20))
torch.save(found, sys.argv[1])
print("llvmlite.binding" in sys.modules)
"""


@pytest.fixture(scope="module")
def image() -> bytes:
    return jit.compile_object(tile_module(ISA[Target.host().isa], 4, 1, 16))


def test_code_from_the_cache_needs_no_llvm(tmp_path: Path) -> None:
    told = []
    for number in ("1.pt", "2.pt"):
        ran = subprocess.run([sys.executable, "-c", USES, str(tmp_path / number)], text=True,
                             capture_output=True, check=True, env={
                                 **os.environ, "TILEWISE_CACHE_DIR": str(tmp_path / "cache")})
        told.append(ran.stdout.strip())
    assert told == ["True", "False"]  # the first compiled
    assert torch.equal(torch.load(tmp_path / "1.pt"), torch.load(tmp_path / "2.pt"))


def test_code_cannot_be_written(image: bytes) -> None:
    home = placed(image, ("again",))
    assert home is not None
    [line] = [line for line in Path("/proc/self/maps").read_text().splitlines()
              if int(line.split("-")[0], 16) <= home.addresses["again"]
              < int(line.split("-")[1].split()[0], 16)]
    assert line.split()[1] == "r-xp"


def test_memory_goes_with_the_code(image: bytes) -> None:
    def count() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    homes = [placed(image, ("again",)) for _ in range(1)]
    before = count()
    homes += [placed(image, ("again",)) for _ in range(50)]
    assert all(homes)
    del homes[1:]
    assert count() <= before + 2


def test_bytes_are_those_of_llvm(image: bytes) -> None:
    """LLVM's linker has another distance between sections: code is compared up to addresses."""
    content, symbols = laid_out(image)
    theirs = Linked(image, ("again",), jit._lock)
    same = ctypes.string_at(theirs.addresses["again"], 16)
    assert bytes(content[symbols["again"]:symbols["again"] + 16]) == same


def test_what_is_cut_is_left_to_llvm(image: bytes) -> None:
    assert all(placed(image[:size], ("again",)) is None for size in range(0, len(image) - 64, 97))
    assert placed(image, ("other",)) is None
    arm = image[:18] + bytes([183]) + image[19:]
    assert placed(arm, ("again",)) is None
    with pytest.raises(Strange, match="not an object file for x86-64"):
        laid_out(arm)


def test_damaged_tables_do_not_reach_outside(image: bytes) -> None:
    """Any byte of the tables: refused, or laid out inside of its own memory."""
    for at in (*range(64), *range(64, len(image), 13)):  # the header byte by byte
        for value in (0, 0x7F, 0xFF):
            damaged = bytearray(image)
            damaged[at] = value
            placed(bytes(damaged), ("again",))  # raises nothing
            try:
                content, symbols = laid_out(bytes(damaged))
            except (Strange, ValueError, IndexError, struct.error, OverflowError):
                continue
            assert all(0 <= place < len(content) for place in symbols.values())


def test_relocations_of_another_kind_are_left_to_llvm(image: bytes) -> None:
    """Code that is not relocated would jump anywhere."""
    start = struct.unpack_from("<Q", image, 40)[0]
    count = struct.unpack_from("<H", image, 60)[0]
    places = [start + 64 * i + 4 for i in range(count)]
    assert any(struct.unpack_from("<I", image, at)[0] == 4 for at in places)
    for kind in (9, 0x40000014):  # SHT_REL, and the one that LLVM has since version 19
        changed = bytearray(image)
        for at in places:
            if struct.unpack_from("<I", image, at)[0] == 4:
                struct.pack_into("<I", changed, at, kind)
        assert placed(bytes(changed), ("again",)) is None

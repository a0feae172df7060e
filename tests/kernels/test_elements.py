"""Types in memory: what loads and stores make of every value, on every instruction set."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from tilewise.core.isa import ISA, Isa
from tilewise.core.target import Target
from tilewise.kernels.cpu.emit import ELEMENTS, F32, F64, Module, jit
from tilewise.kernels.cpu.emit.threads import BATCH, Frame, X, Y

HOST = Target.host(threads=1)
ROWS = [name for name, row in ISA.items() if row.lanes <= HOST.lanes
        and HOST.row.machines == row.machines and not row.matrix]
TORCH = {"u8": torch.uint8, "u16": torch.uint16, "i16": torch.int16, "i32": torch.int32,
         "f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
NEEDS_FMA = ("f16",)  # other rows convert it by functions that are not there


def of_row(row: str) -> list[str]:
    return [name for name in TORCH if ISA[row].fma or name not in NEEDS_FMA]


HALVES = [(name, row) for row in ROWS for name in of_row(row) if name in ("f16", "bf16")]


def copied(source: str, target: str, row: str, x: torch.Tensor) -> torch.Tensor:
    """x, loaded as one type and stored as another; the tail in part of a vector."""
    work = F64 if "f64" in (source, target) or "i32" in (source, target) else F32

    def make(isa: Isa) -> Module:
        module = Module(isa)
        with module.function("entry", exported=True, frame="pointer") as f:
            here = f.frame.load_pointer(X, ELEMENTS[source])
            there = f.frame.load_pointer(Y, ELEMENTS[target])
            count = f.frame.load_index(BATCH)
            whole = count // isa.lanes * isa.lanes
            with f.loop(whole, step=isa.lanes) as at:
                there.store(here.load(at.i, work=work), at.i)
            rest = count - whole
            there.store(here.load(whole, count=rest, work=work), whole, count=rest)
        return module

    code = jit.load(make, f"test of {source} to {target}", ISA[row], "entry")
    y = torch.zeros(len(x) + 8, dtype=TORCH[target])
    frame = Frame(x.data_ptr(), 0, 0, 0, y.data_ptr(), 0, len(x))
    code.function("entry", ctypes.c_void_p)(ctypes.addressof(frame))
    assert not y[len(x):].any()  # nothing is written behind the end
    return y[:len(x)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("name, row", HALVES)
def test_every_half_is_read_and_written_back(name: str, row: str) -> None:
    every = torch.arange(-32768, 32767, dtype=torch.int16)
    x = every.view(TORCH[name])
    assert same(copied(name, "f32", row, x), x.float())
    assert same(copied(name, name, row, x), x)


@pytest.mark.parametrize("name, row", HALVES)
def test_floats_are_rounded_as_torch_rounds_them(name: str, row: str) -> None:
    bits = np.arange(0, 2 ** 32, 9_973, dtype=np.uint64).astype(np.uint32)
    ties = np.arange(0, 2 ** 32, 1 << 12, dtype=np.uint64).astype(np.uint32)  # halfway between two
    x = torch.from_numpy(np.concatenate([bits, ties]).view(np.float32).copy())[:-3]
    assert same(copied("f32", name, row, x).float(), x.to(TORCH[name]).float())


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", ["u8", "u16", "i16", "i32"])
def test_integers_are_rounded_to_even_and_saturate(name: str, row: str) -> None:
    info = torch.iinfo(TORCH[name])
    near = torch.arange(-40, 41, dtype=torch.float64) / 4
    x = torch.cat([near, near + float(info.max), near + float(info.min), near * 1e12])
    want = torch.from_numpy(np.clip(np.rint(x.numpy()), info.min, info.max))
    assert torch.equal(copied("f64", name, row, x).double(), want)


@pytest.mark.parametrize("row", ROWS)
def test_offsets_count_elements(row: str) -> None:
    for name in of_row(row):
        x = torch.arange(3 * ISA[row].lanes + 1).to(TORCH[name])
        assert torch.equal(copied(name, name, row, x), x), name

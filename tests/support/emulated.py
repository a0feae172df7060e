"""Kernels of Arm's rows on this machine: compiled across, run under qemu, between unmapped pages.

The harness and its judgement are those of kernels that run here. Only a kernel's entry differs:
it sends the guarded buffers of a call to a driver in C (emulator.c), and brings back what the
kernel left in them. Kernels whose buffers are not guarded, such as those that prepare weights,
run here, by a row of this machine that is as wide. Weights for a matrix unit are prepared there.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import llvmlite.binding as llvm
import torch

from tilewise.bench.guarded import ARENA, PAGE, Buffer, Mismatch, launch_guarded
from tilewise.core import ISA, Isa, Problem, Schedule, Target
from tilewise.core.isa import available
from tilewise.core.platforms.linux import arm_flags
from tilewise.kernels.cpu.emit import jit, launch
from tilewise.kernels.cpu.emit.requests import Request
from tilewise.kernels.cpu.emit.threads import (
    BIAS,
    MASK,
    PARALLEL,
    RESIDUAL,
    SCRATCH,
    WEIGHT,
    Frame,
    X,
    Y,
)
from tilewise.kernels.cpu.prepare import direct_matrix

from . import harness

TRIPLE = "aarch64-unknown-linux-gnu"
PACKAGES = ("qemu-user-static", "gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross",
            "libgomp1-arm64-cross")
TOOLS = ("qemu-aarch64-static", "aarch64-linux-gnu-gcc", "aarch64-linux-gnu-ld")
LIBRARIES = "/usr/aarch64-linux-gnu"
ADDRESSES = (X, WEIGHT, BIAS, RESIDUAL, Y, SCRATCH, MASK)


@dataclass(frozen=True)
class Machine:
    """An Arm machine as qemu plays it, and the row that it must choose."""

    name: str
    row: str
    cpu: str  # qemu's words


MACHINES = {machine.name: machine for machine in (
    Machine("generic", "neon", "cortex-a53"),  # the first 64-bit Arm, without any extension
    Machine("neon", "neon", "neoverse-n1"),
    # SVE of 128 bits, as Neoverse N2 and V2 have it, and products of bfloat16
    Machine("bf16", "neon_bf16", "max,sve-default-vector-length=16"),
    Machine("sve256", "sve256", "max,sve-default-vector-length=32"),
    Machine("sve512", "sve512", "max,sve-default-vector-length=64"),
)}


def missing() -> list[str]:
    """Tools that this machine lacks."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def can_compile() -> None:
    """Every target of LLVM, from now on, in this process."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


class Workshop:
    """A directory with the driver and kernels, compiled and linked."""

    def __init__(self, place: Path) -> None:
        self._place, self._serial = place, itertools.count()
        can_compile()
        self.driver = place / "emulator"
        subprocess.run(["aarch64-linux-gnu-gcc", "-O2", "-Wall", "-Wextra", "-fopenmp",
                        str(Path(__file__).with_name("emulator.c")), "-o", str(self.driver),
                        "-ldl"], check=True)

    def shared_object(self, request: Request) -> Path:
        place = self._place / f"kernel{next(self._serial)}"
        image, library = place.with_suffix(".o"), place.with_suffix(".so")
        image.write_bytes(jit.compile_object(request.module(), TRIPLE))
        subprocess.run(["aarch64-linux-gnu-ld", "-shared", "-o", str(library), str(image)],
                       check=True)
        image.unlink()
        return library


class Emulator:
    """A machine that runs kernels; one that ended is started again."""

    def __init__(self, machine: Machine, workshop: Workshop) -> None:
        self.machine, self.workshop, self.calls = machine, workshop, 0
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, path: Path, frame: Any, buffers: list[Buffer]) -> None:
        """Call a kernel; what it left in the buffers' regions is then here."""
        regions = [buffer.region for buffer in buffers]
        starts = [region.floats.data_ptr() for region in regions]
        pointers = [(word, i, value - start) for word, value in enumerate(frame)
                    for i, start in enumerate(starts)
                    if 0 <= value - start <= regions[i].pages * PAGE]
        alone = frame[PARALLEL] == harness.LAST_WORKER
        name = str(path).encode()
        parts = [struct.pack("4q", len(name), len(regions), len(pointers), alone), name,
                 bytes(frame)]
        for region in regions:
            parts += [struct.pack("q", region.pages), region.bytes.numpy().tobytes()]
        parts += [struct.pack("3q", *pointer) for pointer in pointers]
        self._write(b"".join(parts))
        before, after = struct.unpack("2Q", self._read(16))
        ctypes.memmove(frame, self._read(ctypes.sizeof(frame)), ctypes.sizeof(frame))
        for region in regions:
            left = self._read(region.pages * PAGE)
            region.bytes.copy_(torch.frombuffer(bytearray(left), dtype=torch.uint8))
        self.calls += 1
        if before != after:
            raise Mismatch(f"FPCR was {before:#x} and became {after:#x}")

    def _write(self, data: bytes) -> None:
        if self._process is None:
            self._process = self._started()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            self._ended()

    def _read(self, count: int) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        found = self._process.stdout.read(count)
        if len(found) < count:
            self._ended()
        return found

    def _started(self) -> subprocess.Popen[bytes]:
        command = ["qemu-aarch64-static", "-L", LIBRARIES, "-cpu", self.machine.cpu,
                   str(self.workshop.driver)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.DEVNULL,
                                         env={"OMP_WAIT_POLICY": "passive"})
        *words, length, page = struct.unpack("4Q", self._read(32))
        rows = available("aarch64", arm_flags(tuple(words), length))
        assert (rows[0].name, page) == (self.machine.row, PAGE)
        return self._process

    def _ended(self) -> None:
        assert self._process is not None
        code, self._process = self._process.wait(), None
        what = signal.Signals(-code).name if code < 0 else f"code {code}"
        raise Mismatch(f"the emulator ended with {what}")

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None


def as_wide(isa: Isa) -> Isa:
    """A row of this machine with as many lanes: LLVM splits vectors that are too long."""
    here = [row for row in available() if row.lanes == isa.lanes and not row.matrix]
    return here[0] if here else replace(ISA["generic"], lanes=isa.lanes)


class Entry:
    """A kernel's entry: there if all of its buffers are guarded, else here."""

    def __init__(self, request: Request, emulator: Emulator) -> None:
        self._request, self._emulator = request, emulator
        self._path: Path | None = None
        self._here: Any = None

    def __call__(self, address: int) -> None:
        frame = Frame.from_address(address)
        buffers = [ARENA.around(frame[word]) for word in ADDRESSES if frame[word]]
        if None in buffers:
            self._here = self._here or _loaded(
                self._request._replace(isa=as_wide(self._request.isa)))
            self._here(address)
            return
        self._path = self._path or self._emulator.workshop.shared_object(
            self._request)
        self._emulator.run(self._path, frame, list(dict.fromkeys(buffers)))


def prepare_guarded(p: Problem, s: Schedule, t: Target, weight: torch.Tensor,
                    products: int) -> torch.Tensor:
    """As `direct_matrix.prepare`, with buffers that can be sent."""
    key = (p, s, t.isa, products, weight.numpy().tobytes())
    if key not in _PREPARED:  # batches of a shape share it
        _PREPARED.clear()
        _PREPARED[key] = _prepare(p, s, t, weight, products)
    return _PREPARED[key]


def _prepare(p: Problem, s: Schedule, t: Target, weight: torch.Tensor,
             products: int) -> torch.Tensor:
    assert t.row.matrix is not None
    geometry = direct_matrix.Geometry(p, s, t.lanes, products, t.row.matrix)
    values = weight.as_strided((weight.numel(),), (1,), 0)
    return launch_guarded(direct_matrix.launch_for(geometry, t.row),
                          {"x": torch.tensor(weight.stride()), "weight": values},
                          {"y": geometry.weight_floats}, 1, t.threads, "end")["y"]


_PREPARED: dict[Any, torch.Tensor] = {}
_loaded = launch._loaded  # as it is without emulation


_host = Target.host


@contextmanager
def emulated(name: str) -> Iterator[Emulator]:
    """A context where this machine has the row of another, whose kernels run there."""
    machine = MACHINES[name]
    with tempfile.TemporaryDirectory(prefix="tilewise-arm-") as place:
        emulator = Emulator(machine, Workshop(Path(place)))
        with _in_place_of_this(emulator, machine.row):
            yield emulator


@contextmanager
def _in_place_of_this(emulator: Emulator, row: str) -> Iterator[None]:
    def load(request: Request) -> Any:
        return Entry(request, emulator) if request.isa.name == row else _loaded(request)

    def host(isa: str | None = None, threads: int | None = None) -> Target:
        asked = isa or os.environ.get("TILEWISE_ISA")
        return Target("cpu", row, threads or harness.THREADS) if asked == row else _host(
            isa, threads)

    launch.KERNELS.clear()  # it may have entries of another machine
    with (mock.patch.object(launch, "_loaded", load), mock.patch.object(Target, "host", host),
          mock.patch.object(direct_matrix, "prepare", prepare_guarded)):
        try:
            yield
        finally:
            launch.KERNELS.clear()
            emulator.close()


def run(name: str, function: str, *args: Any) -> dict[str, Any]:
    """What `module:function` of the tests gives where this machine is another.

    With the largest share of a declared bound that an error had, and the calls of kernels there.
    """
    module, called = function.split(":")
    judge, shares = harness.compare, [0.0]

    def compare(*what: Any) -> None:
        shares.append(judge(*what))

    with emulated(name) as emulator, mock.patch.object(harness, "compare", compare):
        result = getattr(import_module(module), called)(*args)
        return {**result, "worst": max(shares), "calls": emulator.calls}

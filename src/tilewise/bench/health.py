"""Whether what tilewise relies on works here; each finding says what to do."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from ..conv.ops import conv2d
from ..core.cores import cores, quota, visible
from ..core.files import cache_directory, is_private
from ..core.isa import KNOWN
from ..core.platforms import HERE
from ..core.progress import Tell, silent
from ..core.target import Target
from ..model.dynamo import has_compiler
from ..planner.families import Family, family_path
from ..planner.wisdom import Wisdom, default_path
from .run import rms_error

SLOWEST = 0.5e9  # Hz: below any clock that one of two units, or half a core, stands for


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    state: str  # ok, missing or broken
    what: str
    advice: str = ""


def examine(threads: int, tell: Tell = silent) -> list[Finding]:
    """All findings."""
    code = (_generated_code, _denormals) if KNOWN else (_no_code,)
    emulated = [_emulated] if Target.host().row.emulated else []
    checks: list[Callable[[], Finding]] = [
        *code, *emulated, _system, lambda: _threads(threads), _cache, _wisdom, _family,
        _huge_pages, _compiler, _triton, _peers]
    findings = []
    for i, check in enumerate(checks):
        tell("examining", i, len(checks))
        findings.append(check())
    return findings


def disturbed(machine: dict[str, Any]) -> list[Finding]:
    """Whether the measured peak is one that only a busy machine has; empty means no."""
    row = Target("cpu", machine["isa"], machine["threads"]).row
    least = 2.0 * row.lanes * row.units * machine["threads"] * SLOWEST
    if machine["peak"] >= least:
        return []
    return [Finding("missing", f"the peak is {machine['peak'] / 1e9:.0f} GFLOP/s, and "
                    f"{row.name} has {least / 1e9:.0f} or more on {machine['threads']} threads: "
                    "the machine is busy", "close other programs, and repeat")]


def _no_code() -> Finding:
    return Finding("missing", f"no code can be written for {platform.machine()}: torch computes "
                   "everything", "needs x86-64 or 64-bit Arm")


def _emulated() -> Finding:
    return Finding("missing", f"instructions are {Target.host().isa}: functions stand for those "
                   "that this processor lacks, and no times are taken",
                   "for tests alone; unset TILEWISE_ISA")


@torch.no_grad()
def _generated_code() -> Finding:
    x = torch.randn(1, 16, 12, 12).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(16, 16, 3, 3)
    exact = F.conv2d(x.double(), weight.double(), padding=1)
    for algorithm in ("cpu_direct", "cpu_winograd"):
        error = rms_error(conv2d(x, weight, padding=1, algorithm=algorithm), exact)
        if not error < 5e-6:
            return Finding("broken", f"{algorithm} computes wrong results: rms error {error:.1e}",
                           "please report it, with the output of tilewise doctor --json")
    return Finding("ok", "generated code computes what it should")


@torch.no_grad()
def _denormals() -> Finding:
    x = torch.full((1, 16, 12, 12), 1e-40).contiguous(memory_format=torch.channels_last)
    y = conv2d(x, torch.ones(16, 16, 3, 3), padding=1, algorithm="cpu_direct")
    if bool((y != 0).any()):
        return Finding("broken", "denormal numbers reach the arithmetic, which is then very slow",
                       "please report it, with the output of tilewise doctor --json")
    after = torch.full((8,), 1e-40) * 1.0
    kept = "torch keeps them" if bool((after != 0).all()) else "torch flushes them as well"
    return Finding("ok", f"denormal numbers count as zero in generated code; {kept}")


def _system() -> Finding:
    """Whether anybody has tried this operating system, and what it lacks."""
    if HERE.is_tested:
        return Finding("ok", f"{HERE.name} is what tilewise is developed on")
    known = "; ".join([f"{HERE.name} is untested", *HERE.lacks(platform.machine())])
    return Finding("missing", known, "run tilewise doctor --selftest, and report its line")


def _threads(threads: int) -> Finding:
    from ..kernels.cpu.emit.threads import uses_openmp

    if not uses_openmp():
        return Finding("missing", "torch's OpenMP library was not found: Python threads are used",
                       "correct but slower; use a torch built with libgomp")
    most, bound = cores(), quota()
    found = f"{most} cores to run on"
    if bound < visible():
        found += f" (a quota gives the time of {bound:.3g} of {visible()})"
    if threads > most:
        return Finding("broken", f"{threads} threads, {found}",
                       f"torch.set_num_threads({most}), or OMP_NUM_THREADS={most}")
    return Finding("ok", f"{threads} threads by torch's OpenMP, {found}")


def _cache() -> Finding:
    place = cache_directory()
    if not place.exists():
        return Finding("ok", f"compiled code will be kept in {place}")
    if not os.access(place, os.W_OK):
        return Finding("missing", f"{place} cannot be written: code is compiled in every process",
                       "set TILEWISE_CACHE_DIR to a directory of your own")
    objects = [file for file in place.iterdir() if file.is_file()]
    if any(not is_private(file) for file in objects):
        return Finding("missing", f"{place} can be written by others: its files are ignored",
                       f"chmod -R go-w {place}")
    used = sum(file.stat().st_size for file in objects) / 1e6
    return Finding("ok", f"{len(objects)} files, {used:.1f} MB in {place}")


def _wisdom() -> Finding:
    found, place = Wisdom(), default_path()
    count = found.load(place) if place.exists() else 0
    if not count:
        return Finding("missing", "no wisdom: layers are planned by estimate",
                       "tilewise tune MODEL measures them once")
    return Finding("ok", f"{count} plans in {place}")


def _family() -> Finding:
    path = family_path()
    if path is None:
        return Finding("ok", "the processor's family is not known: none has plans in the package")
    known = Family(path)
    known.read_once()
    if not known.entries:
        return Finding("ok", f"no plans for {path.stem} come with the package: estimates serve it")
    return Finding("ok", f"{len(known.entries)} plans for {path.stem} come with the package")


def _huge_pages() -> Finding:
    state = HERE.huge_pages()
    if state in ("always", "madvise"):
        return Finding("ok", f"huge pages: {state}")
    return Finding("missing", f"huge pages: {state}; large outputs cost page faults",
                   HERE.huge_pages_advice)


def _compiler() -> Finding:
    if has_compiler():
        return Finding("ok", "a C++ compiler, for torch.compile and its place in benchmarks")
    return Finding("missing", "no C++ compiler: torch.compile cannot use Inductor",
                   "not needed by tilewise; apt-get install g++")


def _triton() -> Finding:
    if importlib.util.find_spec("triton") is None:
        return Finding("missing", "triton, for GPUs", "pip install 'tilewise[gpu]'")
    return Finding("ok", "triton is installed")


def _peers() -> Finding:
    from .peers import PEERS

    packages = {package for needed, _ in PEERS.values() for package in needed}
    lacking = sorted(name for name in packages if importlib.util.find_spec(name) is None)
    if lacking:
        return Finding("missing", f"peers for tilewise bench: {', '.join(lacking)}",
                       "pip install 'tilewise[bench]'")
    return Finding("ok", f"peers for tilewise bench: {', '.join(sorted(packages))}")

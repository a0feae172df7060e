"""Facts of the machine that a figure depends on, and its measured limits."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ..core.platforms import HERE
from ..core.progress import Tell, counting, silent
from ..core.target import Target, learn
from ..kernels.cpu import peak
from ..kernels.cpu.emit.compiler import VERSION as LLVM_VERSION
from ..planner.measure import interleaved

COPIED = 64 << 20  # floats of a copy that no cache holds, at most
ROUNDS = 25
PRODUCT = 512  # rows of a matrix


def facts(threads: int, limits: bool = True, tell: Tell = silent) -> dict[str, Any]:
    """Everything that a figure should be read with; `limits` measures, for about a second."""
    t = Target.host(threads=threads)
    found = {"processor": HERE.processor(), "system": f"{platform.system()} {platform.machine()}",
             "cores": os.cpu_count(), "threads": threads, "isa": t.isa, "lanes": t.lanes,
             "registers": t.registers, "l1": t.l1, "l2": t.l2, "l3": t.l3,
             "huge_pages": HERE.huge_pages(), "versions": versions()}
    return {**found, **(measured_limits(threads, tell) if limits else {})}


def learn_limits(machine: dict[str, Any]) -> bool:
    """Estimates count on what was measured, in this process and in those after it."""
    t = Target.host(machine["isa"], machine["threads"])
    return learn(t, machine["peak"], machine["bandwidth"])


def best_limits(machine: dict[str, Any]) -> dict[str, Any]:
    """The facts with limits measured once more: of two moments, the quieter one counts."""
    again = measured_limits(machine["threads"])
    return {**machine, **{name: max(machine[name], value) for name, value in again.items()}}


def measured_limits(threads: int, tell: Tell = silent) -> dict[str, float]:
    """Multiply-adds on registers and a large copy: operations and bytes a second."""
    t = Target.host(threads=threads)
    multiply_add, operations = peak.runner(t.isa, threads) if t.row.is_written else _product()
    source = torch.ones(min(COPIED, max(t.l3, 32 << 20) // 4))
    sink = torch.empty_like(source)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        top, copy = interleaved([multiply_add, lambda: sink.copy_(source)], rounds=ROUNDS,
                                sample=0.02, budget=3,
                                tick=counting(tell, "measuring the machine's limits", 2 * ROUNDS))
    finally:
        torch.set_num_threads(before)
    return {"peak": operations / top.minimum,
            "bandwidth": 2.0 * source.numel() * 4 / copy.minimum}


def _product() -> tuple[Callable[[], object], float]:
    """torch's product of matrices, and its operations: the limit where no code is written."""
    a, b = torch.ones(PRODUCT, PRODUCT), torch.ones(PRODUCT, PRODUCT)
    return lambda: torch.mm(a, b), 2.0 * PRODUCT ** 3


def versions() -> dict[str, str]:
    """Of what computes."""
    found = {"python": platform.python_version(), "torch": torch.__version__,
             "llvm": LLVM_VERSION}
    for name in ("tilewise", "llvmlite", "numpy", "triton", "openvino", "onnxruntime", "ncnn",
                 "MNN"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

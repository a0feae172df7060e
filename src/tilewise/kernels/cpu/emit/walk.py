"""One native call that runs a list of kernels, each with its own frame."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from llvmlite import ir

from ....core.isa import ISA, Isa
from ....core.target import Target
from . import jit
from .function import Module
from .threads import BATCH, Frame, X, Y
from .values import I64, PTR, VOID

BYTES = ctypes.sizeof(Frame)  # of one frame


def _module(isa: Isa) -> Module:
    """walk(frame): X has the addresses of the kernels, Y their frames behind each other."""
    module = Module(isa)
    kinds: Any = {"exported": True, "frame": "pointer"}
    with module.function("walk", **kinds) as f:
        entries, frames = f.frame.load_pointer(X), f.frame.load_pointer(Y)
        with f.loop(f.frame.load_index(BATCH)) as step:
            entry = f.ll.load(entries.bytes(step.i * 8).ir, align=8, typ=I64)
            kernel = f.ll.inttoptr(entry, ir.FunctionType(VOID, [PTR]).as_pointer())
            f.ll.call(kernel, [frames.bytes(step.i * BYTES).ir])
    return module


@lru_cache(maxsize=1)
def _walk() -> Any:
    code = jit.load(_module, "walk", ISA[Target.host().isa], "walk")
    return code.function("walk", ctypes.c_void_p)


def walk(entries: int, frames: int, count: int) -> None:
    """Run so many kernels; both are addresses."""
    call = Frame(entries, 0, 0, 0, frames, 0, count)
    _walk()(ctypes.addressof(call))

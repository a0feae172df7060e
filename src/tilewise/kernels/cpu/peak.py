"""What the chip can do at most: a loop of multiply-adds on registers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch

from ...core.isa import ISA, Isa
from ..matrix import DEPTH, SIDE
from .emit import Module, amx, jit
from .emit.threads import (
    PARALLEL,
    THREADS,
    Frame,
    X,
    emit_entry,
    emit_region,
    parallel_address,
    run_entry,
)

TURNS = 20_000


def _module(isa: Isa) -> Module:
    module = Module(isa)
    chains = isa.registers - 4
    with module.function("body", frame="pointer", task="index", worker="index") as f:
        # operands the compiler cannot know, so that nothing is folded away
        x = f.frame.broadcast()
        with f.loop(TURNS, carry=[f.vector(0.0)] * chains) as loop:
            for _ in range(4):
                loop.values = [f.fma(x, x, value) for value in loop.values]
        total = loop.values[0]
        for value in loop.values[1:]:
            total = total + value
        (f.frame + 30).store(total, count=1)  # past the words in use
    tasks = emit_region(module, "region", lambda f, frame: frame.load_index(THREADS), f)
    emit_entry(module, [tasks])
    return module


def _tile_module(isa: Isa) -> Module:
    module = Module(isa)
    with module.function("body", frame="pointer", task="index", worker="index") as f:
        amx.only_multiply(f, f.frame.load_pointer(X), TURNS)
    tasks = emit_region(module, "region", lambda f, frame: frame.load_index(THREADS), f,
                        tiles=True)
    emit_entry(module, [tasks])
    return module


@lru_cache(maxsize=8)
def tile_runner(threads: int) -> tuple[Callable[[], None], float]:
    """The same for the matrix unit: products of bfloat16."""
    entry = jit.load(_tile_module, "tile peak", ISA["amx"], "entry").function(
        "entry", ctypes.c_void_p)
    frame, data = Frame(), torch.randn(8 * amx.TILE).bfloat16()
    frame[THREADS], frame[PARALLEL], frame[X] = threads, parallel_address(), data.data_ptr()
    operations = 2.0 * SIDE ** 2 * DEPTH * TURNS * amx.MOST ** 2 * threads

    def run(keep: torch.Tensor = data) -> None:
        run_entry(entry, frame)

    return run, operations


@lru_cache(maxsize=8)
def runner(isa: str, threads: int) -> tuple[Callable[[], None], float]:
    """A function that multiplies and adds on every thread, and how many operations it does."""
    row = ISA[isa]
    entry = jit.load(_module, "peak", row, "entry").function("entry", ctypes.c_void_p)
    frame = Frame()
    frame[THREADS], frame[PARALLEL] = threads, parallel_address()
    operations = 2.0 * row.lanes * TURNS * 4 * (row.registers - 4) * threads
    return (lambda: run_entry(entry, frame)), operations

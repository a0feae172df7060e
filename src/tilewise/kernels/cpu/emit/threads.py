"""Parallel regions on the OpenMP runtime that torch has already loaded.

Generated code calls a function with GOMP_parallel's signature whose address stands in the call
frame: libgomp's own, or a pool of Python threads where libgomp is missing or was lost in a fork.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from llvmlite import ir

from ....core.apart import apart
from ....core.isa import ISA
from ....core.platforms import HERE
from .checks import FRAME
from .function import Function, Module
from .pointers import Pointer
from .units import unit_of
from .values import I32, I64, PTR, VOID, Index

# words of the frame that every kernel is called with
(X, WEIGHT, BIAS, RESIDUAL, Y, SCRATCH, BATCH, THREADS, PARALLEL, TASK, WORKER, CHUNK,
 MASK, FOUND) = range(14)  # FOUND: a kernel saw a result that is not finite; CHECKS is behind it
SIZES = 16  # the first of the words that a kernel names itself
Frame = ctypes.c_int64 * FRAME
FLUSH_AND_ZERO = 0x8040  # MXCSR: denormal results and denormal operands count as zero
FLUSH_ARM = 1 << 24  # FPCR: the same

_REGION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)

Tasks = Callable[[Function, Pointer], "Index | int"]


def emit_region(module: Module, name: str, tasks: Tasks, body: Function,
                tiles: bool = False, flush: bool = True) -> Function:
    """A worker that takes tasks until none is left: body(frame, task, worker).

    With `tiles`, it holds the matrix unit's meanwhile. Without `flush`, denormals count.
    """
    with module.function(name, frame="pointer") as f:
        worker = f.frame.fetch_add(WORKER)
        total = f.index(tasks(f, f.frame))
        control = _read_control(f) if flush else None
        if control is not None:
            _write_control(f, f.ll.or_(control, ir.Constant(control.type, _flush_bits(f))))
        if tiles:
            unit_of(f).configure(f)
        with f.repeat(lambda task: task < total, [f.frame.fetch_add(TASK)]) as turn:
            f.call(body, f.frame, turn.i, worker)
            turn.values = [f.frame.fetch_add(TASK)]
        if tiles:
            unit_of(f).release(f)
        if control is not None:
            _write_control(f, control)
    return f


def emit_entry(module: Module, regions: Sequence[Function],
               chunks: Tasks = lambda f, frame: 1) -> Function:
    """entry(frame): for each chunk of the work, the regions in turn, each on all threads."""
    kinds: Any = {"exported": True, "frame": "pointer"}
    with module.function("entry", **kinds) as f, f.loop(chunks(f, f.frame)) as chunk:
        f.frame.store_index(CHUNK, chunk.i)
        for region in regions:
            f.frame.store_index(TASK, 0)
            f.frame.store_index(WORKER, 0)
            with f.either(f.frame.load_index(THREADS) < 2) as (alone, together):
                with alone:
                    f.call(region, f.frame)
                with together:
                    _emit_parallel(f, region)
    return f


def _emit_parallel(f: Function, region: Function) -> None:
    kind = ir.FunctionType(VOID, [region.ir.type, PTR, I32, I32])
    parallel = f.ll.inttoptr(f.frame.load_index(PARALLEL).ir, kind.as_pointer())
    threads = f.ll.trunc(f.frame.load_index(THREADS).ir, I32)
    f.ll.call(parallel, [region.ir, f.frame.ir, threads, ir.Constant(I32, 0)])


def _is_x86(f: Function) -> bool:
    return "x86_64" in f.isa.machines


def _flush_bits(f: Function) -> int:
    return FLUSH_AND_ZERO if _is_x86(f) else FLUSH_ARM


def _read_control(f: Function) -> Any:
    """The floating-point control register."""
    if _is_x86(f):
        slot = f.slot()
        f.ll.call(f.intrinsic("llvm.x86.sse.stmxcsr", VOID, [PTR]), [slot])
        return f.ll.load(slot, typ=I32)
    return f.ll.call(f.intrinsic("llvm.aarch64.get.fpcr", I64, []), [])


def _write_control(f: Function, value: Any) -> None:
    if _is_x86(f):
        slot = f.slot()
        f.ll.store(value, slot)
        f.ll.call(f.intrinsic("llvm.x86.sse.ldmxcsr", VOID, [PTR]), [slot])
        return
    f.ll.call(f.intrinsic("llvm.aarch64.set.fpcr", VOID, [I64]), [value])


class _Runtime:
    """Which function starts a parallel region in this process."""

    def __init__(self) -> None:
        self.pool = _PARALLEL(_run_on_python_threads)  # keeps the callback alive
        self.address, self.forked = 0, False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.after_fork)

    def start(self) -> int:
        """The address; libgomp is looked for at the first call, when torch is there."""
        if not self.address:
            self.address = _address(_openmp_of_torch() or self.pool)
        return self.address

    def after_fork(self) -> None:
        # libgomp's threads did not survive the fork, and it would wait for them for ever
        self.forked = True
        self.address = _address(self.pool)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _openmp_of_torch() -> Any:
    """GOMP_parallel as torch's calls reach it; other packages bring libraries of their own."""
    import torch

    libraries = Path(torch.__file__).parent / "lib"
    own = [str(libraries / name) for name in HERE.openmp]
    # the loader's order: what all share, then torch's own
    for library in (None, *own) if HERE.can_start_openmp else ():
        with suppress(OSError, AttributeError):
            return ctypes.CDLL(library).GOMP_parallel
    return None


def _run_on_python_threads(region: int, frame: int, threads: int, _flags: int) -> None:
    run = _REGION(region)  # releases the interpreter lock while it runs
    helpers = []
    with suppress(RuntimeError):  # no more threads to be had: those that run take all tasks
        for _ in range(threads - 1):
            helper = threading.Thread(target=run, args=(frame,))
            helper.start()
            helpers.append(helper)
    run(frame)
    for helper in helpers:
        helper.join()


_RUNTIME = _Runtime()  # made at import: a fork may come before the first call
_POOL = _address(_RUNTIME.pool)


def parallel_address() -> int:
    """Address of the function that starts a parallel region."""
    return _RUNTIME.start()


def run_entry(entry: Callable[[int], None], frame: Any) -> None:
    """Call a kernel; its frame says on how many threads."""
    address = ctypes.addressof(frame)
    if frame[PARALLEL] == _POOL and frame[THREADS] > 1:
        # an interrupt would be lost in the callback from C, and with it a part of the work
        apart(lambda: entry(address))
    else:
        entry(address)


def is_forked() -> bool:
    """Whether this process has lost threads that torch had."""
    return _RUNTIME.forked


def alone_after_fork() -> AbstractContextManager[None]:
    """torch's own operators on this thread, where those that it had did not survive a fork."""
    return alone() if _RUNTIME.forked else nullcontext()


@contextmanager
def alone() -> Iterator[None]:
    """torch's own operators on this thread, also those that keep a number of threads."""
    with one_thread(), _without_onednn() if _is_arm() else nullcontext():
        yield


def _is_arm() -> bool:
    return platform.machine() in ISA["neon"].machines


@contextmanager
def _without_onednn() -> Iterator[None]:
    """On Arm, oneDNN's library keeps the number of threads with which it was first called."""
    import torch

    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """torch's own operators on this thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def uses_openmp() -> bool:
    """Whether that function is torch's libgomp."""
    return parallel_address() != _POOL

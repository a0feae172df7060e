"""LLVM itself: IR to object files, and its linker. Imported when something is to be compiled."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections import deque
from functools import lru_cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite.binding.ffi import ObjectRef
from llvmlite.binding.newpassmanagers import NewPassManager

from ....core.isa import Isa
from ....core.platforms import HERE
from .function import Module

LIBRARIES = 16  # of one linker: LLVM keeps 9 KB of a library that was freed until its linker goes
VERSION = ".".join(map(str, llvm.llvm_version_info))
_dead: deque[int] = deque()  # trackers of code that is to be freed
_serial = itertools.count()


class Linked:
    """Code that LLVM linked; the memory is freed with the object, under the lock of LLVM."""

    def __init__(self, image: bytes, names: tuple[str, ...], lock: Any) -> None:
        bury()
        tracker = _link(image, names)
        self.addresses = {name: tracker[name] for name in names}
        self._lock, self._tracker = lock, _address(tracker)
        tracker.detach()  # from now on it has one owner

    def __del__(self, dead: Any = _dead, ending: Any = sys.is_finalizing) -> None:
        if not hasattr(self, "_tracker"):  # could not be linked
            return
        dead.append(self._tracker)
        if not self._lock.locked() and not ending():  # else the next to link frees it
            with self._lock:
                bury()


def bury() -> None:
    """Free dead code, each by one call in C: an interrupt comes before it or after it."""
    while _dead:
        _dispose()(_dead.popleft(), ctypes.byref(ctypes.c_void_p()))


@lru_cache(maxsize=1)
def _dispose() -> Any:
    """llvmlite's own function without the Python around it."""
    free = ctypes.CDLL(llvm.ffi.lib._name).LLVMPY_LLJIT_Dylib_Tracker_Dispose
    free.argtypes, free.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_bool
    return free


def _address(tracker: llvm.ResourceTracker) -> int:
    return ctypes.cast(tracker._ptr, ctypes.c_void_p).value or 0


def compile_object(module: Module, triple: str = "") -> bytes:
    """Machine code of a module as an object file; for this machine, or one that LLVM names so."""
    machine, optimised = _optimise(module, triple)
    return bytes(machine.emit_object(optimised))


def assembly(module: Module, triple: str = "") -> str:
    """Machine code of a module as text, for tests and for people."""
    machine, optimised = _optimise(module, triple)
    return str(machine.emit_assembly(optimised))


def _optimise(module: Module, triple: str) -> tuple[llvm.TargetMachine, llvm.ModuleRef]:
    """Three passes: loops are written as they are to be, and code generation does the rest.

    LLVM's standard pipeline takes much longer and finds the same inner loops.
    """
    _initialise()
    module.ir.triple = triple or llvm.get_process_triple() + HERE.objects
    parsed = llvm.parse_assembly(str(module.ir))
    parsed.verify()
    machine = _machine(module.isa, module.ir.triple)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    manager = llvm.create_new_module_pass_manager()
    manager.add_loop_rotate_pass()
    manager.add_instruction_combine_pass()
    manager.add_simplify_cfg_pass()
    manager.run(parsed, passes)
    _free(manager)
    return machine, parsed


def _free(manager: llvm.ModulePassManager) -> None:
    """Where llvmlite does not: the no-op of one parent class hides the other's _dispose."""
    if type(manager)._dispose is ObjectRef._dispose:
        NewPassManager._dispose(manager)
        manager.detach()


@lru_cache(maxsize=1)
def _initialise() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@lru_cache(maxsize=8)
def _machine(isa: Isa, triple: str) -> llvm.TargetMachine:
    target = llvm.Target.from_triple(triple)
    return target.create_target_machine(cpu=isa.cpu, features=isa.features, opt=3, jit=True,
                                        reloc="pic")


@lru_cache(maxsize=1)
def _linker(generation: int) -> llvm.LLJIT:
    """It lives until the next generation has begun and the last code of its own is freed."""
    _initialise()
    return llvm.create_lljit_compiler()


def _link(image: bytes, names: tuple[str, ...]) -> llvm.ResourceTracker:
    library = llvm.JITLibraryBuilder().add_object_img(image).add_current_process()
    for name in names:
        library.export_symbol(name)
    number = next(_serial)
    return library.link(_linker(number // LIBRARIES), f"tilewise{number}")

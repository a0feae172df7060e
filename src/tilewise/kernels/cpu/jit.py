"""IR to machine code, and the cache of objects on disk.

An object is keyed by what it is made from (the generator's sources, its arguments, the
instruction set, the LLVM version), so a known kernel is loaded without even writing its IR.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
from llvmlite.binding.ffi import ObjectRef
from llvmlite.binding.newpassmanagers import NewPassManager

from ...core.errors import TilewiseError
from ...core.files import cache_directory, is_private, write_atomically
from ...core.isa import Isa, may_use_tiles
from ...core.locks import fork_safe_lock
from .emit import Module

_lock = fork_safe_lock()  # LLVM's contexts are shared by all threads
_dead: deque[llvm.ResourceTracker] = deque()
_serial = itertools.count()
LLVM_VERSION = ".".join(map(str, llvm.llvm_version_info))
compiled = 0  # kernels compiled (not loaded) by this process; tests read it


def origin() -> str:
    """What code depends on besides its arguments: the generators and LLVM itself."""
    digest = hashlib.sha256(f"{llvmlite.__version__}|{LLVM_VERSION}".encode())
    kernels = Path(__file__).parents[1]
    for source in sorted(kernels.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


ORIGIN = origin()  # as this process was started with


class Code:
    """Loaded machine code; the memory is freed with the object."""

    def __init__(self, tracker: llvm.ResourceTracker) -> None:
        self._tracker = tracker

    def function(self, name: str, *types: type) -> Callable[..., None]:
        call = ctypes.CFUNCTYPE(None, *types)(self._tracker[name])
        call.code = self  # type: ignore[attr-defined]  # keeps the memory alive
        return call

    def __del__(self, dead: Any = _dead, lock: Any = _lock) -> None:
        dead.append(self._tracker)
        del self._tracker
        if lock.acquire(blocking=False):  # else the next to load frees it
            try:
                dead.clear()
            finally:
                lock.release()


def load(make: Callable[[Isa], Module], key: str, isa: Isa, *names: str) -> Code:
    """The code that `make` writes, from the cache where it is there."""
    if isa.matrix and not may_use_tiles():
        raise TilewiseError(f"isa is {isa.name!r}, needs an operating system that admits it")
    digest = hashlib.sha256(f"{ORIGIN}|{isa}|{key}".encode()).hexdigest()
    path = cache_directory() / f"{digest[:40]}.o"
    with _lock:
        _dead.clear()
        image = _read(path)
        if image is None:
            image = compile_object(make(isa))
            if origin() == ORIGIN:  # else the sources were edited after this process read them
                _write(path, image)
        return Code(_link(image, names))


def compile_object(module: Module) -> bytes:
    """Machine code of a module as an object file."""
    global compiled
    compiled += 1
    machine, optimised = _optimise(module)
    return bytes(machine.emit_object(optimised))


def assembly(module: Module) -> str:
    """Machine code of a module as text, for tests and for people."""
    machine, optimised = _optimise(module)
    return str(machine.emit_assembly(optimised))


def _optimise(module: Module) -> tuple[llvm.TargetMachine, llvm.ModuleRef]:
    _initialise()
    module.ir.triple = llvm.get_process_triple()
    parsed = llvm.parse_assembly(str(module.ir))
    parsed.verify()
    machine = _machine(module.isa)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = False
    options.loop_unrolling = options.loop_interleaving = False
    passes = llvm.create_pass_builder(machine, options)
    manager = passes.getModulePassManager()
    manager.run(parsed, passes)
    _free(manager)
    return machine, parsed


def _free(manager: llvm.ModulePassManager) -> None:
    """Where llvmlite does not: the no-op of one parent class hides the other's _dispose."""
    if type(manager)._dispose is ObjectRef._dispose:
        NewPassManager._dispose(manager)


@lru_cache(maxsize=1)
def _initialise() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@lru_cache(maxsize=8)
def _machine(isa: Isa) -> llvm.TargetMachine:
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(cpu=isa.cpu, features=isa.features, opt=3, jit=True,
                                        reloc="pic")


@lru_cache(maxsize=1)
def _linker() -> llvm.LLJIT:
    _initialise()
    return llvm.create_lljit_compiler()


def _link(image: bytes, names: tuple[str, ...]) -> llvm.ResourceTracker:
    library = llvm.JITLibraryBuilder().add_object_img(image).add_current_process()
    for name in names:
        library.export_symbol(name)
    return library.link(_linker(), f"tilewise{next(_serial)}")


def _read(path: Path) -> bytes | None:
    try:
        if not is_private(path):  # else it could be anyone's code
            return None
        content = path.read_bytes()
    except OSError:
        return None
    checksum, image = content[:32], content[32:]
    return image if hashlib.sha256(image).digest() == checksum else None


def _write(path: Path, image: bytes) -> None:
    """Silently not at all where the disk refuses: a cache is no duty."""
    with suppress(OSError):
        write_atomically(path, hashlib.sha256(image).digest() + image)

"""IR to machine code, and the cache of objects on disk.

An object is keyed by what it is made from (the generator's sources, its arguments, the
instruction set, the LLVM version), so a known kernel is loaded without even writing its IR.
LLVM is called apart from the main thread: llvmlite's wrappers do not survive an interrupt.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import sys
import warnings
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

from ....core.apart import apart
from ....core.errors import TilewiseError
from ....core.files import cache_directory, is_shared, read_private, write_atomically
from ....core.isa import Isa, may_use_tiles
from ....core.locks import fork_safe_lock
from ....core.platforms import HERE
from .function import Module
from .patience import PATIENCE

LIBRARIES = 16  # of one linker: LLVM keeps 9 KB of a library that was freed until its linker goes
_lock = fork_safe_lock()  # LLVM's contexts are shared by all threads
_dead: deque[int] = deque()  # trackers of code that is to be freed
_serial = itertools.count()
LLVM_VERSION = ".".join(map(str, llvm.llvm_version_info))
compiled = 0  # kernels compiled (not loaded) for this process; tests read it
BROUGHT: dict[str, bytes] = {}  # verified objects of bundles, by their digest
NOTED: dict[str, bytes] | None = None  # where a bundle is made: all objects of this process


def origin() -> str:
    """What code depends on besides its arguments: the generators, LLVM and the system's calls."""
    digest = hashlib.sha256(f"{llvmlite.__version__}|{LLVM_VERSION}|{HERE.name}".encode())
    package = Path(__file__).parents[3]
    for room in ("core", "kernels"):
        for source in sorted((package / room).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()


ORIGIN = origin()  # as this process was started with


class Code:
    """Loaded machine code; the memory is freed with the object."""

    def __init__(self, tracker: llvm.ResourceTracker, names: tuple[str, ...]) -> None:
        self._addresses = {name: tracker[name] for name in names}
        self._tracker = _address(tracker)
        tracker.detach()  # from now on it has one owner

    def function(self, name: str, *types: type,
                 kind: Any = ctypes.CFUNCTYPE) -> Callable[..., None]:
        call = kind(None, *types)(self._addresses[name])
        call.code = self  # type: ignore[attr-defined]  # keeps the memory alive
        return call

    def __del__(self, dead: Any = _dead, lock: Any = _lock) -> None:
        dead.append(self._tracker)
        if not lock.locked() and not sys.is_finalizing():  # else the next to load frees it
            with lock:
                _bury()


def load(make: Callable[[Isa], Module], key: str, isa: Isa, *names: str,
         ahead: Callable[[], bytes | None] = lambda: None) -> Code:
    """The code that `make` writes: what others compiled `ahead`, from the cache, or compiled."""
    if isa.matrix and not may_use_tiles():
        raise TilewiseError(f"isa is {isa.name!r}, needs an operating system that admits it")
    path, digest = _place(key, isa)
    _warn_if_shared(path.parent)

    def work() -> Code:
        PATIENCE.begins()
        image = None if digest in BROUGHT else ahead()
        with _lock:
            _bury()
            if digest in BROUGHT:
                with suppress(RuntimeError):
                    return _linked(BROUGHT[digest], digest, names)
            if image is not None:
                with suppress(RuntimeError):  # what cannot be linked is compiled here
                    return _kept(image, path, digest, names)
            return _cached(path, digest, names) or _kept(
                compile_object(make(isa)), path, digest, names)

    return apart(work)


def is_kept(key: str, isa: Isa) -> bool:
    """Whether the disk has such code."""
    path, digest = _place(key, isa)
    return digest in BROUGHT or path.exists()


def _place(key: str, isa: Isa) -> tuple[Path, str]:
    """Where code is kept, and under what."""
    digest = hashlib.sha256(f"{ORIGIN}|{isa}|{key}".encode()).hexdigest()
    return cache_directory() / f"{digest[:40]}.o", digest


def _cached(path: Path, digest: str, names: tuple[str, ...]) -> Code | None:
    image = _read(path, digest)
    if image is not None:
        with suppress(RuntimeError):  # what cannot be linked is compiled anew
            return _linked(image, digest, names)
    return None


def _kept(image: bytes, path: Path, digest: str, names: tuple[str, ...]) -> Code:
    """A new object, also for other processes."""
    global compiled
    code = _linked(image, digest, names)
    compiled += 1
    PATIENCE.ends(str(path.parent))
    if origin() == ORIGIN:  # else the sources were edited after this process read them
        _write(path, digest, image)
    return code


def _linked(image: bytes, digest: str, names: tuple[str, ...]) -> Code:
    code = Code(_link(image, names), names)
    if NOTED is not None:
        NOTED[digest] = image
    return code


def _bury() -> None:
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


@lru_cache(maxsize=8)
def _warn_if_shared(directory: Path) -> None:
    if is_shared(directory):
        warnings.warn(f"compiled code in {directory} is ignored, every process compiles its own: "
                      f"others can write to that directory; chmod go-w {directory}, or set "
                      "TILEWISE_CACHE_DIR to a directory of your own", stacklevel=3)


def _read(path: Path, digest: str) -> bytes | None:
    try:
        content = read_private(path)  # else it could be anyone's code
    except OSError:
        return None
    checksum, image = content[:32], content[32:]
    return image if _checksum(digest, image) == checksum else None


def _write(path: Path, digest: str, image: bytes) -> None:
    """Not at all where the disk refuses: a cache is no duty."""
    try:
        write_atomically(path, _checksum(digest, image) + image)
    except OSError as problem:
        _warn_that_none_is_kept(path.parent, problem.strerror)


@lru_cache(maxsize=8)
def _warn_that_none_is_kept(directory: Path, why: str) -> None:
    warnings.warn(f"compiled code cannot be kept in {directory} ({why}): every process compiles "
                  "its own; set TILEWISE_CACHE_DIR to a directory that can be written",
                  stacklevel=3)


def _checksum(digest: str, image: bytes) -> bytes:
    """Of the object and of what it is for: a good one of another kernel is no use."""
    return hashlib.sha256(digest.encode() + image).digest()

"""IR to machine code, and the cache of objects on disk.

An object is keyed by what it is made from (the generator's sources, its arguments, the
instruction set, the LLVM version), so a known kernel is loaded without even writing its IR.
LLVM is loaded when something is to be compiled. It is called apart from the main thread:
llvmlite's wrappers do not survive an interrupt.
"""

from __future__ import annotations

import ctypes
import hashlib
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite

from ....core.apart import apart
from ....core.errors import TilewiseError
from ....core.files import (
    cache_directory,
    is_shared,
    read_private,
    remove_orphans,
    write_atomically,
)
from ....core.isa import Isa, asks_leave, may_use_tiles
from ....core.locks import fork_safe_lock
from ....core.platforms import HERE
from .function import Module
from .patience import PATIENCE
from .placed import placed

_lock = fork_safe_lock()  # LLVM's contexts are shared by all threads
LLVMLITE = llvmlite.__version__  # each is for one LLVM, which is not loaded to ask it
compiled = 0  # kernels compiled (not loaded) for this process; tests read it
BROUGHT: dict[str, bytes] = {}  # verified objects of bundles, by their digest
NOTED: dict[str, bytes] | None = None  # where a bundle is made: all objects of this process


def origin() -> str:
    """What code depends on besides its arguments: the generators, LLVM and the system's calls."""
    digest = hashlib.sha256(f"{LLVMLITE}|{HERE.name}".encode())
    package = Path(__file__).parents[3]
    for room in ("core", "kernels"):
        for source in sorted((package / room).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()


ORIGIN = origin()  # as this process was started with


class Code:
    """Loaded machine code; the memory is freed with the object."""

    def __init__(self, image: bytes, names: tuple[str, ...]) -> None:
        self._home = placed(image, names) or _linked_by_llvm(image, names)

    def function(self, name: str, *types: type,
                 kind: Any = ctypes.CFUNCTYPE) -> Callable[..., None]:
        call = kind(None, *types)(self._home.addresses[name])
        call.code = self  # type: ignore[attr-defined]  # keeps the memory alive
        return call


def _linked_by_llvm(image: bytes, names: tuple[str, ...]) -> Any:
    return _compiler().Linked(image, names, _lock)


def _compiler() -> Any:
    """LLVM, which takes about 150 MB."""
    try:
        from . import compiler
    except OSError as problem:  # llvmlite says that a file may be missing
        raise TilewiseError(f"LLVM cannot be loaded: there is too little memory (ulimit -v), or "
                            f"llvmlite is not whole: {problem}") from problem
    return compiler


def load(make: Callable[[Isa], Module], key: str, isa: Isa, *names: str,
         ahead: Callable[[], bytes | None] = lambda: None) -> Code:
    """The code that `make` writes: what others compiled `ahead`, from the cache, or compiled."""
    if asks_leave(isa) and not may_use_tiles():
        raise TilewiseError(f"isa is {isa.name!r}, needs an operating system that admits it")
    path, digest = _place(key, isa)
    _warn_if_shared(path.parent)

    def work() -> Code:
        PATIENCE.begins()
        image = None if digest in BROUGHT else ahead()
        with _lock:
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
    code = Code(image, names)
    if NOTED is not None:
        NOTED[digest] = image
    return code


def compile_object(module: Module, triple: str = "") -> bytes:
    """Machine code of a module as an object file; for this machine, or one that LLVM names so."""
    image: bytes = _compiler().compile_object(module, triple)
    return image


def assembly(module: Module, triple: str = "") -> str:
    """Machine code of a module as text, for tests and for people."""
    text: str = _compiler().assembly(module, triple)
    return text


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
        _remove_orphans(path.parent)
    except OSError as problem:
        _warn_that_none_is_kept(path.parent, problem.strerror)


@lru_cache(maxsize=8)
def _remove_orphans(directory: Path) -> None:
    """Once in a process that compiles: the look takes milliseconds where there are many objects."""
    remove_orphans(directory, ".o")


@lru_cache(maxsize=8)
def _warn_that_none_is_kept(directory: Path, why: str) -> None:
    warnings.warn(f"compiled code cannot be kept in {directory} ({why}): every process compiles "
                  "its own; set TILEWISE_CACHE_DIR to a directory that can be written",
                  stacklevel=3)


def _checksum(digest: str, image: bytes) -> bytes:
    """Of the object and of what it is for: a good one of another kernel is no use."""
    return hashlib.sha256(digest.encode() + image).digest()

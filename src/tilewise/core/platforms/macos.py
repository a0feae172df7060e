"""macOS: values of sysctl. Nobody has run it there yet."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from .base import Platform

CACHES = {1: "l1dcachesize", 2: "l2cachesize", 3: "l3cachesize"}
# flags of Intel's processors by the name that Apple has for them
_INTEL = {"AVX2": "avx2", "FMA": "fma", "AVX512F": "avx512f", "AVX512VL": "avx512vl",
          "AVX512BW": "avx512bw", "AVX512DQ": "avx512dq"}


class MacOS(Platform):
    """Apple's own processors and Intel's."""

    name = "macOS"
    openmp = ("libtorch_cpu.dylib", "libomp.dylib")  # LLVM's library knows GNU's calls

    def cpu_flags(self, machine: str) -> frozenset[str]:
        """Arm's row here needs none; a page of the system says which of Intel's it saves."""
        names = f"{_string('machdep.cpu.features')} {_string('machdep.cpu.leaf7_features')}"
        return frozenset(_INTEL[name] for name in names.split() if name in _INTEL)

    def cache_bytes(self, level: int) -> int:
        """Of the faster kind of cores, where there are two; a cache may be shared by some."""
        name = CACHES[level]
        return _number(f"hw.perflevel0.{name}") or _number(f"hw.{name}")

    def processor(self) -> str:
        return _string("machdep.cpu.brand_string") or super().processor()

    def huge_pages(self) -> str:
        return "never"

    def cache_home(self) -> Path:
        home = os.path.expanduser("~")
        if os.environ.get("XDG_CACHE_HOME") or home.startswith("~"):
            return super().cache_home()
        return Path(home) / "Library" / "Caches" / "tilewise"

    def lacks(self, machine: str) -> list[str]:
        return []


def _read(name: str, size: int) -> bytes:
    """A value of the system; empty where there is none of that name."""
    try:
        sysctl = ctypes.CDLL(None).sysctlbyname
    except (OSError, AttributeError):
        return b""
    room, length = ctypes.create_string_buffer(size), ctypes.c_size_t(size)
    failed = sysctl(name.encode(), room, ctypes.byref(length), None, ctypes.c_size_t(0))
    return b"" if failed else room.raw[:length.value]


def _string(name: str) -> str:
    return _read(name, 4096).rstrip(b"\0").decode(errors="replace")


def _number(name: str) -> int:
    """Of four or eight bytes."""
    return int.from_bytes(_read(name, 8), "little")

"""Linux: files of /proc and /sys, and calls of libc."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path

from .base import Platform

ROOT = Path("/")  # tests have a tree of their own
ARM = ("aarch64", "arm64", "ARM64")  # names that systems give one kind of machine
CPU = "sys/devices/system/cpu/cpu0"
PAGES = "sys/kernel/mm/transparent_hugepage"
HUGE_PAGE = 2 << 20  # with pages of 4 KiB; with larger ones it is too large for most blocks
_HERE, _EXCHANGE = -100, 2  # of renameat2: paths from the working directory, a flag
_HWCAPS, _VECTOR_LENGTH = (16, 26), 51  # words of getauxval, a call of prctl
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18  # of the system call
# flags of 64-bit Arm by the word that has them and their bit
_BITS = {"asimd": (0, 1), "sve": (0, 22), "sve2": (1, 1), "i8mm": (1, 13), "bf16": (1, 14)}


class Linux(Platform):
    """The one that is developed on."""

    name = "Linux"
    is_tested = True
    can_emulate = True
    huge_pages_advice = f"echo madvise > /{PAGES}/enabled, as root"

    def cpu_flags(self, machine: str) -> frozenset[str]:
        return _told() if machine in ARM else _listed()

    def may_use_tiles(self) -> bool:
        try:
            return int(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA)) == 0
        except (OSError, AttributeError):
            return False

    def cache_bytes(self, level: int) -> int:
        for index in (ROOT / CPU / "cache").glob("index*"):
            if _text(index / "level") == str(level) and _text(index / "type") != "Instruction":
                return _bytes(_text(index / "size"))
        return 0

    def part(self) -> str:
        return _text(ROOT / CPU / "regs/identification/midr_el1")

    def family(self) -> str:
        found = [_field(name) for name in ("vendor_id", "cpu family", "model")]
        if all(map(str.isalnum, found)):
            return "-".join(found)
        try:
            number = int(self.part(), 16)
        except ValueError:
            return ""
        return f"arm-{number >> 24 & 0xFF:02x}-{number >> 4 & 0xFFF:03x}"

    def processor(self) -> str:
        return _field("model name") or super().processor()

    def huge_pages(self) -> str:
        return _text(ROOT / PAGES / "enabled").partition("[")[2].partition("]")[0] or "unknown"

    def huge_page(self) -> int:
        size = _bytes(_text(ROOT / PAGES / "hpage_pmd_size"))
        # 32 MiB and 512 MiB, with pages of 16 and 64 KiB, are more than most blocks have
        return HUGE_PAGE if size in (0, HUGE_PAGE) else mmap.PAGESIZE

    def ask_for_huge_pages(self, region: mmap.mmap, start: int, size: int) -> None:
        if hasattr(mmap, "MADV_HUGEPAGE") and size > 0:
            with suppress(OSError):  # a kernel without huge pages
                region.madvise(mmap.MADV_HUGEPAGE, start, size)

    def exchange(self, one: Path, other: Path) -> bool:
        try:
            rename = ctypes.CDLL(None).renameat2
        except (OSError, AttributeError):  # an old libc
            return False
        return int(rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)) == 0

    def lacks(self, machine: str) -> list[str]:
        return []


def arm_flags(words: tuple[int, ...], vector_bytes: int) -> frozenset[str]:
    """Flags of the auxiliary vector's words; the length of SVE's vectors is one of them."""
    flags = {name for name, (word, bit) in _BITS.items() if words[word] >> bit & 1}
    return frozenset(flags | ({f"sve{8 * vector_bytes}"} if "sve" in flags else set()))


def _told() -> frozenset[str]:
    """By calls: emulators show the file /proc/cpuinfo of another machine."""
    try:
        libc = ctypes.CDLL(None)
        libc.getauxval.restype = ctypes.c_ulong
        words = tuple(int(libc.getauxval(word)) for word in _HWCAPS)
        length = int(libc.prctl(_VECTOR_LENGTH)) & 0xFFFF
    except (OSError, AttributeError):
        return frozenset()
    return arm_flags(words, length)


def _listed() -> frozenset[str]:
    """By a file, for the first CPU."""
    return frozenset(_field("flags").split())


def _field(name: str) -> str:
    """What /proc/cpuinfo says of the first CPU."""
    for line in _text(ROOT / "proc/cpuinfo").splitlines():
        found, _, value = line.partition(":")
        if found.strip() == name:
            return value.strip()
    return ""


def _bytes(text: str) -> int:
    """Of a size as Linux writes it; 0 of anything else."""
    try:
        return int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)
    except ValueError:
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""

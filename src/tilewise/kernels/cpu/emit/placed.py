"""Object files in memory without LLVM: a process that compiles nothing need not load it.

What the generators make for x86-64 is simple: code and constants, and addresses relative to one
place. Any other object is left to LLVM's linker.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import NamedTuple

HEADER, SECTION, SYMBOL, RELOCATION = (struct.Struct(f"<{form}") for form in (
    "16sHHIQQQIHHHHHH", "IIQQQQIIQQ", "IBBHQQ", "QQq"))
OBJECT, X86_64 = 1, 62  # kinds of files and of machines
PROGRAM, SYMBOLS, NAMES, RELOCATIONS, EMPTY = 1, 2, 3, 4, 8  # kinds of sections
UNWINDING, SIGNIFICANT = 0x70000001, 0x6FFF4C03  # for debuggers, and for linkers
KNOWN = (0, PROGRAM, SYMBOLS, NAMES, RELOCATIONS, EMPTY, UNWINDING, SIGNIFICANT)
WRITABLE, IN_MEMORY = 1, 2
LARGEST = 64 << 20  # bytes of code


class Strange(Exception):
    """Not an object of the simple kind."""


class Section(NamedTuple):
    """As the file has it."""

    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry: int


class Placed:
    """Code in memory that can be run and no longer be written; freed with the object."""

    def __init__(self, image: bytes, names: tuple[str, ...]) -> None:
        content, symbols = laid_out(image)
        self._memory = mmap.mmap(-1, len(content), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
                                 mmap.PROT_READ | mmap.PROT_WRITE)
        self._memory[:] = content
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if _protect(start, len(content), mmap.PROT_READ | mmap.PROT_EXEC) != 0:
            raise Strange(os.strerror(ctypes.get_errno()))
        if lacking := [name for name in names if name not in symbols]:
            raise Strange(f"no symbol {lacking[0]}")
        self.addresses = {name: start + symbols[name] for name in names}


def placed(image: bytes, names: tuple[str, ...]) -> Placed | None:
    """An object in memory, or None where LLVM has to link it."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return None
    try:
        return Placed(image, names)
    except (Strange, struct.error, IndexError, ValueError, OSError, OverflowError):
        return None


def laid_out(image: bytes) -> tuple[bytearray, dict[str, int]]:
    """All sections behind one another with their addresses resolved, and where symbols are."""
    sections = _sections(image)
    places, size = {}, 0
    for i, section in enumerate(sections):
        if section.flags & IN_MEMORY and section.size:
            if section.kind != PROGRAM or section.flags & WRITABLE:
                raise Strange("a section that is written to")
            size = -(-size // max(1, section.alignment)) * max(1, section.alignment)
            places[i], size = size, size + section.size
    if not 0 < size <= LARGEST or any(sections[i].alignment > mmap.PAGESIZE for i in places):
        raise Strange("no code, or too much")
    content = bytearray(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    for i, place in places.items():
        content[place:place + sections[i].size] = _of(image, sections[i])
    for section in sections:
        if section.kind == RELOCATIONS and section.info in places:
            _relocate(content, image, section, sections, places)
    return content, _symbols(image, sections, places)


def _sections(image: bytes) -> list[Section]:
    mark, kind, machine, _, _, _, start, _, _, _, _, size, count, _ = HEADER.unpack_from(image)
    if mark[:6] != b"\x7fELF\2\1" or (kind, machine, size) != (OBJECT, X86_64, SECTION.size):
        raise Strange("not an object file for x86-64")
    found = [Section(*SECTION.unpack_from(image, start + i * size)) for i in range(count)]
    if any(section.kind not in KNOWN for section in found):
        raise Strange("a section of a kind that is not known: it may have relocations")
    if any(section.kind != EMPTY and section.offset + section.size > len(image)
           for section in found):
        raise Strange("a section beyond the end")
    return found


def _relocate(content: bytearray, image: bytes, section: Section, sections: list[Section],
              places: dict[int, int]) -> None:
    """Addresses relative to the place of a global table, which is the beginning."""
    base, target = places[section.info], sections[section.info]
    table = _of(image, sections[section.link])
    for at, info, addend in RELOCATION.iter_unpack(_of(image, section)):
        kind, symbol = info & 0xFFFFFFFF, info >> 32
        _, _, _, home, value, _ = SYMBOL.unpack_from(table, symbol * SYMBOL.size)
        if kind == 25 and home in places:  # R_X86_64_GOTOFF64: where a constant or a function is
            found = places[home] + value + addend
        elif kind == 29:  # R_X86_64_GOTPC64: where the table is, seen from here
            found = addend - (base + at)
        else:
            raise Strange(f"relocation {kind}")
        if at + 8 > target.size:
            raise Strange("a relocation beyond the end")
        struct.pack_into("<q", content, base + at, found)


def _symbols(image: bytes, sections: list[Section], places: dict[int, int]) -> dict[str, int]:
    found = {}
    for section in sections:
        if section.kind == SYMBOLS:
            names = bytes(_of(image, sections[section.link]))
            for name, _, _, home, value, _ in SYMBOL.iter_unpack(_of(image, section)):
                if name and home in places and value < sections[home].size:
                    found[names[name:names.index(0, name)].decode()] = places[home] + value
    return found


def _of(image: bytes, section: Section) -> memoryview:
    return memoryview(image)[section.offset:section.offset + section.size]


def _protect(start: int, size: int, access: int) -> int:
    change = ctypes.CDLL(None, use_errno=True).mprotect
    change.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return int(change(start, size, access))

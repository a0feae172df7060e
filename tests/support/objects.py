"""Object files as three systems have them: whose they are, and their symbols."""

from __future__ import annotations

import struct
from dataclasses import dataclass

ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
MACHO_MACHINES = {0x01000007: "x86_64", 0x0100000C: "aarch64"}
COFF_MACHINES = {0x8664: "x86_64", 0xAA64: "aarch64"}
SYMTAB = 2  # a load command of Mach-O, and a kind of section of ELF


@dataclass
class Object:
    """What a linker sees."""

    format: str
    machine: str
    defined: set[str]  # symbols that others may use
    needed: set[str]  # symbols of others


def read(image: bytes) -> Object:
    """Whatever format it has."""
    if image[:4] == b"\x7fELF":
        return _elf(image)
    if image[:4] == b"\xcf\xfa\xed\xfe":
        return _macho(image)
    return _coff(image)


def _text(image: bytes, start: int) -> str:
    return image[start:image.index(b"\0", start)].decode()


def _elf(image: bytes) -> Object:
    machine, = struct.unpack_from("<H", image, 18)
    start, = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, start + i * size) for i in range(count)]
    found = Object("elf", ELF_MACHINES[machine], set(), set())
    for section in sections:
        if section[1] != SYMTAB:
            continue
        names = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], 24):
            name, info, _, home = struct.unpack_from("<IBBH", image, at)
            if info >> 4:  # not a symbol of the file alone
                (found.defined if home else found.needed).add(_text(image, names + name))
    return found


def _macho(image: bytes) -> Object:
    machine, _, _, count = struct.unpack_from("<IIII", image, 4)
    found, at = Object("macho", MACHO_MACHINES[machine], set(), set()), 32
    for _ in range(count):
        command, size = struct.unpack_from("<II", image, at)
        if command == SYMTAB:
            symbols, number, names, _ = struct.unpack_from("<IIII", image, at + 8)
            for i in range(number):
                name, kind, home = struct.unpack_from("<IBB", image, symbols + 16 * i)
                if kind & 1:  # not of the file alone
                    (found.defined if home else found.needed).add(_text(image, names + name))
        at += size
    return found


def _coff(image: bytes) -> Object:
    machine, _, _, symbols, number = struct.unpack_from("<HHIII", image)
    found, i = Object("coff", COFF_MACHINES[machine], set(), set()), 0
    names = symbols + 18 * number
    while i < number:
        short, _, home, _, kind, more = struct.unpack_from("<8sIhHBB", image, symbols + 18 * i)
        long = struct.unpack("<II", short)
        name = short.rstrip(b"\0").decode() if long[0] else _text(image, names + long[1])
        if kind == 2:  # not of the file alone
            (found.defined if home else found.needed).add(name)
        i += 1 + more
    return found

"""Other systems, by what each tells of itself: files, sysctl, calls of a kernel."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tilewise.bench import health
from tilewise.bundle import files as bundle_files
from tilewise.core.isa import available
from tilewise.core.platforms import HERE, PLATFORMS, linux, platform_of
from tilewise.core.platforms.base import Platform
from tilewise.core.platforms.linux import Linux
from tilewise.core.platforms.macos import MacOS
from tilewise.core.platforms.windows import Windows
from tilewise.kernels.cpu import memory
from tilewise.kernels.cpu.emit import threads


def test_a_platform_for_every_system() -> None:
    assert [type(platform_of(name)) for name in ("linux", "darwin", "win32", "freebsd14")] == [
        Linux, MacOS, Windows, Platform]
    assert isinstance(HERE, PLATFORMS[sys.platform])


@pytest.mark.parametrize("kind", [*PLATFORMS.values(), Platform])
def test_what_is_not_known_has_a_next_best(kind: type[Platform], tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Here all but Linux find nothing of what they look for."""
    monkeypatch.setattr(linux, "ROOT", tmp_path)
    found = kind()
    assert [found.cache_bytes(level) for level in (1, 2, 3)] == [0, 0, 0]
    assert available("x86_64", found.cpu_flags("x86_64"))[0].name == "generic"
    assert found.part() == ""
    assert found.processor()
    assert found.huge_pages() in ("never", "unknown")
    with found.map(1 << 20) as memory:
        found.ask_for_huge_pages(memory, 0, 1 << 20)
        assert memory[:8] == bytes(8)
        assert len(memory) == 1 << 20
    assert found.cache_home().name.startswith("tilewise")


# Linux


def test_linux_reads_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "ROOT", tmp_path)
    cpu = "sys/devices/system/cpu/cpu0"
    for name, text in {
        "proc/cpuinfo": "model name : A processor\nflags : avx2 fma\n",
        f"{cpu}/cache/index0/level": "1", f"{cpu}/cache/index0/type": "Instruction",
        f"{cpu}/cache/index0/size": "64K", f"{cpu}/cache/index1/level": "1",
        f"{cpu}/cache/index1/type": "Data", f"{cpu}/cache/index1/size": "48K",
        f"{cpu}/cache/index2/level": "2", f"{cpu}/cache/index2/size": "2M",
        f"{cpu}/cache/index3/level": "3", f"{cpu}/cache/index3/size": "much",
        f"{cpu}/regs/identification/midr_el1": "0x00000000410fd4f0\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    found = Linux()
    assert found.cpu_flags("x86_64") == {"avx2", "fma"}
    assert [found.cache_bytes(level) for level in (1, 2, 3)] == [48 << 10, 2 << 20, 0]
    assert (found.processor(), found.part()) == ("A processor", "0x00000000410fd4f0")


@pytest.mark.parametrize("size, page, block", [
    ("2097152", 4096, 2 << 20), ("33554432", 16 << 10, 16 << 10),
    ("536870912", 64 << 10, 64 << 10), ("", 4096, 2 << 20)])
def test_blocks_begin_where_huge_pages_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          size: str, page: int, block: int) -> None:
    monkeypatch.setattr(linux, "ROOT", tmp_path)
    monkeypatch.setattr(mmap, "PAGESIZE", page)
    pages = tmp_path / "sys/kernel/mm/transparent_hugepage"
    pages.mkdir(parents=True)
    (pages / "enabled").write_text("always [madvise] never\n")
    (pages / "hpage_pmd_size").write_text(size)
    assert (Linux().huge_page(), Linux().huge_pages()) == (block, "madvise")


def test_memory_of_a_machine_with_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are whole pages, and begin where one does."""
    page = 64 << 10
    monkeypatch.setattr(mmap, "PAGESIZE", page)
    monkeypatch.setattr(memory, "HUGE_PAGE", page)
    for size in range(1, 1 << 20, 40961):
        block = memory.Pool().take(size)
        assert len(block) % page == 0
        assert len(block) >= size
        assert ctypes.addressof(block) % page == 0


# macOS


class FakeMac:
    """A laptop with two kinds of cores, as sysctl tells of it."""

    values: dict[str, Any] = {
        "hw.perflevel0.l1dcachesize": 128 << 10, "hw.l1dcachesize": 64 << 10,
        "hw.perflevel0.l2cachesize": 12 << 20, "machdep.cpu.brand_string": "Apple M2"}

    @classmethod
    def sysctlbyname(cls, name: bytes, room: Any, length: Any, _new: Any, _size: Any) -> int:
        value = cls.values.get(name.decode())
        if value is None:
            return -1
        content = value.encode() + b"\0" if isinstance(value, str) else struct.pack("<Q", value)
        ctypes.memmove(room, content, len(content))
        length._obj.value = len(content)
        return 0


class FakeIntelMac(FakeMac):
    values: dict[str, Any] = {"machdep.cpu.features": "FPU SSE4.2 FMA AVX1.0",
                              "machdep.cpu.leaf7_features": "BMI1 AVX2",
                              "hw.l3cachesize": 8 << 20}


def test_macos_asks_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: FakeMac)
    found = MacOS()
    assert [found.cache_bytes(level) for level in (1, 2, 3)] == [128 << 10, 12 << 20, 0]
    assert found.processor() == "Apple M2"
    assert [row.name for row in available("arm64", found.cpu_flags("arm64"))] == ["neon"]
    monkeypatch.setattr("ctypes.CDLL", lambda name: FakeIntelMac)
    assert available("x86_64", found.cpu_flags("x86_64"))[0].name == "avx2"
    assert found.cache_bytes(3) == 8 << 20


def test_macos_never_asks_for_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of Linux's call is another call's there."""
    monkeypatch.setattr("ctypes.CDLL", lambda name: pytest.fail("asked the system"))
    assert not MacOS().may_use_tiles()
    assert not Windows().may_use_tiles()


# Windows


class FakeKernel:
    """A processor with AVX2 and three caches."""

    records = b"".join(struct.pack("<QIxxxxBBHIIxxxx", 1, kind, level, 8, 64, size, sort)
                       for kind, level, size, sort in (
                           (0, 1, 1, 0), (2, 1, 64 << 10, 1), (2, 1, 32 << 10, 2),
                           (2, 2, 1 << 20, 0), (2, 3, 16 << 20, 0), (2, 3, 16 << 20, 0)))

    @staticmethod
    def IsProcessorFeaturePresent(number: int) -> bool:
        return number == 40

    @classmethod
    def GetLogicalProcessorInformation(cls, room: Any, length: Any) -> bool:
        if room is None:
            length._obj.value = len(cls.records)
            return False
        ctypes.memmove(room, cls.records, len(cls.records))
        return True


def test_windows_asks_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.windll", types.SimpleNamespace(kernel32=FakeKernel), raising=False)
    found = Windows()
    assert [found.cache_bytes(level) for level in (1, 2, 3)] == [32 << 10, 1 << 20, 16 << 20]
    assert available("AMD64", found.cpu_flags("AMD64"))[0].name == "avx2"
    assert [row.name for row in available("ARM64", frozenset())] == ["neon"]


def test_windows_locks_by_its_own_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def locking(descriptor: int, mode: str, size: int) -> None:
        calls.append(mode)
        if mode == "try":
            raise OSError(errno.EACCES, "held")
        if len(calls) < 3:
            raise OSError(errno.EDEADLK, "ten seconds are over")

    monkeypatch.setitem(sys.modules, "msvcrt", types.SimpleNamespace(
        locking=locking, LK_LOCK="wait", LK_NBLCK="try"))
    Windows().lock(5, wait=True)
    assert calls == ["wait"] * 3
    with pytest.raises(BlockingIOError):
        Windows().lock(5, wait=False)


def test_bundles_are_refused_where_directories_cannot_be_held(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "O_DIRECTORY")
    with pytest.raises(bundle_files.Refused, match="needs Linux or macOS"):
        bundle_files.Folder(tmp_path)


# both


@pytest.mark.parametrize("kind, environment, home", [
    (MacOS, {"HOME": "/Users/a"}, "/Users/a/Library/Caches/tilewise"),
    (MacOS, {"HOME": "/Users/a", "XDG_CACHE_HOME": "/x"}, "/x/tilewise"),
    (Windows, {"LOCALAPPDATA": "/Local"}, "/Local/tilewise"),
    (Linux, {"HOME": "/home/a"}, "/home/a/.cache/tilewise")])
def test_caches_are_where_users_look_for_them(monkeypatch: pytest.MonkeyPatch,
                                              kind: type[Platform], environment: dict[str, str],
                                              home: str) -> None:
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert kind().cache_home() == Path(home)


def test_threads_of_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS LLVM's library, which knows GNU's call; on Windows threads of Python."""
    asked = []

    def load(name: str | None) -> Any:
        asked.append(name and Path(name).name)
        if name is None or not name.endswith("libomp.dylib"):
            raise OSError("no such library")
        return types.SimpleNamespace(GOMP_parallel="the call")

    monkeypatch.setattr("ctypes.CDLL", load)
    monkeypatch.setattr(threads, "HERE", MacOS())
    assert threads._openmp_of_torch() == "the call"
    assert asked == [None, "libtorch_cpu.dylib", "libomp.dylib"]
    monkeypatch.setattr(threads, "HERE", Windows())
    assert threads._openmp_of_torch() is None
    assert len(asked) == 3


@pytest.mark.parametrize("kind, word", [(MacOS, "macOS is untested"), (Windows, "Python threads"),
                                        (Platform, "cache sizes are not known")])
def test_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, kind: type[Platform],
                                     word: str) -> None:
    monkeypatch.setattr(health, "HERE", kind())
    found = health._system()
    assert found.state == "missing"
    assert word in found.what
    assert "--selftest" in found.advice
    assert health._huge_pages().advice == ""
    monkeypatch.setattr(health, "HERE", Linux())
    assert health._system().state == "ok"


@pytest.mark.parametrize("files, family", [
    ({"proc/cpuinfo": "vendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 85\nmodel name\t: A"},
     "GenuineIntel-6-85"),
    ({"proc/cpuinfo": "vendor_id\t: ../up\ncpu family\t: 6\nmodel\t\t: 85"}, ""),
    ({"sys/devices/system/cpu/cpu0/regs/identification/midr_el1": "0x00000000410fd4f0"},
     "arm-41-d4f"),
    ({}, "")], ids=str)
def test_families_of_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                files: dict[str, str], family: str) -> None:
    monkeypatch.setattr(linux, "ROOT", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert Linux().family() == family

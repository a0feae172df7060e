"""What killed compilers leave beside their objects, and what a killed `save` leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise.bench.results import Result
from tilewise.core import files
from tilewise.core.files import OLD, remove_orphans
from tilewise.kernels.cpu.emit import jit
from tilewise.kernels.cpu.emit.launch import KERNELS


@pytest.fixture(scope="module")
def gone() -> int:
    """The number of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def left(directory: Path, name: str, age: float) -> Path:
    path = directory / name
    path.write_bytes(b"half of an object")
    then = path.stat().st_mtime - age
    os.utime(path, (then, then))
    return path


def test_old_ones_whose_process_is_gone_go(tmp_path: Path, gone: int) -> None:
    lost = left(tmp_path, f"abc.o.{gone}.3.tmp", OLD + 60)
    kept = [left(tmp_path, f"abc.o.{gone}.4.tmp", 0), left(tmp_path, "abc.o", OLD + 60),
            left(tmp_path, f"abc.o.{os.getpid()}.3.tmp", OLD + 60),
            left(tmp_path, f"wisdom.json.{gone}.3.tmp", OLD + 60),
            left(tmp_path, f"abc.o.{gone}.tmp", OLD + 60)]
    remove_orphans(tmp_path, ".o")
    assert not lost.exists()
    assert all(path.exists() for path in kept)
    remove_orphans(tmp_path / "nowhere", ".o")


def test_a_process_that_compiles_removes_them(tmp_path: Path, gone: int,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    lost = left(tmp_path, f"abc.o.{gone}.3.tmp", OLD + 60)
    KERNELS.clear()
    jit._remove_orphans.cache_clear()
    tilewise.conv2d(torch.ones(1, 3, 5, 5), torch.ones(2, 3, 3, 3), algorithm="cpu_direct")
    assert list(tmp_path.glob("*.o"))
    assert not lost.exists()


def test_a_result_is_saved_whole_or_not_at_all(tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    path, link = tmp_path / "a.json", tmp_path / "link.json"
    first = Result("bench", "a", "", {}, {}, [])
    first.save(path)
    link.symlink_to(path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            Result("bench", "b", "", {}, {}, []).save(path)
    assert Result.load(path) == first
    Result("bench", "b", "", {}, {}, []).save(link)
    assert Result.load(path).command == "b"
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [path, link]


def test_a_result_can_go_to_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    Result("bench", "a", "", {}, {}, []).save(pipe)
    assert b'"kind": "bench"' in reader.communicate(timeout=20)[0]
    assert pipe.is_fifo()

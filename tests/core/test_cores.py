"""Cores by affinity and by quotas of control groups, in trees made for the test and for real."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewise.core import cores as module
from tilewise.core.cores import cores, quota

V2 = "30 23 0:26 {root} {place} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "32 31 0:29 {root} {place} rw - cgroup cgroup rw,cpu,cpuacct\n"
OTHER = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


class Tree:
    """A file system of a test's own, in the place of the machine's."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, text: str) -> None:
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def is_in(self, groups: str, mounts: str) -> None:
        self.write("/proc/self/cgroup", groups)
        self.write("/proc/self/mountinfo", OTHER + mounts)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "visible", lambda: 8)
    return Tree(tmp_path)


def test_without_groups_all_visible_cores_count(tree: Tree) -> None:
    assert (quota(), cores()) == (math.inf, 8)


@pytest.mark.parametrize(("text", "most"), [
    ("max 100000\n", 8), ("150000 100000\n", 1), ("50000 100000\n", 1), ("400000 100000\n", 4),
    ("1600000 100000\n", 8), ("nonsense", 8), ("", 8), ("100000 0\n", 8), ("-5 7 9\n", 8)])
def test_version_2(text: str, most: int, tree: Tree) -> None:
    tree.is_in("0::/\n", V2.format(root="/", place="/sys/fs/cgroup"))
    tree.write("/sys/fs/cgroup/cpu.max", text)
    assert cores() == most


@pytest.mark.parametrize(("time", "period", "most"), [
    ("-1", "100000", 8), ("200000", "100000", 2), ("25000", "50000", 1), ("junk", "100000", 8)])
def test_version_1(time: str, period: str, most: int, tree: Tree) -> None:
    tree.is_in("4:memory:/elsewhere\n2:cpu,cpuacct:/a\n0::/b\n",
               V1.format(root="/", place="/sys/fs/cgroup/cpu"))
    tree.write("/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", time)
    tree.write("/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", period)
    assert cores() == most


def test_the_tightest_of_the_groups_around_counts(tree: Tree) -> None:
    tree.is_in("0::/pod/container\n", V2.format(root="/", place="/sys/fs/cgroup"))
    tree.write("/sys/fs/cgroup/pod/cpu.max", "300000 100000")
    tree.write("/sys/fs/cgroup/pod/container/cpu.max", "500000 100000")
    assert cores() == 3


def test_a_container_sees_its_own_group_as_the_mount(tree: Tree) -> None:
    """Without a namespace for groups, the name is that on the host, and the mount begins at it."""
    tree.is_in("3:cpu,cpuacct:/docker/abc\n",
               V1.format(root="/docker/abc", place="/sys/fs/cgroup/cpu,cpuacct"))
    tree.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "200000")
    tree.write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")
    assert cores() == 2


def test_a_mount_of_another_group_counts_from_its_top(tree: Tree) -> None:
    tree.is_in("0::/../outside\n", V2.format(root="/inner", place="/sys/fs/cgroup"))
    tree.write("/sys/fs/cgroup/cpu.max", "500000 100000")
    assert cores() == 5


def child(code: str) -> str:
    """What a process prints that imports only `core`, without torch."""
    start = ("import sys, types; package = types.ModuleType('tilewise'); "
             f"package.__path__ = [{str(Path(module.__file__).parents[1])!r}]; "
             "sys.modules['tilewise'] = package\n")
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_affinity_is_respected_for_real() -> None:
    code = """
import os
from tilewise.core.cores import cores
before = cores()
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(before, cores())
"""
    before, after = map(int, child(code).split())
    assert before == cores()
    assert after == 1


@contextlib.contextmanager
def group_of_one_core() -> Iterator[Path]:
    """A control group of this machine with the time of one core; skips where none can be made."""
    for top, name, text in ((Path("/sys/fs/cgroup/cpu"), "cpu.cfs_quota_us", "100000"),
                            (Path("/sys/fs/cgroup"), "cpu.max", "100000 100000")):
        group = top / f"tilewise-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            try:
                (group / name).write_text(text)
            except OSError:
                continue
            yield group
            return
        finally:
            group.rmdir()
    pytest.skip("this process may make no control group")


def test_a_quota_is_respected_for_real() -> None:
    with group_of_one_core() as group:
        code = f"""
import os
from pathlib import Path
Path({str(group / "cgroup.procs")!r}).write_text(str(os.getpid()))
from tilewise.core.cores import cores, quota
print(quota(), cores())
"""
        bound, count = child(code).split()
    assert (float(bound), int(count)) == (1.0, 1)

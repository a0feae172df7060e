"""Shards of random tests: run in processes of their own, and only once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilewise.bench import deep
from tilewise.bench.deep import Shard, run, shards, totals
from tilewise.bench.results import Result
from tilewise.core.errors import TilewiseError

MACHINE = {"processor": "any"}
FILTERS = Shard("filters", "generic", 3)


def ran(wanted: list[Shard], path: Path, checked: bool = False) -> Any:
    return run(wanted, path, 2, checked, "tilewise selftest", MACHINE)


@pytest.mark.skipif("generic" not in deep.rows_here(), reason="not an x86 processor")
def test_a_shard_is_run_once_and_a_crash_is_told(tmp_path: Path) -> None:
    path, broken = tmp_path / "deep.json", Shard("nothing", "generic", 0)
    first = ran([FILTERS, broken], path)
    found = {row["part"]: row for row in first.rows}
    assert not found["filters"]["wrong"]
    assert sum(found["filters"]["ran"].values()) == deep.FILTERS
    assert found["filters"]["runs"] == found["filters"]["ran"]
    assert found["filters"]["codes"] > 0
    assert all(0 <= share <= 1 for share in found["filters"]["worst"].values())
    assert "KeyError" in found["nothing"]["wrong"][0]
    assert first.command == "tilewise selftest"
    before = path.stat().st_mtime_ns
    assert ran([broken, FILTERS], path).rows == first.rows
    assert path.stat().st_mtime_ns == before
    with pytest.raises(TilewiseError, match="name another file"):
        ran([FILTERS], path, checked=True)


def test_more_shards_are_added_and_their_command_is_told(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    for seed, command in ((0, "one"), (1, "two"), (2, "one"), (2, "three")):
        found = run([Shard("nothing", "generic", seed)], path, 1, False, command, MACHINE)
    assert [row["seed"] for row in found.rows] == [0, 1, 2]
    assert found.command == Result.load(path).command == "one && two"


def test_a_file_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    text = json.dumps({"kind": "bench", "command": "", "date": "", "machine": {}, "settings": {},
                       "rows": [], "plans": [], "format": 1})
    path.write_text(text)
    with pytest.raises(TilewiseError, match="is of kind 'bench'"):
        ran([FILTERS], path)
    assert path.read_text() == text


def test_seeds_rows_and_parts_make_shards() -> None:
    row = deep.rows_here()[0]
    assert list(shards(["filters", "networks"], [row], range(2))) == [
        ("filters", row, 0), ("networks", row, 0), ("filters", row, 1), ("networks", row, 1)]
    with pytest.raises(TilewiseError, match="part is 'graphs', needs one of problems"):
        shards(["graphs"], [row], range(1))


def test_totals_add_counts_and_keep_the_worst() -> None:
    rows = [{"part": "problems", "row": row, "ran": {"a": 2}, "runs": {"a": 3},
             "worst": {"a": worst}}
            for row, worst in (("avx2", 0.25), ("avx2", 0.5), ("generic", 0.125))]
    assert totals(rows) == {("problems", "a"): {"ran": {"avx2": 4, "generic": 2}, "runs": 9,
                                                "worst": 0.5}}


def test_a_network_is_counted_once_and_its_runs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep, "NETWORKS", 4)
    found, row = deep.Found(), deep.rows_here()[0]
    deep.PARTS["networks"](Shard("networks", row, 5), found)
    assert found.wrong == []
    assert sum(found.ran.values()) == 4
    assert 4 < sum(found.runs.values()) <= 4 * deep.SIZES


def test_tests_of_another_processor_are_not_added(tmp_path: Path) -> None:
    path, shard = tmp_path / "deep.json", Shard("nothing", "generic", 0)
    ran([shard], path)
    with pytest.raises(TilewiseError, match="has tests of processor any, this is other; name"):
        run([shard], path, 1, False, "tilewise selftest", {"processor": "other"})


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="lists children as Linux does")
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_shards_end_with_the_process_that_began_them(ending: int, tmp_path: Path) -> None:
    # a shell that starts pytest in the background has SIGINT ignored, and children inherit that
    code = ("import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "from pathlib import Path; from tilewise.bench.deep import Shard, run; "
            f"run([Shard('networks', {deep.rows_here()[0]!r}, seed) for seed in range(3)], "
            f"Path({str(tmp_path / 'deep.json')!r}), 1, False, '', {{}})")
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as parent:
        try:
            child = awaited(lambda: children_of(parent.pid))
            parent.send_signal(ending)
            assert parent.wait(60) != 0
        finally:
            parent.kill()  # else the test never ends where it fails
    awaited(lambda: not any(Path(f"/proc/{one}").exists() for one in child))
    assert not (tmp_path / "deep.json").exists()


def children_of(process: int) -> list[int]:
    return [int(one) for task in Path(f"/proc/{process}/task").iterdir()
            for one in (task / "children").read_text().split()]


def awaited(test: Callable[[], Any], limit: float = 60.0) -> Any:
    """What a test says as soon as it says something; long after that is an error."""
    end = time.monotonic() + limit
    while not (found := test()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found

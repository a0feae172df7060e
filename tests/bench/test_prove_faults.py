"""A small sample of scripts/prove_faults.py; docs/trust.md has the whole. And what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.children import Moment, forked

from tilewise.bench.results import Result
from tilewise.bundle import saving
from tilewise.cli import NO, USAGE, main
from tilewise.core import limits
from tilewise.core.errors import TilewiseError, cut
from tilewise.core.files import held, open_regular, read_json
from tilewise.core.platforms import HERE
from tilewise.planner.wisdom import Wisdom
from tilewise.scale import jobs
from tilewise.training import checkpoint, idx

SCRIPT = Path(__file__).parents[2] / "scripts" / "prove_faults.py"
SAMPLE = ("compile", "plans", "wisdomfile", "limitsfile", "cachedcode", "resultfile", "idx")


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and counts memory by /proc")
def test_kills_and_hostile_files(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = tmp_path / "faults.json"
    done = subprocess.run([sys.executable, str(SCRIPT), "--kills", "12", "--files", "60", "--only",
                           *SAMPLE, "-o", str(output)], capture_output=True, text=True,
                          timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = Result.load(output).rows
    assert sum(row.get("kills", 0) for row in rows) == 3 + 4
    assert sum(row.get("files", 0) for row in rows) == 4 * 5
    assert sum(row.get("refused", 0) for row in rows) >= 4


def test_a_process_is_ended_before_it_changes_a_file(tmp_path: Path) -> None:
    def work(say: Callable[[str], None]) -> None:
        for i in range(4):
            (tmp_path / f"{i}").touch()
            say(f"{i}")

    ended = forked(work, Moment(touches=3), str(tmp_path))
    assert ended.killed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    slow = forked(lambda say: __import__("time").sleep(60), patience=0.2)
    assert slow.hung
    assert not slow.well
    failed = forked(lambda say: [][1])
    assert "IndexError" in failed.why
    assert forked(lambda say: say("well")).said == ["well"]


# bundles


@pytest.mark.skipif(sys.platform != "linux", reason="others have no such call, or it is not tried")
def test_a_bundle_takes_the_place_of_another_at_once(tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two renames there would be none."""
    old, new = tmp_path / "bundle", tmp_path / ".bundle.new"
    for place in (old, new):
        place.mkdir()
        (place / "manifest.json").write_text(place.name)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *names: pytest.fail("it was gone for a moment"))
        saving._publish(new, old)
    assert (old / "manifest.json").read_text() == ".bundle.new"
    assert not HERE.exchange(old, tmp_path / "nothing")
    monkeypatch.setattr(type(HERE), "exchange", lambda *names: False)  # an old system
    saving._publish(new, old)
    assert (old / "manifest.json").read_text() == "bundle"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_what_a_killed_process_left_of_a_bundle_goes(tmp_path: Path) -> None:
    place = tmp_path / "bundle"
    saving._beside(place)
    used, other = saving._beside(place), saving._beside(tmp_path / "bundles")
    users = tmp_path / ".bundle.backup", tmp_path / f"{saving._prefix(place)}mine"
    for one in users:
        one.mkdir()
    with held(used), saving._workplace(place) as work:
        assert sorted(tmp_path.iterdir()) == sorted([work, used, other, *users])
        with saving._workplace(place) as second:  # another process that saves meanwhile
            assert work.is_dir()
            assert second != work
    assert sorted(tmp_path.iterdir()) == sorted([used, other, *users])


# files that are half written


def test_what_killed_writers_left_goes_with_the_next(tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    others = ["mine.tmp", "wisdom.json.old.77.0.tmp", "wisdom.json.77.tmp"]
    for name in ("wisdom.json.77.0.tmp", "limits.json.77.0.tmp", *others):
        (tmp_path / name).touch()
    Wisdom().save(tmp_path / "wisdom.json")
    assert limits.keep("avx2", 2, limits.Limits(2e9, 1e10))
    assert sorted(path.name for path in tmp_path.glob("*.tmp")) == sorted(others)


def test_a_job_that_was_killed_while_it_began_goes_on(tmp_path: Path) -> None:
    (tmp_path / "job.json.77.0.tmp").write_text("{")
    jobs._check_identity(tmp_path, {"images": "0"})
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tmp").touch()
    with pytest.raises(TilewiseError, match="is not empty"):
        jobs._check_identity(tmp_path / "other", {"images": "0"})


# hostile files

DEEP = "[" * 100_000
SPOILT = ["", "[]", "null", DEEP, "{", '{"format": 1}', "\udcff", '{"a": ' + "9" * 5000 + "}"]


@pytest.mark.parametrize("text", SPOILT, ids=range(len(SPOILT)))
def test_no_text_is_more_than_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    for read in (lambda: Result.load(path),
                 lambda: jobs._check_identity(tmp_path, {"images": "0"})):
        with pytest.raises(TilewiseError, match=r"job\.json|another job") as told:
            read()
        assert len(str(told.value)) < 2000
    assert main(["report", str(path), "-o", str(tmp_path / "page.html")]) == USAGE
    assert not (tmp_path / "page.html").exists()


def test_pipes_and_devices_are_no_files(tmp_path: Path) -> None:
    """Which would never end."""
    pipe = tmp_path / checkpoint.NAME
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path)
    with pytest.raises(TilewiseError, match="not a checkpoint"):
        checkpoint.load(tmp_path)
    with pytest.raises(TilewiseError, match="not a result file"):
        Result.load(pipe)
    (tmp_path / "a.json").write_text("[1]")
    (tmp_path / "b.json").symlink_to("a.json")
    assert read_json(tmp_path / "b.json") == [1]


@pytest.mark.parametrize("state", [
    [1, 2], {"format": [DEEP]}, {"format": checkpoint.FORMAT, checkpoint.CHECKSUM: "0"}],
    ids=["a list", "a long format", "another checksum"])
def test_no_checkpoint_is_more_than_refused(tmp_path: Path, state: Any) -> None:
    torch.save(state, tmp_path / checkpoint.NAME)
    with pytest.raises(TilewiseError, match=checkpoint.NAME) as told:
        checkpoint.load(tmp_path)
    assert len(str(told.value)) < 1000


@pytest.mark.parametrize("change", [
    {"epoch": "1"}, {"epoch": True}, {"step": -1}, {"history": {}}, {"plans": None},
    {"history": {"losses": ["a"], "epochs": []}}, {"history": {"losses": [], "epochs": [1]}}],
    ids=str)
def test_parts_of_a_checkpoint_have_their_types(change: dict[str, Any], tmp_path: Path) -> None:
    right = {name: kind() for name, kind in checkpoint.PARTS.items()}
    right["history"] = {"losses": [0.5], "epochs": [{}]}
    checkpoint.check(right)
    with pytest.raises(TilewiseError, match="begin the run anew"), checkpoint.understood(tmp_path):
        checkpoint.check({**right, **change})


def test_short_idx_files_are_refused(tmp_path: Path) -> None:
    for content in (b"", b"\0\0\x08", b"\0\0\x08\xff\0\0"):
        (tmp_path / "some-idx").write_bytes(content)
        with pytest.raises(TilewiseError, match="cannot be read"):
            idx.load(tmp_path, "some-idx")


def test_rows_of_results_may_be_anything(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    whole = {"kind": "bench", "command": "", "date": "", "machine": {}, "settings": {},
             "rows": [{"subject": "a", "contender": "tilewise", "minimum": "soon", "ratio": []}],
             "plans": [], "format": 1}
    path.write_text(json.dumps(whole))
    for words in (("report", path, "-o", tmp_path / "page.html"), ("bench", "compare", path, path)):
        assert main([str(word) for word in words]) == USAGE
    for change in ({"rows": 3}, {"rows": [1]}, {"machine": []}, {"kind": None}):
        path.write_text(json.dumps({**whole, **change}))
        with pytest.raises(TilewiseError, match="another type"):
            Result.load(path)


def test_wisdom_of_a_strange_number_of_threads_is_checked(tmp_path: Path) -> None:
    path, entry = tmp_path / "wisdom.json", {"algorithm": "vendor", "version": 1, "schedule": {},
                                             "seconds": 1.0}
    from tilewise.conv.running import ENGINE

    entry["versions"] = dict(ENGINE.planner.wisdom.versions)
    name = "n1c8h8w8k8r3s3p1_f32_forward on cpu:avx2:t"
    entries = {name + digits: entry for digits in ("²", "٣", "9" * 5000, "0")}
    path.write_text(json.dumps({"format": 2, "entries": entries}))
    path.chmod(0o600)
    assert main(["wisdom", "check", str(path)]) == NO


def test_a_disk_that_refuses_is_told_without_a_traceback(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wisdom.json").write_text('{"format": 2, "entries": {}}')
    assert main(["wisdom", "merge", "/proc/none/w.json", str(tmp_path / "wisdom.json")]) == NO
    said = capsys.readouterr().err
    assert "/proc/none" in said
    assert "Traceback" not in said


def test_messages_quote_a_part_of_what_is_long() -> None:
    assert cut("short") == "short"
    assert len(cut("x" * 10**6)) < 600

"""Bundles: workers that compile and pack nothing, and whatever is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bundled import Small, image, small
from torch import nn

import tilewise
from tilewise.bundle import files, manifest
from tilewise.bundle.saving import Saved
from tilewise.conv.running import ENGINE
from tilewise.core.isa import available
from tilewise.core.target import Target
from tilewise.kernels.cpu.emit import jit
from tilewise.runtime import weights

ROWS = [row.name for row in available()]
HERE = Target.host().isa
OTHER = next((row for row in ROWS if row != HERE and row != "scalar"), HERE)
WORKER = """
import sys
import torch, tilewise
from support.bundled import small, image, Small
from tilewise.kernels.cpu.emit import jit
from tilewise.runtime import weights
torch.set_num_threads(int(sys.argv[3]))
fast = tilewise.bundle.load(sys.argv[1], Small if sys.argv[2] == "made" else small())
with torch.inference_mode():
    results = [fast(image()) for _ in range(4)]
assert all(torch.equal(results[0], other) for other in results)
torch.save(results[0], sys.argv[4])
print(jit.compiled, weights.made_here, tilewise.Target.host().isa)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    place = tmp_path_factory.mktemp("bundles") / "small"
    return tilewise.bundle.save(small(), image(), place, isas=[HERE, OTHER])


@pytest.fixture
def bundle(saved: Saved, tmp_path: Path) -> Path:
    """A copy to be spoiled."""
    place = tmp_path / "bundle"
    shutil.copytree(saved.path, place)
    return place


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What a test loaded goes with it."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    jit.BROUGHT.clear()
    weights.BROUGHT.clear()
    ENGINE.planner.decided.forget()
    ENGINE.executables.clear()


def refusal(place: Path, model: nn.Module | None = None, **options: str) -> str:
    """Why a bundle is refused; then nothing of it is used, and the model works."""
    model = small() if model is None else model
    with pytest.warns(UserWarning, match="is not used") as told:
        fast = tilewise.bundle.load(place, model, **options)
    assert not jit.BROUGHT
    assert not weights.BROUGHT
    assert not ENGINE.planner.decided.entries
    with torch.inference_mode():
        torch.testing.assert_close(fast(image()), model(image()))
    assert len(told) == 1  # once
    return str(told[0].message)


def worker(place: Path, tmp_path: Path, how: str, row: str, threads: int) -> list[str]:
    environment = {**os.environ, "TILEWISE_ISA": row, "PYTHONPATH": os.pathsep.join(sys.path),
                   "TILEWISE_CACHE_DIR": str(tmp_path / "empty"), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", WORKER, str(place), how,
                           str(threads), str(tmp_path / "result.pt")], capture_output=True,
                          text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "empty").glob("*.o"))
    return done.stdout.split()


@pytest.mark.parametrize(("how", "row", "threads"), [("made", HERE, 1), ("given", OTHER, 2)])
def test_a_worker_compiles_and_packs_nothing(saved: Saved, tmp_path: Path, how: str, row: str,
                                             threads: int) -> None:
    assert worker(saved.path, tmp_path, how, row, threads) == ["0", "0", row]
    with torch.inference_mode():
        found, expected = torch.load(tmp_path / "result.pt"), small()(image())
    torch.testing.assert_close(found, expected)


def test_results_have_the_bits_of_a_model_without_a_bundle(saved: Saved) -> None:
    with torch.inference_mode():
        expected = tilewise.optimize(small())(image())
    before = weights.made_here
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = tilewise.bundle.load(saved.path, Small, digest=saved.digest)
    with torch.inference_mode():
        assert torch.equal(fast(image()), expected)
    assert weights.made_here == before
    assert not fast.training


def test_weights_that_change_are_prepared_again(saved: Saved) -> None:
    fast = tilewise.bundle.load(saved.path, Small)
    with torch.inference_mode():
        first = fast(image())
    with torch.no_grad():
        fast.wide.weight.mul_(2.0)  # in memory of the bundle: a copy of these pages is written
        fast.point.weight.mul_(0.5)
    with torch.inference_mode():
        second = fast(image())
    plain = small()
    plain.load_state_dict(fast.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(second, plain(image()))
        assert not torch.equal(first, second)
        again = tilewise.bundle.load(saved.path, Small)(image())
    assert torch.equal(first, again)


def test_mapped_weights_are_shared_and_cannot_be_written(saved: Saved) -> None:
    tilewise.bundle.load(saved.path, Small)
    name = str(saved.path / f"{HERE}.prepared")
    kinds = [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines()
             if line.endswith(name)]
    assert kinds
    assert set(kinds) == {"r--s"}


def test_a_bundle_is_written_as_a_whole(saved: Saved, tmp_path: Path) -> None:
    names = {file.name for file in saved.path.iterdir()}
    rows = {pattern.format(row) for row in saved.rows for pattern in files.ROW.values()}
    assert names == {files.MANIFEST, files.PARAMETERS} | rows
    assert (saved.path.stat().st_mode | 0o755, len(saved.digest)) == (
        saved.path.stat().st_mode, 64)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(tilewise.TilewiseError, match="is no bundle: name another"):
        tilewise.bundle.save(small(), image(), tmp_path / "mine")
    with pytest.raises(tilewise.TilewiseError, match=r"needs model\.eval"):
        tilewise.bundle.save(small().train(), image(), tmp_path / "new")
    with pytest.raises(tilewise.TilewiseError, match="this machine has"):
        tilewise.bundle.save(small(), image(), tmp_path / "new", isas=["sve1024"])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


# refusals


def spoiled(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "cut":
        del content[-2:]
    elif how == "empty":
        content.clear()
    elif how == "longer":
        content += b"\0"
    else:  # a bit in the first, the middle or the last byte
        content[{"first": 0, "middle": len(content) // 2, "last": -1}[how]] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["first", "middle", "last", "cut", "empty", "longer", "gone",
                                 "linked", "shared"])
@pytest.mark.parametrize("kind", ["objects", "plans", "prepared"])
def test_each_file_of_a_row_is_verified(bundle: Path, kind: str, how: str) -> None:
    path = bundle / files.ROW[kind].format(HERE)
    if how == "gone":
        path.unlink()
    elif how == "linked":
        path.rename(bundle.parent / "elsewhere")
        path.symlink_to(bundle.parent / "elsewhere")
    elif how == "shared":
        path.chmod(0o666)
    else:
        spoiled(path, how)
    reason = refusal(bundle)
    expected = {"gone": "cannot be opened", "linked": "cannot be opened",
                "shared": "can be written by others", "cut": "bytes, needs",
                "empty": "bytes, needs", "longer": "bytes"}.get(how, "another checksum")
    assert path.name in reason
    assert expected in reason


@pytest.mark.parametrize("how", ["first", "middle", "last", "cut", "gone"])
def test_weights_of_a_bundle_are_verified(bundle: Path, how: str) -> None:
    path = bundle / files.PARAMETERS
    path.unlink() if how == "gone" else spoiled(path, how)
    with pytest.raises(tilewise.TilewiseError, match="has no weights without it"):
        tilewise.bundle.load(bundle, Small)
    assert not jit.BROUGHT


@pytest.mark.parametrize("how", ["first", "middle", "cut", "empty", "gone", "shared"])
def test_a_spoiled_manifest_is_refused(bundle: Path, how: str) -> None:
    path = bundle / files.MANIFEST
    if how == "gone":
        path.unlink()
    elif how == "shared":
        path.chmod(0o622)
    else:
        spoiled(path, how)
    refusal(bundle)


@pytest.mark.parametrize("seed", range(40))
def test_any_byte_of_a_manifest_may_be_wrong(saved: Saved, bundle: Path, seed: int) -> None:
    """It is refused, or what was changed is the space between two words."""
    path, generator = bundle / files.MANIFEST, torch.Generator().manual_seed(seed)
    content = bytearray(path.read_bytes())
    place = int(torch.randint(len(content), (1,), generator=generator))
    content[place] = int(torch.randint(256, (1,), generator=generator))
    path.write_bytes(content)
    folder = files.Folder(bundle)
    try:
        found = manifest.read(folder, None)
    except files.Refused:
        return
    finally:
        folder.close()
    folder = files.Folder(saved.path)
    assert found == manifest.read(folder, saved.digest)
    folder.close()


def test_another_format_is_refused(bundle: Path) -> None:
    path = bundle / files.MANIFEST
    path.write_text(path.read_text().replace('"format": 1', '"format": 99'))
    assert "format 99, needs 1" in refusal(bundle)


def edited(bundle: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = bundle / files.MANIFEST
    data = json.loads(path.read_text())
    change(data["body"])
    data["sha256"] = manifest.sealed(data["body"])  # as somebody would who knows how
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(("change", "reason"), [
    (lambda d: d["versions"].update(torch="1.0"), "torch is .*, needs 1.0"),
    (lambda d: d["versions"].update(sources="0"), "other versions: sources"),
    (lambda d: d["files"].update({"../../etc/passwd": {"bytes": 1, "digests": []}}), "contradicts"),
    (lambda d: d["rows"].update({"../x": d["rows"][HERE]}), "contradicts"),
    (lambda d: d["parameters"].pop("wide.bias"), "contradicts"),
    (lambda d: d["files"].pop(f"{HERE}.objects"), "contradicts"),
    (lambda d: d["rows"][HERE]["objects"].update(x=[0, 1 << 40]), "not inside of its file"),
    (lambda d: d["rows"][HERE]["objects"].update(x=[-8, 16]), "not inside of its file"),
])
def test_a_manifest_that_cannot_be(bundle: Path, change: object, reason: str) -> None:
    edited(bundle, change)
    found = refusal(bundle)
    assert re.search(reason, found), found


@pytest.mark.parametrize("change", [
    {"offset": 1 << 40}, {"offset": -4096}, {"shape": [1 << 40]}, {"stride": [1 << 30]},
    {"shape": [-1], "stride": [1]}, {"dtype": "object"}, {"offset": "0"}, {"offset": 2}])
def test_a_tensor_outside_of_its_file_is_refused(bundle: Path, change: dict[str, object]) -> None:
    def put(data: dict[str, Any]) -> None:
        value = data["rows"][HERE]["forms"][-1]["value"]
        while isinstance(value, list):
            value = value[0]
        value.update(change)

    edited(bundle, put)
    with pytest.warns(UserWarning, match="is not used"):
        fast = tilewise.bundle.load(bundle, model := small())
    assert not weights.BROUGHT
    assert not jit.BROUGHT
    with torch.inference_mode():
        torch.testing.assert_close(fast(image()), model(image()))


def test_other_weights_are_refused(saved: Saved) -> None:
    model = small()
    with torch.no_grad():
        model.wide.weight[0, 0, 0, 0] += 1e-6
    assert "1 of" in (found := refusal(saved.path, model))
    assert "wide.weight" in found
    wider = small()
    wider.head = nn.Linear(64, 11)
    assert "head.weight is [11, 64]" in refusal(saved.path, wider)
    more = small()
    more.extra = nn.Linear(2, 2)
    assert "another model" in refusal(saved.path, more)


def test_another_bundle_than_the_pinned_one_is_refused(saved: Saved) -> None:
    assert f"needs {'0' * 64}" in refusal(saved.path, digest="0" * 64)


def test_another_machine_is_refused(bundle: Path) -> None:
    if len(ROWS) < 2:
        pytest.skip("this machine has one row")

    def narrow(data: dict[str, Any]) -> None:
        data["rows"].pop(HERE)
        for pattern in files.ROW.values():
            data["files"].pop(pattern.format(HERE))

    edited(bundle, narrow)
    assert f"made for {OTHER}, this machine is {HERE}" in refusal(bundle)


def test_nothing_there_is_refused(tmp_path: Path) -> None:
    assert "cannot be opened" in refusal(tmp_path / "nothing")
    assert manifest.FORMAT == 1


def test_a_file_of_somebody_else_is_refused(bundle: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(bundle / f"{HERE}.objects", 12345, 12345)
    assert "belongs to user 12345" in refusal(bundle)


def test_what_is_checked_is_what_is_used(bundle: Path) -> None:
    """A file that is exchanged behind its name after it was opened changes nothing."""
    folder = files.Folder(bundle)
    name = files.ROW["objects"].format(HERE)
    stated = files.stated(bundle / name)
    descriptor = folder.open(name)
    os.replace(bundle / files.ROW["plans"].format(HERE), bundle / name)
    with os.fdopen(descriptor, "rb") as file:
        files.check(name, file.read(), stated)
    with pytest.raises(files.Refused, match=r"bytes, needs|more than|another checksum"):
        folder.verified(name, stated)
    folder.close()


def test_where_no_thread_can_be_started_files_are_hashed_later(
        monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    content = b"some bytes"
    stated = files.Stated(len(content), (files.digest_of(content),))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with ThreadPoolExecutor(2) as pool:
        hashed = files.Hashed("a file", content, stated, pool)
        assert hashed.verified() is hashed.verified() is content
        with pytest.raises(files.Refused, match="another checksum"):
            files.Hashed("a file", b"other bytes", stated, pool).verified()

"""Wisdom of the package: after the user's, before estimates, the same for any threads."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise
from tilewise.algorithms import ALGORITHMS
from tilewise.cli import OK, main
from tilewise.conv.running import ENGINE
from tilewise.core.platforms import HERE
from tilewise.core.problem import Problem
from tilewise.planner import families
from tilewise.planner.families import Family
from tilewise.planner.wisdom import Wisdom, asked_by
from tilewise.runtime import engine
from tilewise.runtime.engine import Engine, random_operands

PROBLEM = Problem.parse("n1c16h28w28k32r3s3p1_f32_forward+bias+relu").with_(layout="nhwc")
TARGET = tilewise.Target.host(threads=2)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where new engines look for the family's file; the user and the system have none."""
    path = tmp_path / "family.json"
    monkeypatch.setattr(engine, "family_path", lambda: path)
    monkeypatch.setattr(engine, "default_path", lambda: tmp_path / "own.json")
    monkeypatch.setattr(engine, "system_path", lambda: tmp_path / "system.json")
    return path


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def new() -> Engine:
    return Engine(ENGINE.planner.algorithms)


def asked() -> tuple[float, int]:
    return ENGINE.admitted(None, PROBLEM, TARGET), ENGINE.bits(None, PROBLEM, TARGET)


def another() -> Any:
    """A plan that no estimate chooses: Winograd with a tile of its own."""
    usual = new().planner.plan(PROBLEM, TARGET, algorithm="cpu_winograd")
    tile = 2 if usual.schedule["tile_h"] != 2 else 4
    return new().planner.plan(PROBLEM, TARGET, algorithm="cpu_winograd",
                              schedule=usual.schedule.with_(tile_h=tile, tile_w=tile))


def write(path: Path, plan: Any, known: Wisdom | None = None) -> None:
    known = Family() if known is None else known
    known.record(plan, *asked())
    path.write_text(known.to_json())
    path.chmod(0o600)


def code(plan: Any) -> tuple[Any, Any]:
    return plan.algorithm, plan.schedule


def test_it_stands_in_for_an_estimate(place: Path) -> None:
    assert new().plan(PROBLEM, TARGET).source == "estimate"
    write(place, another())
    for effort in ("estimate", "wisdom_only"):
        found = new().plan(PROBLEM, TARGET, effort)
        assert code(found) == code(another())
        assert found.source == "family"
        assert not found.is_timed
        assert found.seconds == another().seconds  # an estimate: clocks differ
    assert new().planner.candidates(PROBLEM, TARGET, *asked())[0].plan is not None


def test_other_sizes_of_its_class_share_it(place: Path) -> None:
    write(place, another())
    found = new().plan(PROBLEM.with_(h=27, w=29), TARGET)
    assert (code(found), found.source) == (code(another()), "family")


def test_the_user_and_the_system_come_before_it(place: Path, tmp_path: Path) -> None:
    write(place, another())
    for name, algorithm in (("system.json", "cpu_pixels"), ("own.json", "cpu_direct")):
        plan = new().planner.plan(PROBLEM, TARGET, algorithm=algorithm)
        write(tmp_path / name, plan, Wisdom(dict(ENGINE.planner.wisdom.versions)))
        found = new().plan(PROBLEM, TARGET)
        assert (found.algorithm, found.source) == (algorithm, "wisdom")


def test_it_does_not_stop_a_measurement(place: Path) -> None:
    small = PROBLEM.with_(h=7, w=7)
    plan = new().planner.plan(small, TARGET, algorithm="cpu_direct")
    write(place, plan)
    measured = new().plan(small, TARGET, "measure")
    assert measured.source == "measured"


@pytest.mark.parametrize("change", [
    {"version": 99}, {"algorithm": "cpu_forgotten"}, {"versions": (("classes", "0"),)},
    {"schedule": another().schedule.with_(tile_h=9)}], ids=str)
def test_stale_entries_are_ignored_silently(place: Path, change: dict[str, Any]) -> None:
    write(place, another())
    known = Family()
    known.record(another(), *asked())
    known.entries = {name: replace(entry, **change) for name, entry in known.entries.items()}
    place.write_text(known.to_json())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert new().plan(PROBLEM, TARGET).source == "estimate"


@pytest.mark.parametrize("content", [b"not json", b"\xff\xfe", b'{"format": 1, "entries": {}}'])
def test_a_corrupt_file_costs_a_warning(place: Path, content: bytes) -> None:
    place.write_bytes(content)
    one = new()
    with pytest.warns(UserWarning, match=r"family\.json"):
        assert one.plan(PROBLEM, TARGET).source == "estimate"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.plan(PROBLEM.with_(h=9), TARGET)


def test_it_is_for_this_machine_and_what_was_asked(place: Path) -> None:
    write(place, another())
    assert new().plan(PROBLEM, TARGET.with_(l2=TARGET.l2 * 2)).source == "estimate"
    assert new().plan(PROBLEM, TARGET, max_error=1e-2).source == "estimate"
    assert new().plan(PROBLEM.with_(k=48), TARGET).source == "estimate"


@pytest.mark.parametrize("algorithm", ["cpu_winograd", "cpu_direct"])
def test_any_number_of_threads_has_the_same_bits(place: Path, threads: None,
                                                 algorithm: str) -> None:
    plan = another()
    if algorithm == "cpu_direct":
        plan = new().planner.plan(PROBLEM, TARGET, algorithm=algorithm)
    write(place, plan)
    x, weight, bias, residual = random_operands(PROBLEM)
    results = []
    for count in (1, 2, 3, 64):
        one = new()
        found = one.plan(PROBLEM, tilewise.Target.host(threads=count))
        assert (found.algorithm, found.source) == (algorithm, "family")
        if algorithm == "cpu_winograd":
            assert found.schedule["tile_h"] == plan.schedule["tile_h"]
        torch.set_num_threads(min(count, 4))
        run = one.build(found)
        results.append(run(x, run.prepare(weight), bias, residual))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("order", ["channels", "filters"])
def test_weights_are_transformed_as_early_for_any_number_of_threads(order: str) -> None:
    algorithm = next(a for a in ALGORITHMS if a.name == "cpu_winograd")
    p = Problem.parse("n1c512h7w7k512r3s3p1_f32_forward").with_(layout="nhwc")
    mine = algorithm.default(p, TARGET).with_(order=order, tile_h=4, tile_w=4, k_parts=1)
    for count in (1, 4, 8, 64):
        found = algorithm.shared_by(p, tilewise.Target.host(threads=count), mine)
        assert (found["order"] == "filters") == (order == "filters")
        assert (found["tile_h"], found["tile_w"]) == (4, 4)


def test_forgetting_leaves_estimates(place: Path) -> None:
    write(place, another())
    one = new()
    assert one.plan(PROBLEM, TARGET).source == "family"
    one.forget()
    assert one.plan(PROBLEM, TARGET).source == "estimate"


def test_what_is_asked_is_read_back_from_a_key() -> None:
    (name,) = _named(another(), *asked())
    assert asked_by(name)[1:] == asked()
    assert asked_by("a problem on a machine") == ("a problem on a machine", None, 0)


def _named(plan: Any, *asked: Any) -> list[str]:
    wisdom = Wisdom()
    wisdom.record(plan, *asked)
    return list(wisdom.entries)


def test_shipping_takes_what_gains(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                   threads: None) -> None:
    """Of an entry that estimates choose anyway, of torch's, and of a weight's gradient, nothing."""
    if not HERE.family():
        pytest.skip("the system does not tell the processor's family")
    plain, known = new().planner, Wisdom(dict(ENGINE.planner.wisdom.versions))
    known.record(another(), *asked())
    for p, algorithm in ((PROBLEM.with_(k=48), None), (PROBLEM.with_(k=64), "vendor")):
        known.record(plain.plan(p, TARGET, algorithm=algorithm, max_error=asked()[0],
                                bits=asked()[1]), *asked())
    gradient = Problem.parse("n1c16h14w14k16r3s3p1_f32_backward_weight")
    known.record(plain.plan(gradient, TARGET, algorithm="cpu_direct_weight"), *asked())
    known.save(tmp_path / "tuned.json")
    words = ["wisdom", "ship", str(tmp_path / "tuned.json"), "-d", str(tmp_path), "--json"]

    assert main([*words, "--gain", "1e9"]) == OK
    told = json.loads(capsys.readouterr().out)
    assert (told["plans"], len(told["gains"])) == (0, 1)
    file = Path(told["file"])
    assert file.name == f"{HERE.family()}.json"
    gain = next(iter(told["gains"].values()))
    assert gain > 0
    write(file, replace(another(), seconds=1.0))
    before = Family(file)
    before.read_once()
    assert before.find(PROBLEM, TARGET, *asked())
    assert main([*words, "--gain", "1e9"]) == OK  # what gains no more is dropped
    assert json.loads(capsys.readouterr().out)["plans"] == 0


def test_shipping_says_where_it_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(families.HERE.__class__, "family", lambda self: "")
    Wisdom(dict(ENGINE.planner.wisdom.versions)).save(tmp_path / "tuned.json")
    assert main(["wisdom", "ship", str(tmp_path / "tuned.json"), "-d", str(tmp_path)]) != OK
    assert "needs Linux" in capsys.readouterr().err


@pytest.mark.parametrize("file", sorted(families.PLACE.glob("*.json")), ids=lambda file: file.stem)
def test_files_of_the_package(file: Path) -> None:
    """Plans for any number of threads, by algorithms that are ours and of today's version."""
    known = Family(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known.read_once()
    assert known.entries
    for name, entry in known.entries.items():
        algorithm = ENGINE.planner.algorithm(entry.algorithm)
        assert (entry.version, entry.versions) == (algorithm.version, known.versions), name
        assert not algorithm.baseline
        assert "backward_weight" not in name

"""Plans that outlive the process: readable, validated one by one, never lost, never trusted."""

import json
import os
import random
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch

import tilewise
from tilewise.conv.running import ENGINE
from tilewise.core.schedule import Schedule, Space
from tilewise.planner import Planner
from tilewise.planner.wisdom import Entry, Wisdom, key

PROBLEM = tilewise.Problem.parse("n2c16h14w14k32r3s3p1_f32_forward+bias+relu")
TARGET = tilewise.Target.host(threads=2)
VERSIONS = {"torch": "1", "llvm": "2"}


def wise(seconds=1.0, algorithm="cpu_direct", asked=()):
    wisdom = Wisdom(VERSIONS)
    plan = ENGINE.planner.plan(PROBLEM, TARGET, algorithm=algorithm)
    wisdom.record(replace(plan, seconds=seconds), *asked)
    return wisdom


def planner(wisdom):
    return Planner(ENGINE.planner.algorithms, wisdom=wisdom)


def only_entry(wisdom):
    (entry,) = wisdom.entries.values()
    return entry


def with_entry(**changes):
    wisdom = wise()
    (name,) = wisdom.entries
    wisdom.entries[name] = replace(wisdom.entries[name], **changes)
    return wisdom


def test_saved_and_loaded_again(tmp_path):
    path = tmp_path / "wisdom.json"
    wise().save(path)
    again = Wisdom(VERSIONS)
    assert again.load(path) == 1
    assert again.entries == wise().entries
    assert json.loads(path.read_text())["format"] == 2
    assert path.stat().st_mode & 0o077 == 0


def test_a_remembered_plan_is_used():
    cheapest = planner(Wisdom(VERSIONS)).plan(PROBLEM, TARGET)
    found = planner(wise()).plan(PROBLEM, TARGET)
    assert (cheapest.source, cheapest.schedule == found.schedule) == ("estimate", False)
    assert (found.algorithm, found.source, found.seconds) == ("cpu_direct", "wisdom", 1.0)


@pytest.mark.parametrize("changes", [
    {"version": 99}, {"algorithm": "gone"}, {"schedule": Schedule(tile_h=3)},
    {"versions": (("llvm", "3"), ("torch", "1"))}], ids=lambda c: next(iter(c)))
def test_a_stale_entry_is_not_used(changes):
    assert planner(with_entry(**changes)).plan(PROBLEM, TARGET).source == "estimate"


def test_an_entry_beyond_the_error_asked_for_is_not_used():
    wisdom = wise(algorithm="cpu_winograd", asked=(1e-9,))
    found = planner(wisdom).plan(PROBLEM, TARGET, max_error=1e-9)
    assert found.source == "estimate"
    assert found.algorithm == "vendor"


def test_an_entry_answers_only_who_asked_for_as_much():
    """Who admits less must not get it, and who admits more has faster ones to choose from."""
    wisdom = wise(asked=(2e-4, 16))
    asked = [(2e-4, 16), (2e-5, 24), (2e-2, 8), (2e-4, 0), (None, 0)]
    sources = [planner(wisdom).plan(PROBLEM, TARGET, max_error=error, bits=bits).source
               for error, bits in asked]
    assert sources == ["wisdom", *["estimate"] * 4]


def test_settings_of_precision_are_measured_one_by_one():
    tilewise.wisdom.forget()
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("high", "highest"):
            torch.set_float32_matmul_precision(precision)
            assert ENGINE.plan(PROBLEM, TARGET).source == "estimate"
            assert ENGINE.plan(PROBLEM, TARGET, effort="measure").source == "measured"
        for precision in ("high", "highest"):
            torch.set_float32_matmul_precision(precision)
            assert ENGINE.plan(PROBLEM, TARGET).source == "wisdom"
    finally:
        torch.set_float32_matmul_precision(before)
        tilewise.wisdom.forget()


def test_wisdom_only_runs_what_is_known_and_torch_otherwise():
    assert planner(wise()).plan(PROBLEM, TARGET, "wisdom_only").algorithm == "cpu_direct"
    assert planner(Wisdom(VERSIONS)).plan(PROBLEM, TARGET, "wisdom_only").algorithm == "vendor"


def test_batches_share_a_bucket_and_threads_do_not():
    assert key(PROBLEM.with_(n=5), TARGET) == key(PROBLEM.with_(n=8), TARGET)
    assert key(PROBLEM.with_(n=5), TARGET) != key(PROBLEM.with_(n=4), TARGET)
    assert key(PROBLEM, TARGET) != key(PROBLEM, TARGET.with_(threads=1))


def test_merging_keeps_the_faster_and_drops_nothing():
    slow, fast = wise(2.0), wise(1.0)
    other = Entry("vendor", 1, Schedule(), 1.0, slow.versions)
    slow.entries["other"] = other
    slow.merge(fast)
    assert slow.entries["other"] == other
    assert min(e.seconds for e in slow.entries.values()) == 1.0
    fast.merge(wise(2.0))
    assert only_entry(fast).seconds == 1.0


def test_a_file_cut_at_every_byte_is_survived(tmp_path):
    path, three = tmp_path / "wisdom.json", wise()
    for name in ("other", "third"):
        three.entries[name] = Entry("vendor", 1, Schedule(), 1.0, three.versions)
    three.save(path)
    whole = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for cut in range(len(whole) - 2):  # without its last line break it is still whole
            path.write_bytes(whole[:cut])
            assert Wisdom(VERSIONS).load(path) == 0
            wise().save(path)  # a torn file does not keep the next from being written
            again = Wisdom(VERSIONS)
            assert again.load(path) == 1
            assert again.entries == wise().entries


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"format": 1, "entries": {}}',
                                  '{"format": 2, "entries": []}', "\x00\xff", "[" * 100_000])
def test_a_foreign_file_costs_a_warning(tmp_path, text):
    path = tmp_path / "wisdom.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.warns(UserWarning, match="wisdom"):
        assert Wisdom(VERSIONS).load(path) == 0


def test_one_bad_entry_does_not_cost_the_others(tmp_path):
    path = tmp_path / "wisdom.json"
    wise().save(path)
    data = json.loads(path.read_text())
    data["entries"]["bad"] = {"algorithm": "x", "seconds": "soon"}
    data["entries"]["worse"] = 3
    path.write_text(json.dumps(data))
    with pytest.warns(UserWarning, match="2 of 3 entries"):
        assert Wisdom(VERSIONS).load(path) == 1


HUGE = "9" * 400
HOSTILE = ["3.0", "true", "null", "-1", HUGE, "9" * 5000, "1e999", "Infinity", "-Infinity", "NaN",
           '""', '"3"', '"\\ud800"', "[]", "[1]", "{}", '{"a": 1}', "[" * 50 + "]" * 50]
HOLE = "hole"


def with_holes(data):
    """The data as text, once for each of its values, which are left open there; and the keys."""
    for name, value in list(data.items()):
        data[name] = HOLE
        yield json.dumps(WHOLE, sort_keys=True)
        data[name] = value
        if isinstance(value, dict):
            yield from with_holes(value)
        del data[name]
        yield json.dumps(WHOLE, sort_keys=True)
        data[name] = value


WHOLE = json.loads(wise().to_json())


@pytest.mark.filterwarnings("ignore:wisdom")
def test_hostile_values_never_break_a_plan(tmp_path):
    """Whatever stands in a file, one place at a time: planning and saving go on."""
    path, used, texts = tmp_path / "wisdom.json", 0, list(with_holes(WHOLE))
    right = {name: type(value) for name, value in only_entry(wise()).schedule.items()}
    assert len(texts) > 20
    for text in texts:
        for value in HOSTILE if f'"{HOLE}"' in text else [""]:
            path.write_text(text.replace(f'"{HOLE}"', value))
            path.chmod(0o600)
            wisdom = Wisdom(VERSIONS)
            wisdom.load(path)
            plan = planner(wisdom).plan(PROBLEM, TARGET)
            kinds = {name: type(value) for name, value in plan.schedule.items()}
            assert plan.source == "estimate" or kinds == right
            assert json.loads(wisdom.to_json())["format"] == 2
            used += plan.source == "wisdom"
    assert 0 < used < len(texts)  # most of what was put in fits nowhere


@pytest.mark.filterwarnings("ignore:wisdom")
@pytest.mark.parametrize("change", [{"seconds": 10**400}, {"seconds": float("inf")},
                                    {"seconds": float("nan")}, {"version": True},
                                    {"version": 1.0}, {"algorithm": 3}, {"versions": {"torch": 1}},
                                    {"schedule": {"tile": 3.0}}, {"schedule": {"tile": 10**30}},
                                    {"schedule": {"tile": [1]}}], ids=str)
def test_a_value_of_another_type_costs_its_entry_alone(tmp_path, change):
    path, data = tmp_path / "wisdom.json", json.loads(wise().to_json())
    good = next(iter(data["entries"].values()))
    data["entries"]["other"] = {**good, **change}
    path.write_text(json.dumps(data))
    path.chmod(0o600)
    again = Wisdom(VERSIONS)
    assert again.load(path) == 1
    assert again.entries == wise().entries


def test_tunables_are_told_apart_by_their_types():
    space = Space(tile=(1, 2, 3), wide=(True, False))
    assert Schedule(tile=1, wide=True) in space
    for tile, wide in ((True, True), (3.0, True), (1, 1), (1, 0)):
        assert Schedule(tile=tile, wide=wide) not in space


def test_a_pipe_in_its_place_does_not_hang(tmp_path):
    path = tmp_path / "wisdom.json"
    os.mkfifo(path, 0o600)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert Wisdom(VERSIONS).load(path) == 0


def test_random_bytes_cost_a_warning(tmp_path):
    path, rng, whole = tmp_path / "wisdom.json", random.Random(0), wise().to_json().encode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(300):
            content = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                content[rng.randrange(len(content))] = rng.randrange(256)
            path.write_bytes(content)
            path.chmod(0o600)
            wisdom = Wisdom(VERSIONS)
            wisdom.load(path)
            wisdom.to_json()
            planner(wisdom).plan(PROBLEM, TARGET, "wisdom_only")


def test_a_file_that_others_can_write_is_not_read(tmp_path):
    path = tmp_path / "wisdom.json"
    wise().save(path)
    path.chmod(0o666)
    with pytest.warns(UserWarning, match="written by others"):
        assert Wisdom(VERSIONS).load(path) == 0


TUNER = """
import sys
from pathlib import Path
from tilewise.core.schedule import Schedule, Space
from tilewise.planner.wisdom import Entry, Wisdom
path, who = Path(sys.argv[1]), sys.argv[2]
for turn in range(50):
    wisdom = Wisdom({"torch": "1"})
    wisdom.entries[f"{who} {turn}"] = Entry("vendor", 1, Schedule(), 1.0, wisdom.versions)
    wisdom.save(path)
"""


def test_two_processes_that_tune_at_once_lose_nothing(tmp_path):
    path = tmp_path / "wisdom.json"
    tuners = [subprocess.Popen([sys.executable, "-c", TUNER, str(path), who]) for who in "ab"]
    assert [tuner.wait(timeout=120) for tuner in tuners] == [0, 0]
    found = Wisdom({"torch": "1"})
    assert found.load(path) == 100
    assert sorted(os.listdir(tmp_path)) == ["wisdom.json", "wisdom.json.lock"]


def test_measuring_is_remembered_and_shared_through_the_public_functions(tmp_path):
    problem = PROBLEM.with_(h=9, w=9)
    tilewise.wisdom.forget()
    plan = ENGINE.plan(problem, TARGET, effort="measure")
    assert plan.source == "measured"
    path = tilewise.wisdom.save(tmp_path / "mine.json")
    tilewise.wisdom.forget()
    assert ENGINE.plan(problem, TARGET).source == "estimate"
    assert tilewise.wisdom.merge(tmp_path / "all.json", path) == 1
    assert tilewise.wisdom.load(tmp_path / "all.json") == 1
    again = ENGINE.plan(problem, TARGET)
    assert (again.source, again.algorithm, again.schedule) == (
        "wisdom", plan.algorithm, plan.schedule)
    tilewise.wisdom.forget()


def test_an_unknown_effort_says_which_there_are():
    with pytest.raises(tilewise.TilewiseError, match="needs one of estimate, wisdom_only"):
        ENGINE.plan(PROBLEM, TARGET, effort="hard")


def test_a_system_file_comes_after_the_users_own(tmp_path, monkeypatch):
    from tilewise.runtime import engine

    system, own = tmp_path / "etc" / "wisdom.json", tmp_path / "own" / "wisdom.json"
    monkeypatch.setattr(engine, "system_path", lambda: system)
    monkeypatch.setattr(engine, "default_path", lambda: own)

    def planned(effort="wisdom_only"):
        return engine.Engine(ENGINE.planner.algorithms).plan(PROBLEM, TARGET, effort)

    def write(path, algorithm):
        learner = engine.Engine(ENGINE.planner.algorithms)
        plan = learner.plan(PROBLEM, TARGET, algorithm=algorithm)
        asked = learner.admitted(None, PROBLEM, TARGET), learner.bits(None, PROBLEM, TARGET)
        learner.planner.wisdom.record(replace(plan, seconds=1.0), *asked)
        learner.planner.wisdom.save(path)

    assert planned().source != "wisdom"
    write(system, "cpu_direct")
    before = system.read_bytes()
    assert (planned().algorithm, planned().source) == ("cpu_direct", "wisdom")
    asked = engine.Engine(ENGINE.planner.algorithms)
    asked.load_wisdom(tmp_path / "none.json")  # a file of the caller's does not replace it
    assert asked.plan(PROBLEM, TARGET, "wisdom_only").source == "wisdom"
    asked.forget()
    assert asked.plan(PROBLEM, TARGET, "wisdom_only").source != "wisdom"
    kept = system.rename(tmp_path / "etc" / "mounted.json")
    system.symlink_to(kept)  # as a container finds it
    assert planned().source == "wisdom"
    write(own, "cpu_pixels")
    assert (planned().algorithm, planned().source) == ("cpu_pixels", "wisdom")
    assert "cpu_direct" not in own.read_text()  # the system's is not copied into it
    assert system.read_bytes() == before
    system.chmod(0o666)
    own.unlink()
    with pytest.warns(UserWarning, match="can be written by others"):
        planned("estimate")


def test_roots_files_are_the_systems_only(tmp_path, monkeypatch):
    from tilewise.core import files

    path = tmp_path / "wisdom.json"
    wise().save(path)
    owner = path.stat().st_uid
    monkeypatch.setattr(files.os, "getuid", lambda: owner + 1)
    assert Wisdom(VERSIONS).load(path, or_roots=True) == (owner == 0)
    with pytest.warns(UserWarning, match="ignored"):
        assert Wisdom(VERSIONS).load(path) == 0

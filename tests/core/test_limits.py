"""Limits that were measured are kept, and estimates count on them; no file can spoil a plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tilewise.core import Target
from tilewise.core.limits import FILE, SHARE, Limits, keep, kept
from tilewise.core.target import FLOW, HERTZ, SHARED_FLOW, _host, learn


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    _host.cache_clear()
    yield tmp_path
    _host.cache_clear()


def test_nothing_is_assumed_where_nothing_was_measured(place):
    t = Target.host(threads=2)
    assert (t.hertz, t.flow) == (HERTZ, 2 * FLOW)


def test_the_suite_keeps_nothing():
    """Else plans in other tests would depend on who measured before, and on the hour."""
    t = Target.host(threads=2)
    assert not learn(t, peak=3e9 * 2 * t.lanes * t.starts * 2, copied=50e9)
    assert (Target.host(threads=2).hertz, t.hertz) == (HERTZ, HERTZ)


def test_more_threads_have_more_of_the_memory():
    assert Target("cpu", "avx2", 8).flow == 8 * FLOW
    assert Target("cpu", "avx2", 500).flow == SHARED_FLOW
    assert Target("cpu", "avx2", 8, bandwidth=40e9).flow == 40e9


def test_what_was_measured_is_for_later_processes_too(place):
    t = Target.host(threads=2)
    assert learn(t, peak=3e9 * 2 * t.lanes * t.starts * 2, copied=50e9)
    assert (t.hertz, t.flow) == (HERTZ, 2 * FLOW)
    now = Target.host(threads=2)
    assert now.hertz == pytest.approx(3e9)
    assert now.flow == pytest.approx(SHARE * 50e9)
    assert now.peak == pytest.approx(3e9 * 2 * t.lanes * t.starts * 2)
    assert Target.host(threads=1).hertz == HERTZ  # nobody measured one
    code = "from tilewise.core import Target; print(Target.host(threads=2).hertz)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(out.stdout) == now.hertz


def test_choices_are_made_by_the_limits_of_two_threads(place):
    t = Target.host(threads=2)
    learn(Target.host(threads=16), peak=1e9 * 2 * t.lanes * t.starts * 16, copied=300e9)
    assert Target.host(threads=16).flow == pytest.approx(SHARE * 300e9)
    assert Target.host(threads=16).on_two == t
    learn(t, peak=3e9 * 2 * t.lanes * t.starts * 2, copied=50e9)
    assert Target.host(threads=16).on_two == Target.host(threads=2) != t
    other = Target("cpu", "avx2", 8, hertz=3e9, bandwidth=40e9)
    assert other.on_two == other.with_(threads=2)


def test_what_cannot_be_replaces_nothing(place):
    keep("avx2", 2, Limits(3e9, 20e9))
    assert not keep("avx2", 2, Limits(12e9, 20e9))
    assert kept("avx2", 2) == Limits(3e9, 20e9)


def test_the_quieter_moment_counts(place):
    keep("avx2", 2, Limits(3e9, 20e9))
    keep("avx2", 2, Limits(2e9, 30e9))
    assert kept("avx2", 2) == Limits(3e9, 30e9)
    assert kept("avx2", 4) is None
    keep("avx2", 4, Limits(1e9, 40e9))
    assert kept("avx2", 2) == Limits(3e9, 30e9)


@pytest.mark.parametrize("value", [
    None, "3e9", True, -3e9, 0, 1e30, float("nan"), float("inf"), [3e9], {}])
def test_values_that_cannot_be_are_not_believed(place, value):
    keep("avx2", 2, Limits(3e9, 20e9))
    found = json.loads((place / FILE).read_text())
    (name,) = found
    (place / FILE).write_text(json.dumps({name: {"hertz": value, "copied": 20e9}}))
    assert kept("avx2", 2) is None
    (place / FILE).write_text(json.dumps({name: {"hertz": 3e9, "copied": value}}))
    assert kept("avx2", 2) is None
    keep("avx2", 2, Limits(3e9, 20e9))
    assert kept("avx2", 2) == Limits(3e9, 20e9)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', "\0", "[" * 100000])
def test_files_of_others_say_nothing(place, text):
    (place / FILE).write_text(text)
    assert kept("avx2", 2) is None
    assert Target.host(threads=2).hertz == HERTZ


def test_what_others_can_write_is_not_read(place):
    keep("avx2", 2, Limits(3e9, 20e9))
    os.chmod(place / FILE, 0o666)
    assert kept("avx2", 2) is None


def test_a_disk_that_refuses_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert not keep("avx2", 2, Limits(3e9, 20e9))

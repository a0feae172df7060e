"""Ranks and scipy's sums by every method, with schedules from all over their spaces."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.harness import sample

from tilewise.algorithms import FILTERS
from tilewise.bench.filter_cases import guarded, guarded_scratch, random_pixels, released, untouched
from tilewise.core import NoAlgorithm, Target
from tilewise.core.filter import FORMS, Filter
from tilewise.core.isa import available
from tilewise.core.lines import Lines
from tilewise.image.arrays import ENGINE
from tilewise.runtime.filters import DTYPES, View

ndimage = pytest.importorskip("scipy").ndimage
ROWS = [row.name for row in available() if row.name != "amx"]
HIGH, WIDE = 21, 300  # several bands and strips
CROSS = np.array([[0, 1, 0], [1, 1, 1], [0, 1, 0]], float)
BELL = np.array([[1.0, 4.0, 6.0, 4.0, 1.0]]) / 16
# a method, the filter of a window, the window, and what scipy makes of it
CASES = {
    "running": ("filter_running", {"form": "order", "order": 14}, np.ones((3, 5)),
                lambda x, w: ndimage.maximum_filter(x, w.shape)),
    "long": ("filter_running", {"form": "order"}, np.ones((18, 21)),
             lambda x, w: ndimage.minimum_filter(x, w.shape)),
    "network": ("filter_network", {"form": "order", "order": 12}, np.ones((5, 5)),
                lambda x, w: ndimage.median_filter(x, w.shape)),
    "histogram": ("filter_histogram", {"form": "order", "order": 30}, np.ones((11, 9)),
                  lambda x, w: ndimage.rank_filter(x, 30, w.shape)),
    "scattered": ("filter_network", {"form": "order", "order": 2, "footprint": "010111010"}, CROSS,
                  lambda x, w: ndimage.median_filter(x, footprint=w)),
    "taps": ("filter_taps", {"form": "order", "footprint": "010111010"}, CROSS,
             lambda x, w: ndimage.minimum_filter(x, footprint=w)),
    "even": ("filter_taps", {"form": "even"}, BELL, lambda x, w: ndimage.correlate1d(x, w[0])),
    "mean": ("filter_taps", {"form": "mean"}, np.ones((1, 5)),
             lambda x, w: ndimage.uniform_filter1d(x, 5)),
    "guarded": ("filter_guarded", {"form": "taps"}, np.outer(BELL, BELL)[:3], ndimage.correlate),
    "lines": ("filter_guarded", {"form": "lines"}, Lines(BELL[0], BELL[0]),
              lambda x, w: ndimage.correlate1d(ndimage.correlate1d(x, w.down, 0), w.across, 1)),
    "bells": ("filter_bells", {"form": "bells"}, Lines(BELL[0, 1:4] / 14 * 16, BELL[0]),
              lambda x, w: ndimage.correlate1d(ndimage.correlate1d(x, w.down, 0), w.across, 1)),
    "means": ("filter_guarded", {"form": "means"}, Lines(np.ones(3), np.ones(5)),
              lambda x, w: ndimage.uniform_filter(x, w.shape)),
    "quotients": ("filter_means", {"form": "means"}, Lines(np.ones(7), np.ones(3)),
                  lambda x, w: ndimage.uniform_filter(x, w.shape)),
    "whole": ("filter_direct", {"form": "whole"}, CROSS, ndimage.correlate),
}


def method(name: str):
    return next(a for a in FILTERS if a.name == name)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("case", CASES)
def test_schedules(case, row):
    name, form, window, theirs = CASES[case]
    kind = random.Random(case + row).choice(("i16", "f32"))
    kind = {"even": "f64", "lines": "u8" if row == ROWS[0] else "i16"}.get(case, kind)
    kind = "u8" if case in ("whole", "mean", "guarded", "bells", "means", "histogram",
                             "quotients") else kind
    p = Filter(1, HIGH, WIDE, 1, *window.shape, tuple(size // 2 for size in window.shape),
               dtype=kind, out=kind, **form)
    t = Target.host(row, threads=2)
    algorithm, rng = method(name), random.Random(7)
    assert not algorithm.reject(p, t)
    space, start = algorithm.space(p, t), algorithm.default(p, t)
    assert start in space
    drawn = {space.sample(rng, start) for _ in range(sample(8, 2))} | {start}
    with released():
        x = guarded((HIGH, WIDE), str(DTYPES[kind]), "end")
        x[:] = random_pixels(x.shape, str(DTYPES[kind]), np.random.default_rng(1))
        expected = theirs(x, window)
        for s in drawn:
            out = guarded(x.shape, str(DTYPES[kind]), "start")
            batch, to = x[None, :, :, None], out[None, :, :, None]
            run = ENGINE.build_for(ENGINE.planner.plan(p, t, algorithm=name, schedule=s),
                                   View(batch.strides), View(to.strides))
            with guarded_scratch():
                run(batch, to, run.prepare(window), 0.0)
            np.testing.assert_array_equal(out, expected, err_msg=str(s))
            assert untouched(out)


def test_every_form_has_a_method_and_every_method_a_form():
    assert {form for a in FILTERS for form in a.forms} == {*FORMS}
    assert {CASES[case][0] for case in CASES} == {a.name for a in FILTERS
                                                  if a.forms != {"sum"}}


def test_refusals_say_why():
    median = Filter(1, 9, 9, 1, 11, 11, (5, 5), dtype="u16", out="u16", form="order", order=60)
    with pytest.raises(NoAlgorithm) as refused:
        ENGINE.plan_filter(median, Target.host(threads=1))
    told = str(refused.value)
    assert "filter_network:   footprint has 121 taps, needs at most 81" in told
    assert "filter_running:   order is 60 of 121, needs the first or the last" in told
    assert "filter_direct:    form is order, needs sum, whole" in told

"""Places in the order of large windows of bytes, by histograms."""

from __future__ import annotations

import numpy as np
import pytest
from support.image_cases import Case, Seen, check

from tilewise import image
from tilewise.algorithms import FILTERS
from tilewise.bench.filter_cases import laid_out, released
from tilewise.core import Target
from tilewise.core.filter import Filter

ndimage = pytest.importorskip("scipy").ndimage
HISTOGRAM = next(a for a in FILTERS if a.name == "filter_histogram")


@pytest.mark.parametrize("shape, axes, size", [
    ((61, 83), None, (11, 9)), ((30, 1100), None, (10, 17)), ((41, 37, 3), (0, 1), (13, 21)),
    ((2, 20, 23), (1, 2), (19, 12)), ((5, 7), None, (9, 12)), ((90, 9), None, (101, 3))])
@pytest.mark.parametrize("name, options", [
    ("median_filter", {}), ("rank_filter", {"rank": 3}), ("rank_filter", {"rank": -4}),
    ("percentile_filter", {"percentile": 80})])
def test_results_are_scipys(shape, axes, size, name, options):
    """Between unmapped pages."""
    seen, data = Seen(), np.random.default_rng(len(shape))
    for mode, layout in (("mirror", "plain"), ("constant", "columns back"), ("wrap", "turned")):
        with released():
            x = laid_out(shape, "uint8", layout, data)
            given = {**options, "size": size, "axes": axes, "mode": mode, "cval": 9.0}
            check(Case(name, x, given, text=f"{name} {shape} {size} {mode}"), seen)
    assert not seen.elsewhere


def test_one_value_fills_every_count():
    """All of a window in one count, and places at both ends of it."""
    x = np.full((40, 70), 255, np.uint8)
    x[20:, 30:] = 0
    for place in (0, 60, 440, 880, -1):
        found = image.rank(x, place, (21, 42), mode="nearest")
        np.testing.assert_array_equal(found, ndimage.rank_filter(x, place, (21, 42),
                                                                 mode="nearest"))


@pytest.mark.parametrize("changes, reason", [
    ({"dtype": "u16", "out": "u16"}, "dtype is u16, needs u8"),
    ({"footprint": "10" + "1" * 119}, "footprint has gaps, needs a whole rectangle"),
    ({"r": 300, "s": 300}, "footprint has 90000 taps, needs at most 65535"),
    ({"form": "sum", "order": 0}, "form is sum, needs order")])
def test_reasons(changes, reason):
    p = Filter(1, 50, 50, 1, 11, 11, (5, 5), dtype="u8", out="u8", form="order", order=60)
    assert HISTOGRAM.reject(p, Target.host()) == []
    assert HISTOGRAM.reject(p.with_(**changes), Target.host()) == [reason]


def test_small_windows_are_sorted_and_large_ones_counted():
    x = np.zeros((256, 256), np.uint8)
    chosen = {size: image.explain(image.median, x, size).splitlines()[1].split()[0]
              for size in (3, 7, 11, 31)}
    assert chosen == {3: "filter_network", 7: "filter_network", 11: "filter_histogram",
                      31: "filter_histogram"}

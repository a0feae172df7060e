"""Means of bytes in 16-bit integers."""

from __future__ import annotations

import numpy as np
import pytest
from support.image_cases import Case, Seen, check

from tilewise import image
from tilewise.algorithms import FILTERS
from tilewise.bench.filter_cases import laid_out, released
from tilewise.core import Target
from tilewise.core.filter import Filter
from tilewise.core.quotients import is_exact, reciprocal

ndimage = pytest.importorskip("scipy").ndimage
MEANS = next(a for a in FILTERS if a.name == "filter_means")


def test_quotients():
    assert [count for count in (2, 3, 5, 16, 64) if not is_exact(count)] == []
    for count in filter(is_exact, range(1, 258)):
        sums = np.arange(255 * count + 1)
        assert (sums * reciprocal(count) >> 16 == sums // count).all(), count


@pytest.mark.parametrize("shape, axes", [((61, 83), None), ((9, 1100), None),
                                         ((21, 37, 3), (0, 1))])
@pytest.mark.parametrize("size", [(3, 3), (2, 15), (16, 5)])
def test_results_are_scipys(shape, axes, size):
    """Between unmapped pages."""
    seen, data = Seen(), np.random.default_rng(1)
    for mode, cval in (("mirror", 0.0), ("constant", 255.0), ("constant", 3.5)):
        with released():
            x = laid_out(shape, "uint8", "rows back", data)
            given = {"size": size, "axes": axes, "mode": mode, "cval": cval}
            check(Case("uniform_filter", x, given, text=f"{shape} {size} {mode}"), seen)
    assert not seen.elsewhere


def test_it_is_chosen():
    told = image.explain(image.uniform, np.zeros((64, 64), np.uint8), 5)
    assert told.splitlines()[1].split()[0] == "filter_means"


@pytest.mark.parametrize("changes, reason", [
    ({"dtype": "u16", "out": "u16"}, "types are u16 and u16, needs u8"),
    ({"r": 19}, "window is 19x5, needs sizes whose 16-bit quotients are exact, such as 2 to 16"),
    ({"form": "mean"}, "form is mean, needs means")])
def test_reasons(changes, reason):
    p = Filter(1, 50, 50, 1, 5, 5, (2, 2), dtype="u8", out="u8", form="means")
    assert MEANS.reject(p, Target.host()) == []
    assert MEANS.reject(p.with_(**changes), Target.host()) == [reason]

"""Deliberate faults in the code of ranks and of scipy's sums: the harness must notice every one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import faults
from support import image_cases as harness
from support.faults import changed, replaced
from support.mutations import whole_vectors

from tilewise.bench.filter_cases import guarded, random_pixels, released
from tilewise.core import selection
from tilewise.image import linear, orders, windows
from tilewise.image.arrays import ENGINE
from tilewise.kernels.cpu.emit import counts, threads
from tilewise.kernels.cpu.emit.elements import ELEMENTS, Element
from tilewise.kernels.cpu.emit.values import Words
from tilewise.kernels.cpu.image import bells, common, histogram, means, network, running, taps
from tilewise.kernels.cpu.image import guarded as narrow
from tilewise.runtime import filters


class Mutation(NamedTuple):
    """A fault, and a call that runs into it."""

    apply: Callable[[pytest.MonkeyPatch], None]
    name: str = "median_filter"
    options: dict[str, Any] = {"size": (5, 5)}
    kind: str = "uint8"
    mode: str = "mirror"
    shape: tuple[int, ...] = (21, 150)
    level: int = 0  # of all pixels, where they are to be equal


def element(name: str, **changes: Any) -> Callable[..., None]:
    return lambda patch: patch.setitem(ELEMENTS, name, replace(ELEMENTS[name], **changes))


def flushing(patch: pytest.MonkeyPatch) -> None:
    """Denormals are zero in every worker."""
    emit = threads.emit_region
    patch.setattr(common, "emit_region", lambda *args, flush=True, **more: emit(*args, **more))


def saturated(self: Any, value: Any) -> Any:
    return self.narrowed(value)


def never_uneven(self: Any, f: Any, table: Any) -> Any:
    value = self._taps(f.x, table, self.work)[0]
    return value, value.equals(value)


def without_half(part: Any) -> Any:
    part[:1] = 0
    return part


BOX: Any = {"name": "minimum_filter", "options": {"size": (5, 6)}}
GAPS: Any = {"options": {"footprint": np.array([[0, 1, 0], [1, 1, 1], [0, 1, 0]], bool)}}
BELL: Any = {"name": "gaussian_filter", "options": {"sigma": 1.3}}
LEVEL = 251  # which scipy's blur of sigma 0.5 makes one less
LARGE: Any = {"options": {"size": (11, 9)}}
MOVED = counts.Counts._moved_up
CURVE: Any = {"name": "gaussian_filter", "options": {"sigma": 1.3, "order": 2}}
MUTATIONS = {
    "least for largest": Mutation(replaced(Element, "largest", Element.least)),
    "signs forgotten": Mutation(element("i16", low=0), kind="int16"),
    "whole stores": Mutation(whole_vectors("store")),
    "whole loads": Mutation(whole_vectors("load")),
    "candidates dropped": Mutation(replaced(network, "candidates", lambda length, total, order: (
        slice(max(0, length - (total - order) + 1), min(length, order)))), "rank_filter",
        {"rank": 2, "size": (5, 5)}),
    "the next in order": Mutation(changed(network.Geometry, "order_of_columns",
                                          lambda order: order + 1)),
    "no room for planes": Mutation(replaced(network.Geometry, "worker_bytes",
                                            common.FilterSizes.worker_bytes)),
    "a merge without its last step": Mutation(replaced(network, "merged", lambda a, b, pick: [
        *selection.merged(a, b, pick)[:-1], b[-1]]), options={"size": (3, 5)}),
    "a footprint without gaps": Mutation(changed(orders, "_footprint",
                                                 lambda found: found | True), **GAPS),
    "no room for histograms": Mutation(replaced(histogram.Geometry, "worker_bytes",
                                                common.FilterSizes.worker_bytes), **LARGE),
    "no columns lost": Mutation(replaced(counts.Counts, "minus", lambda self, other: self),
                                **LARGE),
    "sums of fifteen": Mutation(replaced(counts.Counts, "_moved_up", lambda self, by: (
        self.minus(self) if by == 8 else MOVED(self, by))), **LARGE),
    "windows too small": Mutation(changed(running, "steps", lambda found: found[:-1]), **BOX),
    "no room for a tile": Mutation(replaced(running.Geometry, "worker_bytes",
                                            common.FilterSizes.worker_bytes), **BOX),
    "rows folded too few": Mutation(changed(running, "steps", lambda found: [
        step + 1 for step in found]), **BOX),
    "the constant not a value": Mutation(replaced(windows, "_constant", lambda window, dtype: 9.0),
                                         **BOX, mode="constant"),
    "origin ignored": Mutation(replaced(orders, "anchors_of", lambda origins, sizes: tuple(
        size // 2 for size in sizes)), options={"size": (3, 3), "origin": (1, 0)}),
    "dilation not turned": Mutation(replaced(orders, "mirrored", lambda origins, sizes: [0, 0]),
                                    "grey_dilation", {"size": (2, 3)}),
    "rounded, not cut off": Mutation(replaced(Element, "cut_off", saturated), **BELL,
                                     kind="int32"),
    "another order of sums": Mutation(replaced(linear, "form_of", lambda weights: "line"),
                                      **BELL, kind="float64"),
    "weights in float32": Mutation(changed(linear, "bell", lambda values: values.astype(
        np.float32).astype(float)), **BELL, kind="float64"),
    "a tap left out": Mutation(changed(taps.Geometry, "entries", lambda found: found[:-1]),
                               **BELL, kind="float64"),
    "a bound too small": Mutation(changed(narrow.Geometry, "bound", lambda found: 1e-3 * found),
                                  **BELL, shape=(300, 400)),
    "a table of flat windows off by one": Mutation(
        changed(narrow, "_flat", lambda found: found + 1), **BELL, level=200),
    "flat where it is not": Mutation(replaced(narrow._Guarded, "_flatness", never_uneven),
                                     **CURVE, shape=(300, 400)),
    "a flat bell where it is not": Mutation(replaced(
        bells.Bells, "_flatness", lambda self, f, twice: twice.equals(twice)), **BELL,
        shape=(300, 400)),
    "values of flat bells forgotten": Mutation(changed(bells, "missed", lambda bits: ~bits),
                                               "gaussian_filter", {"sigma": 3.0}, level=200),
    "differences of bells not weighted": Mutation(replaced(
        bells.Bells, "_differences", lambda self, f, twice: [twice, twice.same(0.0)]), **BELL,
        shape=(300, 400)),
    "a flat blur where it is not": Mutation(changed(Words, "unlike", lambda found: found.same(0)),
                                            **BELL, shape=(300, 400)),
    "values of flat blurs forgotten": Mutation(
        replaced(bells, "flats", lambda weight, middle: middle), "gaussian_filter",
        {"sigma": 0.5}, level=LEVEL),
    "no room between lines": Mutation(replaced(narrow.Geometry, "worker_bytes",
                                               common.FilterSizes.worker_bytes), **BELL),
    "not cut off between lines": Mutation(replaced(narrow.Fused, "_cut", lambda self, found: (
        narrow._Guarded._cut(self, found.plus(found.same(1))))), **BELL),
    "a mean without its half": Mutation(changed(narrow.Geometry, "_part", without_half),
                                        "uniform_filter", {"size": (19, 23)}),
    "a quotient rounded down": Mutation(changed(means, "reciprocal", lambda found: found - 1),
                                        "uniform_filter", {"size": (7, 7)}),
    "no room for means": Mutation(replaced(means.Geometry, "worker_bytes",
                                           common.FilterSizes.worker_bytes),
                                  "uniform_filter", {"size": (7, 7)}),
    "whole where it is not": Mutation(replaced(linear, "is_whole", lambda *given: True),
                                      **BELL),
    "borders off by one": Mutation(replaced(filters, "sources", lambda size, before, after, kind: (
        np.roll(np.clip(np.arange(-before, size + after), 0, size - 1), 1))),
        mode="nearest"),
    "denormals flushed": Mutation(flushing, "maximum_filter", {"size": (1, 3)}, "float32",
                                  shape=(4, 40)),
}


def check(mutation: Mutation) -> None:
    data = np.random.default_rng(0)
    with faults.patched(mutation.apply), released():
        for kept in (ENGINE.ready, ENGINE.calls, ENGINE.steps):
            kept.clear()
        image = guarded(mutation.shape, mutation.kind, "end")
        image[:] = random_pixels(mutation.shape, mutation.kind, data)
        if mutation.level:
            image[:] = mutation.level
        if mutation.name == "maximum_filter":
            image *= np.float32(1e-41)
        options = {**mutation.options, "mode": mutation.mode, "cval": 3.0, "axes": None}
        output = guarded(mutation.shape, mutation.kind, "end")
        gain = 0.0 if mutation.name in harness.RANKED + harness.EXTREME else 1.0
        harness.check(harness.Case(mutation.name, image, options, output, gain, "case"),
                      harness.Seen())


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_image_mutations")


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])

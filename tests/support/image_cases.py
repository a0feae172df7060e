"""Calls of tilewise.image between unmapped pages, drawn by hypothesis and judged by scipy."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import strategies as st

from tilewise import image as ours
from tilewise.bench.filter_cases import guarded, guarded_scratch, laid_out, released, untouched
from tilewise.bench.guarded import Mismatch
from tilewise.image import elsewhere

TYPES = ("uint8", "uint16", "int16", "int32", "float32", "float64", "bool")
BORDERS = ("reflect", "constant", "nearest", "mirror", "wrap", "grid-wrap")
LAYOUTS = ("plain", "plain", "rows back", "columns back", "every other", "turned", "read-only")
# shapes: what is filtered of them, and how they are made of a height, a width and a small number
SHAPES: dict[str, tuple[Any, Any]] = {
    "image": (None, lambda h, w, n: (h, w)), "line": (None, lambda h, w, n: (w,)),
    "colour": ((0, 1), lambda h, w, n: (h, w, 3)), "stack": ((1, 2), lambda h, w, n: (n, h, w)),
    "volume": (None, lambda h, w, n: (n, h, w)), "planes": ((-2, -1), lambda h, w, n: (2, n, h, w)),
}
SIZES = ((3, 3), (5, 5), (3, 1), (1, 4), (2, 3), (7, 7), (5, 3))
RANKED = ("median_filter", "rank_filter", "percentile_filter")
EXTREME = ("minimum_filter", "maximum_filter", "grey_erosion", "grey_dilation", "grey_opening",
           "grey_closing")
SMOOTH = ("gaussian_filter", "gaussian_laplace", "gaussian_gradient_magnitude")
SLOPES = ("sobel", "prewitt")
# of all axes: scipy's blur before the gradient goes across the others too, whatever its axes are
WHOLE = (*SLOPES, "gaussian_gradient_magnitude")
FILTERS = (*RANKED, *EXTREME, *SMOOTH, *SLOPES, "correlate", "convolve", "uniform_filter",
           "laplace")
FAR = ("correlate", "convolve", *RANKED)  # scipy's reflection is wrong for windows 4 times as large


@dataclass
class Case:
    """A filter by scipy's name, what it is called with, and how far float32 may be off."""

    name: str
    image: Any
    options: dict[str, Any]
    output: Any = None
    gain: float = 1.0  # the largest result of an image of ones, whatever their signs
    text: str = ""


@dataclass
class Seen:
    """What ran."""

    native: Counter[str] = field(default_factory=Counter)
    elsewhere: Counter[str] = field(default_factory=Counter)


@st.composite
def cases(draw: Any, filters: tuple[str, ...] = FILTERS, largest: int = 70) -> Case:
    """Any call; the values of images and weights come from one number."""
    name, kind = draw(st.sampled_from(filters)), draw(st.sampled_from(TYPES))
    form, layout = draw(st.sampled_from(tuple(SHAPES))), draw(st.sampled_from(LAYOUTS))
    h, w = (draw(st.one_of(st.integers(1, 9), st.integers(1, largest))) for _ in range(2))
    data = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    axes, shape = SHAPES[form][0], SHAPES[form][1](h, w, draw(st.integers(1, 4)))
    if name in WHOLE:
        axes = None
    count = len(axes) if axes else len(shape)
    window = [*draw(st.sampled_from(SIZES)), 2, 2][:count][::-1]
    image = _image(shape, kind, layout, data)
    options, gain = _options(draw, name, window, count, data)
    if name not in SLOPES:
        options["axes"] = axes
    options["mode"] = draw(st.sampled_from(BORDERS))
    options["cval"] = draw(st.sampled_from((0.0, 1.0, 40.5, -3.0)))
    output = guarded(shape, kind, "end") if draw(st.booleans()) and kind != "bool" else None
    text = f"{name} of {kind} {shape} {layout}, {options}"
    return Case(name, image, options, output, gain, text)


def _image(shape: tuple[int, ...], kind: str, layout: str, data: Any) -> Any:
    if len(shape) == 1:
        image = laid_out((1, *shape), "uint8" if kind == "bool" else kind, layout, data)[0]
    else:
        image = laid_out(shape, "uint8" if kind == "bool" else kind, layout, data)
    if kind == "bool":
        image &= 1
        image = image.view(bool)
    if layout == "read-only":
        image.flags.writeable = False
    return image


def _options(draw: Any, name: str, window: list[int], count: int,
             data: Any) -> tuple[dict[str, Any], float]:
    """Arguments of a filter, and its gain."""
    origin = [draw(st.integers(-(size // 2), (size - 1) // 2)) for size in window]
    if name in RANKED + EXTREME:
        options: dict[str, Any] = {"origin": origin}
        if draw(st.booleans()) or count == 3:
            options["size"] = window
        else:
            options["footprint"] = _footprint(window, data)
        taps = int(np.sum(options.get("footprint", np.ones(window))))
        options |= {"rank_filter": {"rank": draw(st.integers(-taps, taps - 1))},
                    "percentile_filter": {"percentile": draw(st.integers(0, 100))}}.get(name, {})
        return options, 0.0
    if name in SMOOTH:
        sigma = draw(st.sampled_from((0.6, 1.0, 1.7)))
        order = {"order": draw(st.integers(0, 2))} if name == "gaussian_filter" else {}
        return {"sigma": sigma, **order}, 8.0
    if name in SLOPES:
        return {"axis": draw(st.integers(-count, count - 1))}, 2.0 * 4 ** (count - 1)
    if name == "laplace":
        return {}, 4.0 * count
    if name == "uniform_filter":
        return {"size": window, "origin": origin}, 1.0
    integers = draw(st.booleans())
    weights = data.integers(-3, 4, window) if integers else data.standard_normal(window)
    return {"weights": weights, "origin": origin}, float(abs(weights).sum())


def _footprint(window: list[int], data: Any) -> Any:
    taps = data.random(window) < 0.6
    taps.flat[data.integers(taps.size)] = True
    return taps


def is_wrong_in_scipy(case: Case) -> bool:
    """scipy 1.17 reflects at -1 what lies twice two sizes before an image; NumPy does not.

    Ranks of lines, it takes from whole windows, whatever the footprint.
    """
    footprint = case.options.get("footprint")
    if case.image.ndim == 1 and case.name in RANKED and not np.all(footprint):
        return True
    if case.options["mode"] != "reflect" or (case.name not in FAR and footprint is None):
        return False
    given = next(case.options[key] for key in ("footprint", "size", "weights")
                 if case.options.get(key) is not None)
    sizes = np.shape(given) if case.name in FAR[:2] or footprint is not None else given
    axes = case.options["axes"] or range(case.image.ndim)
    return any(4 * case.image.shape[axis] <= size for axis, size in zip(axes, sizes))


@contextmanager
def watched(seen: Seen, name: str) -> Any:
    """Which calls were left to scipy."""
    given, left = elsewhere._by_scipy, []

    def noted(*args: Any) -> Any:
        left.append(args)
        return given(*args)

    with mock.patch.object(elsewhere, "_by_scipy", noted):
        yield
    (seen.elsewhere if left else seen.native)[name] += 1


def check(case: Case, seen: Seen) -> None:
    """One call, against scipy's; what is drawn is released by the caller."""
    from scipy import ndimage

    before, image = case.image.copy(), case.image
    expected = getattr(ndimage, case.name)(image, output=_fresh(case), **case.options)
    with guarded_scratch(), watched(seen, case.name):
        found = getattr(ours, case.name)(image, output=case.output, **case.options)
    if not np.array_equal(before, image):
        raise Mismatch(f"{case.text}: the image was written to")
    if case.output is not None and (found is not case.output or not untouched(case.output)):
        raise Mismatch(f"{case.text}: wrote beside the output")
    judge(case, found, expected)


def _fresh(case: Case) -> Any:
    return None if case.output is None else np.empty(case.output.shape, case.output.dtype)


def judge(case: Case, found: Any, expected: Any) -> None:
    """Equal; sums in float32, and running sums of float64, within some roundings."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise Mismatch(f"{case.text}: result is {found.dtype} {found.shape}")
    slack = 0.0
    if found.dtype.kind == "f" and case.gain:
        unit = 2.0 ** -21 if found.dtype == np.float32 else 2.0 ** -46
        largest = max(abs(case.image).max(initial=0.0), abs(case.options["cval"]))
        exact = found.dtype == np.float64 and case.name != "uniform_filter"
        slack = 0.0 if exact else unit * case.gain * float(largest)
    with np.errstate(invalid="ignore"):
        wrong = found != expected if not slack else ~(
            abs(found.astype(np.float64) - expected) <= slack)
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        raise Mismatch(f"{case.text}: {int(wrong.sum())} of {wrong.size} differ, first at {at}: "
                       f"{found[at]!r} for {expected[at]!r}")


__all__ = ["BORDERS", "FILTERS", "TYPES", "Case", "Seen", "cases", "check", "is_wrong_in_scipy",
           "judge", "released"]

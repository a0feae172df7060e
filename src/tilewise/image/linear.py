"""Weighted sums under windows: correlations, blurs, derivatives.

Results of integers and of float64 are summed in the order of scipy's, in float64, and cut off as
it does. Those in float32 are summed in float32, two axes at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ..core.errors import InvalidProblem
from ..core.filter import Filter
from ..core.lines import Lines, form_of, is_bell
from ..runtime.filters import NAMES
from .arguments import anchors_of, axes_of, border_of, for_each, kept, mirrored, output_for, whole
from .elsewhere import or_scipy
from .windows import SMALL, NotNative, Window, check_types, in_turn, is_whole

Along = tuple["Line", ...]


@dataclass(frozen=True, eq=False)
class Line:
    """Weights along one axis; of a mean, ones."""

    axis: int
    weights: Any
    anchor: int
    border: str
    mean: bool = False


@or_scipy("correlate")
def correlate(input: Any, weights: Any, output: Any = None, mode: Any = "reflect",
              cval: float = 0.0, origin: Any = 0, *, axes: Any = None) -> Any:
    """The sum of the values under a window, each times its weight.

    >>> correlate(np.arange(12.0).reshape(3, 4), np.ones((3, 3)))[1]
    array([39., 45., 54., 60.])
    """
    image, kernel, axes = _with_weights(input, weights, axes)
    return _correlated(image, kernel, output, mode, cval,
                       for_each(origin, len(axes), "origin"), axes)


@or_scipy("convolve")
def convolve(input: Any, weights: Any, output: Any = None, mode: Any = "reflect",
             cval: float = 0.0, origin: Any = 0, *, axes: Any = None) -> Any:
    """A correlation with the weights turned round."""
    image, kernel, axes = _with_weights(input, weights, axes)
    origins = mirrored(for_each(origin, len(axes), "origin"), kernel.shape)
    return _correlated(image, np.flip(kernel), output, mode, cval, origins, axes)


@or_scipy("gaussian_filter")
def gaussian(input: Any, sigma: Any, order: Any = 0, output: Any = None, mode: Any = "reflect",
             cval: float = 0.0, truncate: float = 4.0, *, radius: Any = None, axes: Any = None,
             nan: str = "keep") -> Any:
    """A blur by a bell of width `sigma`, or a derivative of one.

    With nan="omit", values that are NaN have no weight, and the others have more.

    >>> gaussian(np.eye(3), 0.5).round(2)[1]
    array([0.18, 0.64, 0.18])
    """
    image = np.asarray(input)
    if nan == "omit" and np.any(order):
        raise InvalidProblem(f"order is {order} and nan is 'omit', which needs order 0: weights of "
                             "derivatives have no mean")
    return _of_numbers(nan, image, output, cval, _bells(image.ndim, *map(
        kept, (axes, sigma, order, mode, truncate, radius))))


@or_scipy("uniform_filter")
def uniform(input: Any, size: Any = 3, output: Any = None, mode: Any = "reflect",
            cval: float = 0.0, origin: Any = 0, *, axes: Any = None, nan: str = "keep") -> Any:
    """The mean of the values under a box; with nan="omit", of those that are not NaN."""
    image = np.asarray(input)
    return _of_numbers(nan, image, output, cval,
                       _boxes(image.ndim, *map(kept, (axes, size, mode, origin))))


@lru_cache(maxsize=256)
def _boxes(ndim: int, axes: Any, size: Any, mode: Any, origin: Any) -> tuple[Line, ...]:
    axes = axes_of(axes, ndim)
    sizes = [whole(one, "size") for one in for_each(size, len(axes), "size")]
    if min(sizes, default=1) < 1:
        raise InvalidProblem(f"size is {size}, needs at least 1")
    anchors = anchors_of(for_each(origin, len(axes), "origin"), sizes)
    return tuple(Line(axis, np.ones(taps), anchor, border_of(border), mean=True)
                 for axis, taps, anchor, border in zip(axes, sizes, anchors,
                                                       for_each(mode, len(axes), "mode"))
                 if taps > 1)


@or_scipy("sobel")
def sobel(input: Any, axis: int = -1, output: Any = None, mode: Any = "reflect",
          cval: float = 0.0) -> Any:
    """The slope along an axis, smoothed across it by 1, 2, 1."""
    return _slope(input, axis, output, mode, cval, (1.0, 2.0, 1.0))


@or_scipy("prewitt")
def prewitt(input: Any, axis: int = -1, output: Any = None, mode: Any = "reflect",
            cval: float = 0.0) -> Any:
    """The slope along an axis, smoothed across it by 1, 1, 1."""
    return _slope(input, axis, output, mode, cval, (1.0, 1.0, 1.0))


def scharr(input: Any, axis: int = -1, output: Any = None, mode: Any = "reflect",
           cval: float = 0.0) -> Any:
    """The slope along an axis, smoothed across it by 3, 10, 3; scipy has none.

    That of scikit-image is divided by 16.
    """
    return _slope(input, axis, output, mode, cval, (3.0, 10.0, 3.0))


@or_scipy("laplace")
def laplace(input: Any, output: Any = None, mode: Any = "reflect", cval: float = 0.0, *,
            axes: Any = None) -> Any:
    """The sum of second differences along the axes."""
    image = np.asarray(input)
    return _added(image, output, cval, _curves(image.ndim, kept(axes), kept(mode)))


@lru_cache(maxsize=64)
def _curves(ndim: int, axes: Any, mode: Any) -> list[Along]:
    axes, curve = axes_of(axes, ndim), np.array([1.0, -2.0, 1.0])
    return [(Line(axis, curve, 1, border_of(border)),)
            for axis, border in zip(axes, for_each(mode, len(axes), "mode"))]


@or_scipy("gaussian_laplace")
def gaussian_laplace(input: Any, sigma: Any, output: Any = None, mode: Any = "reflect",
                     cval: float = 0.0, *, axes: Any = None, truncate: float = 4.0,
                     radius: Any = None) -> Any:
    """The sum of second derivatives of a blur."""
    image = np.asarray(input)
    axes = axes_of(axes, image.ndim)
    sigma, mode, truncate, radius = map(kept, (sigma, mode, truncate, radius))
    borders = for_each(mode, len(axes), "mode")  # one for each derivative, along all axes
    return _added(image, output, cval,
                  [_bells(image.ndim, axes, sigma, tuple(2 * (axis == along) for axis in axes),
                          border, truncate, radius) for along, border in zip(axes, borders)])


@or_scipy("gaussian_gradient_magnitude")
def gaussian_gradient_magnitude(input: Any, sigma: Any, output: Any = None, mode: Any = "reflect",
                                cval: float = 0.0, *, axes: Any = None, truncate: float = 4.0,
                                radius: Any = None) -> Any:
    """How steep a blur is, whatever the direction."""
    image = np.asarray(input)
    out = output_for(output, image)
    axes = axes_of(axes, image.ndim)
    total: Any = 0
    for along, border in zip(axes, for_each(mode, len(axes), "mode")):
        orders = [int(axis == along) for axis in axes]
        slope = gaussian(image, sigma, orders, out.dtype, border, cval, truncate, radius=radius,
                         axes=axes)
        total = np.multiply(slope, slope, slope) if along == axes[0] else np.add(
            total, np.multiply(slope, slope, slope), total)
    return np.sqrt(total, out, casting="unsafe")


def _with_weights(input: Any, weights: Any, axes: Any) -> tuple[Any, Any, tuple[int, ...]]:
    image, given = np.asarray(input), np.asarray(weights)
    axes = axes_of(axes, image.ndim)
    if given.dtype.kind == "c":
        raise NotNative(f"weights are {given.dtype}, needs real ones")
    if given.ndim != len(axes) or not given.size:
        raise InvalidProblem(f"weights have shape {given.shape}, needs {len(axes)} axes, those "
                             "that are filtered")
    return image, given.astype(np.float64), axes


def _correlated(image: Any, kernel: Any, output: Any, mode: Any, cval: float, origins: Any,
                axes: tuple[int, ...]) -> Any:
    out = output_for(output, image)
    check_types(image, out)
    window = Window(axes, kernel, anchors_of(origins, kernel.shape), border_of(mode), cval, "taps")
    in_turn(image, out, _in_any_order(image.dtype, out.dtype, [window]) or [window])
    return out


@lru_cache(maxsize=256)
def _bells(ndim: int, axes: Any, sigma: Any, order: Any, mode: Any, truncate: float,
           radius: Any) -> tuple[Line, ...]:
    """Bells along the axes; along those of no width there is nothing to do."""
    axes = axes_of(axes, ndim)
    given = zip(axes, *(for_each(value, len(axes), name) for value, name in (
        (sigma, "sigma"), (order, "order"), (mode, "mode"), (radius, "radius"))))
    return tuple(_bell(axis, float(width), whole(degree, "order"), border_of(border), truncate,
                       reach)
                 for axis, width, degree, border, reach in given if width > 1e-15)


def _bell(axis: int, sigma: float, order: int, border: str, truncate: float,
          radius: Any) -> Line:
    if not np.isfinite(sigma):
        raise InvalidProblem(f"sigma is {sigma}, needs a finite number")
    reach = int(truncate * sigma + 0.5) if radius is None else whole(radius, "radius")
    if reach < 0 or order < 0:
        raise InvalidProblem(f"radius is {reach} and order is {order}, neither may be negative")
    return Line(axis, bell(sigma, order, reach)[::-1], reach, border)


def bell(sigma: float, order: int, radius: int) -> Any:
    """A Gaussian, or its derivative: a polynomial times it, by the rule for products."""
    x, scale = np.arange(-radius, radius + 1), sigma * sigma
    values = np.exp(-0.5 / scale * x ** 2)
    values = values / values.sum()
    terms = np.zeros(order + 1)  # of the polynomial
    terms[0] = 1.0
    for _ in range(order):
        higher = np.append(terms[1:] * np.arange(1, order + 1), 0.0)
        terms = higher + np.append(0.0, terms[:-1]) * (1.0 / -scale)
    powers = x[:, None] ** np.arange(order + 1)
    return powers.dot(terms) * values if order else values


def _slope(input: Any, axis: int, output: Any, mode: Any, cval: float,
           across: tuple[float, ...]) -> Any:
    image = np.asarray(input)
    return _along_lines(image, output, cval, _slopes(image.ndim, axis, kept(mode), across))


@lru_cache(maxsize=64)
def _slopes(ndim: int, axis: int, mode: Any, across: tuple[float, ...]) -> Along:
    along = axes_of(whole(axis, "axis"), ndim)[0]
    borders = [border_of(one) for one in for_each(mode, ndim, "mode")]
    return (Line(along, np.array([-1.0, 0.0, 1.0]), 1, borders[along]),
            *(Line(other, np.array(across), 1, borders[other]) for other in range(ndim)
              if other != along))


def _added(image: Any, output: Any, cval: float, terms: list[Along]) -> Any:
    """The sum of several filters."""
    out = output_for(output, image)
    check_types(image, out)
    window = _sum_of(image.dtype, out.dtype, tuple(terms), cval)
    if window is not None:
        in_turn(image, out, [window])
        return out
    found = [_along_lines(image, out.dtype, cval, lines) for lines in terms]
    out[...] = found[0] if found else image
    for other in found[1:]:
        out += other
    return out


@lru_cache(maxsize=64)
def _sum_of(given: Any, dtype: Any, terms: tuple[Along, ...], cval: float) -> Window | None:
    """One window for a sum of lines over the same two axes."""
    windows = [window for lines in terms for window in _windows(given, lines, cval, dtype)]
    forms = {window.form for window in windows}
    if not forms <= {"sum", "whole"}:
        return None
    axes = sorted({axis for window in windows for axis in window.axes})
    borders = {window.border for window in windows}
    if len(windows) != len(terms) or len(axes) > 2 or len(borders) != 1 or (
            cval and "constant" in borders):
        return None
    reach = [max(window.anchor[window.axes.index(axis)] for window in windows
                 if axis in window.axes) for axis in axes]
    total = np.zeros([2 * one + 1 for one in reach])
    for window in windows:
        place = tuple(slice(one - window.anchor[window.axes.index(axis)],
                            one + window.anchor[window.axes.index(axis)] + 1)
                      if axis in window.axes else slice(one, one + 1)
                      for axis, one in zip(axes, reach))
        total[place] += np.reshape(window.kernel, total[place].shape)
    return Window(tuple(axes), total, tuple(reach), borders.pop(), cval, forms.pop())


def _along_lines(image: Any, output: Any, cval: float, lines: Along) -> Any:
    """One line after the other."""
    out = output_for(output, image)
    check_types(image, out)
    if lines:
        in_turn(image, out, _windows(image.dtype, lines, cval, out.dtype))
    else:
        out[...] = image
    return out


def _of_numbers(nan: str, image: Any, output: Any, cval: float, lines: Along) -> Any:
    """One line after the other; with "omit", NaN has no weight. Where all are NaN, so is the mean.
    """
    if nan not in ("keep", "omit"):
        raise InvalidProblem(f"nan is {nan!r}, needs 'keep' or 'omit'")
    if nan == "keep" or image.dtype.kind != "f":
        return _along_lines(image, output, cval, lines)
    out, missing = output_for(output, image), np.isnan(image)
    kind = out.dtype if out.dtype.kind == "f" else np.dtype(np.float64)
    weights = _along_lines((~missing).astype(kind), None, 1.0 - np.isnan(cval), lines)
    total = _along_lines(np.where(missing, 0, image).astype(kind), None, float(np.nan_to_num(cval)),
                         lines)
    with np.errstate(invalid="ignore"):
        mean = np.divide(total, weights, total)
        out[...] = mean if out.dtype.kind == "f" else np.rint(mean)
    return out


@lru_cache(maxsize=256)
def _windows(given: Any, lines: Along, cval: float, dtype: Any) -> list[Window]:
    """A window for each line; where no order of sums is asked for, for two of them at a time."""
    exact = [Window((line.axis,), line.weights, (line.anchor,), line.border, cval,
                    "mean" if line.mean else form_of(line.weights)) for line in lines]
    found = _in_any_order(given, dtype, exact)
    # a constant beyond an edge is not filtered by the lines before: their order counts
    if cval and any(window.border == "constant" for window in exact):
        return found or exact
    if found is None:
        return _paired(exact, lambda a, b: _fused(given, dtype, a, b))
    return _paired(sorted(found, key=lambda window: window.axes), lambda a, b: a.form)


def _in_any_order(given: Any, dtype: Any, windows: list[Window]) -> list[Window] | None:
    """The same windows for sums in float32, where these are as good."""
    if dtype == np.float32:
        return [replace(one, form="sum", kernel=one.kernel / (one.kernel.size if one.form == "mean"
                                                              else 1)) for one in windows]
    if is_whole(given, dtype, windows) and not any(one.form == "mean" for one in windows):
        return [replace(one, form="whole") for one in windows]
    return None


def _paired(windows: list[Window], form: Callable[[Window, Window], str]) -> list[Window]:
    """Windows along one axis each, the last two in one, and so on; `form` says of what form."""
    found: list[Window] = []
    for window in reversed(windows):
        after = found[0] if found else window
        made = "" if len(after.axes) > 1 or after is window or after.border != window.border \
            else form(window, after)
        if made:
            found[0] = replace(after, axes=window.axes + after.axes, form=made,
                               anchor=window.anchor + after.anchor,
                               kernel=Lines(window.kernel, after.kernel))
        else:
            found.insert(0, window)
    return found


def _fused(given: Any, dtype: Any, first: Window, then: Window) -> str:
    """How small integers are filtered along two axes at once; "" where they cannot be."""
    means = [window.form == "mean" for window in (first, then)]
    if given not in SMALL or dtype not in SMALL or first.axes > then.axes or (
            any(means) != all(means)) or 1 in (first.kernel.size, then.kernel.size):
        return ""
    if not any(means):
        both = is_bell(first.kernel) and is_bell(then.kernel)
        return "bells" if both and given == dtype == np.uint8 else "lines"
    p = Filter(1, 1, 1, 1, first.kernel.size, then.kernel.size, (0, 0), dtype=NAMES[given],
               out=NAMES[dtype], form="means")
    return "means" if p.has_sure_means else ""

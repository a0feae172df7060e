"""tilewise.image against scipy.ndimage: every filter, type, border, view and odd size."""

from __future__ import annotations

import inspect
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, seed, settings
from support.harness import in_process, sample
from support.image_cases import FILTERS, Seen, cases, check, is_wrong_in_scipy, released
from support.on_disk import growth_on_disk

import tilewise
from tilewise import filter2d, image
from tilewise.core import InvalidProblem, TilewiseError
from tilewise.core.isa import available
from tilewise.image import elsewhere
from tilewise.image.arrays import ENGINE

ndimage = pytest.importorskip("scipy").ndimage
ROWS = [row.name for row in available() if row.name != "amx"]
DATA = np.random.default_rng(5)
PHOTO = DATA.integers(0, 256, (40, 53), np.uint8)


def run_cases(number: int, count: int) -> dict[str, Any]:
    """So many random calls: how often each filter ran, and how often it was scipy's."""
    seen = Seen()

    @seed(number)
    @settings(max_examples=count, deadline=None, database=None,
              suppress_health_check=list(HealthCheck))
    @given(cases())
    def each(case: Any) -> None:
        with released(), np.errstate(all="ignore"):
            assume(not is_wrong_in_scipy(case))
            print(case.text.replace("\n", " "))
            check(case, seen)

    each()
    return vars(seen)


@pytest.mark.parametrize("isa, count", [("avx512", sample(1500, 90)), ("avx2", sample(400, 30)),
                                        ("generic", sample(200, 20))])
def test_random_calls_are_scipys(isa, count, monkeypatch):
    if isa not in ROWS:
        pytest.skip(f"this machine has no {isa}")
    monkeypatch.setenv("TILEWISE_ISA", isa)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = list(pool.map(lambda number: in_process("test_image_filters:run_cases", number,
                                                       count), (11, 12)))
    native = sum(sum(run["native"].values()) for run in runs)
    left = sum(sum(run["elsewhere"].values()) for run in runs)
    assert native > 3 * left  # windows over three axes, sums of bools, foreign constants
    assert isa != "avx512" or len({name for run in runs for name in run["native"]}) > 12


def test_every_filter_is_drawn():
    measures = {"maximum", "median", "minimum"}  # scipy's functions of these names are of labels
    scipys = {name for name in image.__all__ if hasattr(ndimage, name)}
    assert scipys - measures == {*FILTERS}


@pytest.mark.parametrize("name", FILTERS)
def test_signatures_are_scipys(name):
    """Names, order and defaults; what scipy hands on is named."""
    theirs = inspect.signature(getattr(ndimage, name)).parameters
    given = inspect.signature(getattr(image, name)).parameters
    known = [one for one in theirs.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    assert [(one.name, one.default) for one in known] == [
        (given[one.name].name, given[one.name].default) for one in known]
    assert [*given][:len(known)] == [one.name for one in known]


@pytest.mark.parametrize("kind", ["uint8", "uint16", "int16", "int32", "float32", "float64"])
def test_medians_of_photos(kind):
    """Several bands and strips; large ones are streamed past the caches."""
    big = DATA.integers(0, 256, (300, 2100)).astype(kind)
    for size in (3, 5):
        np.testing.assert_array_equal(image.median(big, size), ndimage.median_filter(big, size))
    for size in ((9, 31), (31, 9), (40, 1)):
        np.testing.assert_array_equal(image.maximum(big, size), ndimage.maximum_filter(big, size))


@pytest.mark.parametrize("kind", ["uint8", "float32"])
def test_calls_of_one_kind_share_nothing_but_code(kind):
    """Several passes, again and again, of other images, by several threads, also in place."""
    photos = [DATA.integers(0, 256, (90, 71)).astype(kind) for _ in range(6)]
    expected = [ndimage.grey_opening(photo, (3, 5)) for photo in photos]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda i: image.grey_opening(photos[i % 6], (3, 5)), range(60)))
        assert all(map(np.array_equal, found, 10 * expected))
        assert all(map(np.array_equal, pool.map(
            lambda photo: image.grey_opening(photo, [3, 5]), photos), expected))
    for photo, right in zip(photos, expected):
        np.testing.assert_array_equal(image.grey_opening(photo, (3, 5), output=photo), right)


def test_denormals_count():
    tiny = np.array([[3e-42, 1e-42, 2e-42]], np.float32)
    assert np.array_equal(image.median(tiny, (1, 3)), ndimage.median_filter(tiny, (1, 3)))
    assert image.minimum(tiny, (1, 3))[0, 1] == tiny[0, 1]


def test_what_is_not_a_number_stays_near():
    """A result is one of the values under its window, or NaN; elsewhere nothing changes."""
    x = DATA.standard_normal((20, 31)).astype(np.float32)
    x[7, 11] = np.nan
    for found, expected in ((image.median(x, 5), ndimage.median_filter(x, 5)),
                            (image.maximum(x, 5), ndimage.maximum_filter(x, 5))):
        far = np.ones(x.shape, bool)
        far[5:10, 9:14] = False
        assert np.array_equal(found[far], expected[far])
        near = found[~far]
        assert (np.isin(near, x) | np.isnan(near)).all()


@pytest.mark.parametrize("name", ["median", "maximum", "gaussian", "uniform"])
def test_output(name):
    argument = 3 if name != "gaussian" else 1.0
    run, expected = getattr(image, name), getattr(ndimage, f"{name}_filter")(PHOTO, argument)
    out = np.zeros((40, 2 * 53), np.uint8)[:, ::2]
    assert run(PHOTO, argument, output=out) is out
    assert np.array_equal(out, expected)
    in_place = PHOTO.copy()
    run(in_place, argument, output=in_place)
    assert np.array_equal(in_place, expected)
    assert run(PHOTO, argument, output=np.float64).dtype == np.float64
    with pytest.raises(InvalidProblem, match=r"output has shape \(3, 3\), needs"):
        run(PHOTO, argument, output=np.zeros((3, 3), np.uint8))


def test_colour_and_stacks():
    colour = DATA.integers(0, 256, (31, 22, 3), np.uint8)
    for i in range(3):
        assert np.array_equal(image.median(colour, 5, axes=(0, 1))[..., i],
                              image.median(colour[..., i], 5))
        assert np.array_equal(image.gaussian(colour, 2, axes=(0, 1))[..., i],
                              image.gaussian(colour[..., i], 2))
        np.testing.assert_array_equal(
            image.gaussian_gradient_magnitude(colour.astype(np.float64), 2, axes=(0, 1))[..., i],
            image.gaussian_gradient_magnitude(colour[..., i].astype(np.float64), 2))


def test_gradients_follow_their_axes():
    """Not across the other axes, where scipy blurs too."""
    colour = DATA.standard_normal((9, 8, 3))
    slopes = [ndimage.gaussian_filter(colour, 1.0, order, axes=(0, 1))
              for order in ((1, 0), (0, 1))]
    np.testing.assert_array_equal(image.gaussian_gradient_magnitude(colour, 1.0, axes=(0, 1)),
                                  np.sqrt(slopes[0] ** 2 + slopes[1] ** 2))


def test_scharr_is_that_of_scikit_image():
    filters = pytest.importorskip("skimage.filters")
    x = DATA.standard_normal((23, 19))
    for axis in (0, 1):
        np.testing.assert_allclose(image.scharr(x, axis), 16 * filters.scharr(x, axis=axis),
                                   atol=1e-12)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("mode", ["reflect", "constant", "wrap"])
def test_omitted_nan(kind, mode):
    """By the definition: sums of what there is, over its weights."""
    x = DATA.standard_normal((17, 23)).astype(kind)
    x[DATA.random(x.shape) < 0.3] = np.nan
    x[:9, :9] = np.nan
    there = ~np.isnan(x)
    for name, argument in (("uniform", 5), ("gaussian", 0.9)):
        theirs = getattr(ndimage, f"{name}_filter")
        weights = theirs(there.astype(np.float64), argument, mode=mode, cval=1.0)
        total = theirs(np.where(there, x, 0).astype(np.float64), argument, mode=mode, cval=2.0)
        weights[abs(weights) < 1e-12] = 0.0  # scipy's running sums leave some
        with np.errstate(all="ignore"):
            expected = np.where(weights > 0, total / weights, np.nan)
        found = getattr(image, name)(x, argument, mode=mode, cval=2.0, nan="omit")
        assert found.dtype == kind
        np.testing.assert_allclose(found, expected, atol=2e-6 if kind is np.float32 else 1e-10)
        assert np.isnan(found[4, 4])
        assert not np.isnan(found[12:]).any()


def test_omitting_nan_needs_a_mean():
    with pytest.raises(InvalidProblem, match="order is 1 and nan is 'omit', which needs order 0"):
        image.gaussian(PHOTO, 1.0, 1, nan="omit")
    with pytest.raises(InvalidProblem, match="nan is 'drop', needs 'keep' or 'omit'"):
        image.uniform(PHOTO, 3, nan="drop")
    assert np.array_equal(image.uniform(PHOTO, 3, nan="omit"), image.uniform(PHOTO, 3))


def test_unsharp_mask_is_that_of_scikit_image():
    filters = pytest.importorskip("skimage.filters")
    colour = DATA.integers(0, 256, (21, 18, 3), np.uint8)
    for options in ({}, {"preserve_range": True}, {"amount": 2.5, "radius": 2.0}):
        planes = [filters.unsharp_mask(colour[..., i], **options) for i in range(3)]
        np.testing.assert_allclose(image.unsharp_mask(colour, **options, channel_axis=-1),
                                   np.stack(planes, axis=-1), atol=1e-10)
    signed = DATA.standard_normal((21, 18)).astype(np.float32)
    np.testing.assert_allclose(image.unsharp_mask(signed), filters.unsharp_mask(signed), atol=1e-6)
    with pytest.raises(InvalidProblem, match="image is int16, needs uint8, uint16 or floats"):
        image.unsharp_mask(colour.astype(np.int16))


def test_volumes():
    volume = DATA.standard_normal((12, 20, 33)).astype(np.float32)
    np.testing.assert_allclose(image.gaussian(volume, 2.0), ndimage.gaussian_filter(volume, 2.0),
                               atol=2e-6)
    assert np.array_equal(image.minimum(volume, (3, 4, 5)),
                          ndimage.minimum_filter(volume, (3, 4, 5)))


def rank_on_disk(directory: str, size: int) -> int:
    return growth_on_disk(directory, size,
                          lambda source, out: image.rank(source, 20, 5, output=out))


def test_memory_stays_bounded(tmp_path):
    grown = in_process("test_image_filters:rank_on_disk", str(tmp_path), 6000)
    assert grown < 20 << 20  # the image has 36 MB


def test_tensors_are_arrays():
    found = image.median(torch.from_numpy(PHOTO), 3)
    assert np.array_equal(found, ndimage.median_filter(PHOTO, 3))


@pytest.mark.parametrize("call, message", [
    (lambda: image.median(PHOTO), "neither size nor footprint"),
    (lambda: image.median(PHOTO, 3, mode="mirrored"), "mode is 'mirrored', needs one of reflect"),
    (lambda: image.median(PHOTO, 3, origin=2), "origin is 2 for 3 taps, needs one from -1 to 1"),
    (lambda: image.median(PHOTO, (3, 3, 3)), "size has 3 entries"),
    (lambda: image.median(PHOTO, footprint=np.zeros((3, 3))), "needs 2 axes.*at least one tap"),
    (lambda: image.rank(PHOTO, 9, 3), "rank is 9, needs one of the footprint's 9"),
    (lambda: image.percentile(PHOTO, 101, 3), "percentile is 101"),
    (lambda: image.gaussian(PHOTO, 1, axes=(0, 0)), r"axes is \(0, 0\), needs different"),
    (lambda: image.correlate(PHOTO, np.ones(3)), r"weights have shape \(3,\), needs 2 axes"),
    (lambda: image.uniform(PHOTO, 0), "size is 0, needs at least 1"),
    (lambda: image.gaussian(PHOTO, 1, radius=-2), "radius is -2"),
])
def test_errors_say_what_is_needed(call, message):
    with pytest.raises(InvalidProblem, match=message):
        call()


@pytest.mark.parametrize("call, reason", [
    (lambda: image.median(PHOTO.astype(np.float32), 15),
     "footprint has 225 taps, needs at most 81"),
    (lambda: image.median(PHOTO.astype(np.int64), 3), "an array is int64, needs one of uint8"),
    (lambda: image.minimum(PHOTO, 3, mode="constant", cval=300), "cval is 300.0"),
    (lambda: image.grey_erosion(PHOTO, structure=np.ones((3, 3))), "structure is given"),
    (lambda: image.sobel(PHOTO > 99), "an array is bool"),
])
def test_the_rest_is_scipys(call, reason, monkeypatch):
    asked = []

    def missing(name: str, why: Exception) -> Any:
        asked.append(str(why))
        raise TilewiseError("none")

    assert isinstance(call(), np.ndarray)
    monkeypatch.setattr(elsewhere, "_by_scipy", missing)
    with pytest.raises(TilewiseError, match="none"):
        call()
    assert reason in asked[0]


def test_without_scipy_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(TilewiseError, match=r"(?s)at most 81.*pip install scipy") as caught:
        image.median(PHOTO.astype(np.uint16), 15)
    assert "median_filter" in str(caught.value)


def test_explain_tells_every_pass_and_every_method():
    told = image.explain(image.gaussian, PHOTO.astype(float), 1.0)
    assert told.count(" on cpu:") == 2  # down, then across
    assert "filter_taps" in told.splitlines()[1]
    assert "filter_direct     form is even, needs sum, whole" in told
    assert image.explain(image.gaussian, PHOTO, 1.0).count(" on cpu:") == 1  # both at once
    large = PHOTO.astype(np.uint16)
    assert image.explain(image.median, large, 15) == "no generated code ran: it is scipy's"


def test_the_module_is_part_of_the_package():
    assert tilewise.image is image


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_where_it_is_covered(value):
    """Also where a transform of the whole image would be faster."""
    x, kernel = DATA.normal(size=(200, 210)).astype(np.float32), DATA.normal(size=(61, 61))
    plan = image.explain(image.correlate, x, kernel)
    assert "filter_fft" in str(plan)
    for algorithm in (None, "filter_fft"):
        x[100, 90] = 0
        whole = filter2d(x, kernel, algorithm=algorithm)
        x[100, 90] = value
        found = filter2d(x, kernel, algorithm=algorithm)
        covered = np.zeros(x.shape, bool)
        covered[70:131, 60:121] = True
        assert np.isfinite(found[~covered]).all()
        assert not np.isfinite(found[covered]).any()
        np.testing.assert_allclose(found[~covered], whole[~covered], atol=1e-3)


def test_borders_for_each_derivative():
    """scipy gives the i-th to the i-th derivative, along all axes."""
    x, modes = DATA.normal(size=(20, 24)), ("reflect", "wrap")
    for ours, theirs in ((image.gaussian_laplace, ndimage.gaussian_laplace),
                         (image.gaussian_gradient_magnitude, ndimage.gaussian_gradient_magnitude)):
        np.testing.assert_array_equal(ours(x, 1.0, mode=modes), theirs(x, 1.0, mode=modes))


def test_nan_is_no_argument_of_scipy():
    whole = DATA.integers(0, 99, (9, 9))
    np.testing.assert_array_equal(image.gaussian(whole, 1, nan="keep"),
                                  ndimage.gaussian_filter(whole, 1))
    with pytest.raises(TilewiseError, match="astype"):
        image.uniform(np.ones((9, 9), np.float16), 3, nan="omit")
    holes = np.full((40, 40), np.nan)
    holes[:, :5] = 5.0
    assert set(image.gaussian(holes, 1, output=np.uint8, nan="omit")[0, :8]) == {5}


@pytest.mark.parametrize(("call", "message"), [
    (lambda x: image.median(x, 2.7), "size is 2.7, needs an integer"),
    (lambda x: image.median(x, -3), "size is -3, needs at least 1"),
    (lambda x: image.rank(x, 1.5, 3), "rank is 1.5, needs an integer"),
    (lambda x: image.gaussian(x, 1, radius=2.5), "radius is 2.5, needs an integer"),
    (lambda x: image.gaussian(x, np.inf), "sigma is inf, needs a finite number"),
    (lambda x: image.gaussian(x, 1, 1.5), "order is 1.5, needs an integer"),
    (lambda x: image.sobel(x, (0, 1)), "needs an integer"),
    (lambda x: image.gaussian(x, 1, axes=0.0), "axes is 0.0, needs an integer"),
    (lambda x: image.gaussian(x, 1, axes="ab"), "axes is 'a', needs an integer"),
    (lambda x: image.minimum(x, 3, mode="constant", cval="3"), "cval is '3', needs a real number"),
    (lambda x: image.gaussian(x.astype(np.float16), 1),
     "float64: array.astype(np.float32)"),
    (lambda x: image.gaussian(x, 1, output=np.float16), "an array is float16, which scipy does"),
    (lambda x: image.median(x.astype(object), 3), "an array is object, which scipy does not"),
    (lambda x: image.grey_opening(x.astype("M8[s]"), 3), "an array is datetime64[s]"),
    (lambda x: image.unsharp_mask(x, channel_axis=7), "needs different ones of the image's 2")])
def test_arguments_that_are_not_rounded(call, message):
    with pytest.raises(TilewiseError, match=re.escape(message)):
        call(np.ones((9, 9), np.float32))


def test_large_kernels_are_not_kept():
    """By calls: what was prepared is, within its limit."""
    x, kernel = np.zeros((16, 16), np.float32), DATA.normal(size=(301, 301))
    image.correlate(x, kernel)
    keys = [key for key, _ in ENGINE.calls.items()]
    assert max(len(part) for key in keys for part in key if isinstance(part, bytes)) <= 4096


@pytest.mark.parametrize("name, options", [
    ("median_filter", {"size": 3}), ("grey_opening", {"size": (3, 2)}),
    ("gaussian_filter", {"sigma": 1.0}), ("uniform_filter", {"size": 3}), ("laplace", {})])
@pytest.mark.parametrize("make", [
    lambda: np.zeros((0, 5), np.uint8), lambda: np.zeros((4, 0), np.float32),
    lambda: PHOTO[:20, :30].astype(">u2"), lambda: PHOTO[:20, :30].astype(">f4"),
    lambda: np.ma.masked_greater(PHOTO[:20, :30], 99), lambda: PHOTO[:9, :9].tolist(),
    lambda: np.float32(3.0)],
    ids=["no rows", "no columns", "big-endian", "big-endian floats", "masked", "lists", "scalar"])
def test_unusual_images_are_as_in_scipy(make, name, options):
    """Sizes of zero, foreign byte orders, masks, which are ignored, lists and numbers."""
    x = make()
    if name in ("grey_opening", "median_filter") and np.ndim(x) == 0:
        options = {"size": ()}
    found, theirs = (getattr(module, name)(x, **options) for module in (image, ndimage))
    assert (type(found), found.dtype, found.shape) == (type(theirs), theirs.dtype, theirs.shape)
    np.testing.assert_allclose(found, theirs, atol=1e-4 if found.dtype.kind == "f" else 0)

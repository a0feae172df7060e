"""filter2d's borders have the names, the meanings and the default of scipy.ndimage."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import tilewise
from tilewise.bench.filter_cases import random_pixels
from tilewise.core import InvalidProblem

PAGE = Path(__file__).parents[2] / "docs" / "filter2d.md"
DATA = np.random.default_rng(3)
IMAGE = DATA.standard_normal((9, 7))
KERNEL = DATA.standard_normal((5, 5))
SCIPY = ("reflect", "nearest", "mirror", "wrap", "constant")


def test_the_default_is_scipys():
    ndimage = pytest.importorskip("scipy").ndimage
    for image in (IMAGE, torch.from_numpy(IMAGE)):
        np.testing.assert_allclose(np.asarray(tilewise.filter2d(image, KERNEL)),
                                   ndimage.correlate(IMAGE, KERNEL), atol=1e-12)


def test_edges_of_an_even_image_stay_as_bright():
    image = np.full((6, 8), 200, np.uint8)
    assert (tilewise.filter2d(image, np.ones((3, 3)) / 9) == 200).all()


@pytest.mark.parametrize("border", SCIPY)
def test_scipys_names(border):
    ndimage = pytest.importorskip("scipy").ndimage
    value = 2.5 if border == "constant" else None
    theirs = ndimage.correlate(IMAGE, KERNEL, mode=border, cval=value or 0.0)
    for image in (IMAGE, torch.from_numpy(IMAGE)):
        ours = tilewise.filter2d(image, KERNEL, border=border, value=value)
        np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-12)


@pytest.mark.parametrize("synonym, border", [("zero", "constant"), ("replicate", "nearest")])
def test_synonyms(synonym, border):
    assert np.array_equal(tilewise.filter2d(IMAGE, KERNEL, border=synonym),
                          tilewise.filter2d(IMAGE, KERNEL, border=border))


@pytest.mark.parametrize("border", ["reflect", "nearest", "mirror", "wrap", "zero", "replicate"])
@pytest.mark.parametrize("image", [IMAGE, torch.from_numpy(IMAGE)], ids=["array", "tensor"])
def test_a_value_needs_constant(image, border):
    with pytest.raises(InvalidProblem, match=r'value is 1.0 .*pass border="constant"'):
        tilewise.filter2d(image, KERNEL, border=border, value=1.0)
    with pytest.raises(InvalidProblem, match=r'border is "reflect", .*pass border="constant"'):
        tilewise.filter2d(image, KERNEL, value=0.0)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(InvalidProblem, match="needs one of reflect, nearest, mirror, wrap, con"):
        tilewise.filter2d(IMAGE, KERNEL, border="symmetric")


def test_the_table_of_the_docs_says_what_scipy_torch_numpy_and_opencv_do():
    """Every row of the table, against the libraries it names."""
    cv2, ndimage = pytest.importorskip("cv2"), pytest.importorskip("scipy").ndimage
    rows = re.findall(r'^\| `"(\w+)"`.*$', PAGE.read_text(), re.M)
    assert rows == list(SCIPY)
    line = np.arange(1.0, 5.0)[None]
    for border in rows:
        cells = next(row for row in PAGE.read_text().splitlines()
                     if row.startswith(f'| `"{border}"')).replace("\\|", "!").split("|")[2:]
        shown, scipy_, torch_, numpy_, opencv = (cell.strip().strip("`") for cell in cells[:5])
        wide = [ndimage.correlate(line, [[0.0] * i + [1.0] + [0.0] * (6 - i)], mode=scipy_)
                [0, 0 if i < 4 else 3] for i in (0, 1, 2, 4, 5, 6)]
        letters = [x for x in shown if x not in " !"]
        assert [dict(zip("abcd0", (1, 2, 3, 4, 0)))[x] for x in letters] == [
            *wide[:3], 1, 2, 3, 4, *wide[3:]]
        padded = np.array([[*wide[:3], 1, 2, 3, 4, *wide[3:]]])
        assert np.array_equal(np.pad(line[0], 3, numpy_)[None], padded)
        if torch_:
            theirs = torch.nn.functional.pad(torch.from_numpy(line[None]), (3, 3), torch_)
            assert np.array_equal(theirs[0], padded)
        kind = getattr(cv2, opencv)
        assert np.array_equal(cv2.copyMakeBorder(line, 0, 0, 3, 3, kind), padded)


def test_the_signature_says_the_default():
    parameters = inspect.signature(tilewise.filter2d).parameters
    assert (parameters["border"].default, parameters["value"].default) == ("reflect", None)


BOOLS = DATA.random((13, 11, 3)) > 0.5


@pytest.mark.parametrize("view", [BOOLS, BOOLS[::-2, 1:], BOOLS.transpose(1, 0, 2), BOOLS[..., 1]],
                         ids=["plain", "rows back", "turned", "one colour"])
def test_bools_are_zeros_and_ones(view):
    expected = tilewise.filter2d(view.astype(np.float32), KERNEL)
    found = tilewise.filter2d(view, KERNEL)
    assert found.dtype == np.float32
    assert np.array_equal(found, expected)
    for dtype in (np.uint8, np.float64, np.int32):
        assert np.array_equal(tilewise.filter2d(view, KERNEL, dtype=dtype),
                              tilewise.filter2d(view.astype(np.uint8), KERNEL, dtype=dtype))
    out = np.empty(view.shape, np.int16)
    assert tilewise.filter2d(view, np.ones((3, 3)), out=out) is out
    assert np.array_equal(out, tilewise.filter2d(view.astype(np.int16), np.ones((3, 3))))


def test_bool_tensors():
    found = tilewise.filter2d(torch.from_numpy(BOOLS), KERNEL)
    assert found.dtype == torch.float32
    assert np.array_equal(found, tilewise.filter2d(BOOLS, KERNEL))
    out = torch.empty(BOOLS.shape, dtype=torch.float64)
    assert tilewise.filter2d(torch.from_numpy(BOOLS), KERNEL, out=out) is out
    assert np.array_equal(out, tilewise.filter2d(BOOLS, KERNEL, dtype=np.float64))


def test_no_result_is_bool():
    for change in ({"dtype": bool}, {"out": np.empty(BOOLS.shape, bool)}):
        with pytest.raises(InvalidProblem, match="the result is bool, needs one of uint8"):
            tilewise.filter2d(BOOLS, KERNEL, **change)


@pytest.mark.parametrize("algorithm", ["filter_direct", "filter_separable"])
def test_int32_is_exact(algorithm):
    """All values and sums fit into a float64; a float32 would lose their last bits."""
    image = random_pixels((21, 35), "int32", DATA) // 9
    found = tilewise.filter2d(image, np.ones((5, 5)), dtype=np.float64, algorithm=algorithm)
    wide = np.lib.stride_tricks.sliding_window_view(
        np.pad(image.astype(np.int64), 2, "symmetric"), (5, 5)).sum((2, 3))
    assert np.array_equal(found, wide)
    assert np.array_equal(tilewise.filter2d(image, np.ones((5, 5)), algorithm=algorithm),
                          np.clip(wide, -2**31, 2**31 - 1))


def test_int32_rounds_to_even_and_saturates():
    image = np.array([[2**31 - 1, -2**31, 2**24 + 1, 1, 3, -5]], np.int32)
    assert tilewise.filter2d(image, [[1.0]]).tolist() == image.tolist()
    assert tilewise.filter2d(image, [[0.5]]).tolist() == [
        [2**30, -2**30, 2**23, 0, 2, -2]]
    assert tilewise.filter2d(image, [[-2.0]]).tolist() == [
        [-2**31, 2**31 - 1, -2**25 - 2, -2, -6, 10]]
    nan = np.array([[np.nan, np.inf, -np.inf]], np.float32)
    assert tilewise.filter2d(nan, [[1.0]], dtype=np.int32).tolist() == [[-2**31, 2**31 - 1, -2**31]]


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.int32])
def test_kernels_have_gradients_with_images_of_integers(kind):
    image = (torch.rand(9, 8) * 2).to(kind)
    kernels = [torch.randn(3, 3, requires_grad=True)]
    kernels.append(kernels[0].detach().clone().requires_grad_())
    for pixels, kernel in zip((image, image.float()), kernels):
        tilewise.filter2d(pixels, kernel, dtype=torch.float32).square().sum().backward()
    torch.testing.assert_close(kernels[0].grad, kernels[1].grad)

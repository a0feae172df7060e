"""Blurs of bytes where sums lie near integers: smooth, flat and saturated images."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise import image

ndimage = pytest.importorskip("scipy").ndimage
DATA = np.random.default_rng(5)
HIGH, WIDE = 61, 83


def enlarged():
    few = DATA.integers(0, 256, (HIGH // 8 + 2, WIDE // 8 + 2)).astype(float)
    return ndimage.zoom(few, 8, order=1)[:HIGH, :WIDE].clip(0, 255)


IMAGES = {
    "enlarged": enlarged,
    "ramps": lambda: np.add.outer(2 * np.arange(HIGH), np.arange(WIDE)) % 256,
    "two levels": lambda: 128 + DATA.integers(0, 2, (HIGH, WIDE)),
    "specks": lambda: np.where(DATA.random((HIGH, WIDE)) < 0.005, 31, 255),
    "flat": lambda: np.full((HIGH, WIDE), 201),
}


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("sigma", [1.0, 3.0, 4.5])  # the last has pairs in an emitted loop
def test_blurs_equal_scipys(name, sigma):
    x = IMAGES[name]().astype(np.uint8)
    np.testing.assert_array_equal(image.gaussian(x, sigma), ndimage.gaussian_filter(x, sigma))


@pytest.mark.parametrize("weights", [[0.25, 0.5, 0.25], [0.2] * 5, [1e-33, 0.3, 0.4, 0.3, 1e-33],
                                     [1e-20, 0.5, 0.0, 0.5, 1e-20], [-0.25, 1.5, -0.25]])
def test_lines_that_are_bells_or_nearly(weights):
    x = IMAGES["ramps"]().astype(np.uint8)
    for kernel in (np.array([weights]), np.array([weights]).T):
        np.testing.assert_array_equal(image.correlate(x, kernel), ndimage.correlate(x, kernel))


@pytest.mark.parametrize("sigma", [(0.1, 1.0), (1.0, 0.1), (0.1, 0.1)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16])
def test_an_axis_may_have_one_tap(sigma, dtype):
    pixels = DATA.integers(0, 120, (HIGH, WIDE)).astype(dtype)
    np.testing.assert_array_equal(image.gaussian(pixels, sigma),
                                  ndimage.gaussian_filter(pixels, sigma))

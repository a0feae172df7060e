"""tilewise.filter2d with kernels of every size that a float can have, against scipy."""

from __future__ import annotations

import numpy as np
import pytest

import tilewise
from tilewise.core.lowrank import rank_of

DATA = np.random.default_rng(5)
FULL = DATA.standard_normal((7, 7))
LOW = DATA.standard_normal((9, 2)) @ DATA.standard_normal((2, 9))
LARGE = DATA.standard_normal((31, 31))  # large enough for every algorithm


@pytest.mark.parametrize("exponent", [-900, -565, -512, -200, 0, 200, 512, 531, 900, 1000])
@pytest.mark.parametrize("kernel, rank", [(FULL, 7), (LOW, 2), (np.ones((5, 5)), 1)])
def test_the_rank_of_a_kernel_does_not_depend_on_its_scale(kernel, rank, exponent):
    for work in ("f32", "f64"):
        assert rank_of(np.ldexp(kernel, exponent), work) == rank


def check(kernel: np.ndarray, exponent: int, dtype: str, algorithm: str | None = None) -> None:
    """scipy leaves out coefficients below 2.2e-16, so it filters with the kernel as it is."""
    ndimage = pytest.importorskip("scipy").ndimage
    image = np.random.default_rng(6).standard_normal((70, 90)).astype(dtype)
    found = tilewise.filter2d(image, np.ldexp(kernel, exponent), algorithm=algorithm,
                              border="zero").astype(np.float64)
    expected = ndimage.correlate(image.astype(np.float64), kernel, mode="constant")
    error = np.abs(np.ldexp(found, -exponent) - expected).max() / np.abs(expected).max()
    assert error < (1e-13 if dtype == "float64" else 1e-5)  # also fails where it is NaN


@pytest.mark.parametrize("exponent", [-997, -565, -332, 332, 531, 997])  # 1e-300 to 1e300
@pytest.mark.parametrize("kernel", [FULL, LOW, LARGE], ids=["full", "low", "large"])
def test_float64(kernel, exponent):
    check(kernel, exponent, "float64")


@pytest.mark.parametrize("exponent", [-110, -64, 64, 115])  # 1e-33 to 4e34
@pytest.mark.parametrize("kernel", [FULL, LOW, LARGE], ids=["full", "low", "large"])
def test_float32(kernel, exponent):
    check(kernel, exponent, "float32")


@pytest.mark.parametrize("dtype, exponent", [("float64", 1013), ("float64", -990),
                                             ("float32", 119), ("float32", -105)])
def test_no_sum_inside_overflows_where_the_result_does_not(dtype, exponent):
    """Spectra are larger than what they are the spectra of."""
    check(LARGE, exponent, dtype, "filter_fft")

"""Filters of arrays block by block: equal to those of the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilewise import image
from tilewise.core import InvalidProblem

DATA = np.random.default_rng(3)
PHOTO = DATA.integers(0, 256, (97, 41), np.uint8)
FILTERS = {"median": (5,), "maximum": (15,), "gaussian": (1.5,), "uniform": (4,), "sobel": (0,),
           "laplace": (), "grey_opening": (5,), "gaussian_laplace": (1.0,),
           "gaussian_gradient_magnitude": (1.0,)}


@pytest.mark.parametrize("mode", ["reflect", "mirror", "constant", "wrap"])
@pytest.mark.parametrize("name", FILTERS)
def test_blocks_make_the_whole(name, mode):
    run, args = getattr(image, name), FILTERS[name]
    expected = run(PHOTO, *args, mode=mode)
    found = image.in_blocks(run, PHOTO, np.zeros_like(PHOTO), *args, block=700, mode=mode)
    np.testing.assert_array_equal(found, expected)


def test_files(tmp_path):
    source, out = (np.memmap(tmp_path / name, np.float32, "w+", shape=(300, 64))
                   for name in ("in", "out"))
    source[:] = DATA.random(source.shape, np.float32)
    whole, told = np.array(source), []
    image.in_blocks(image.median, source, out, 3, block=9000,
                    progress=lambda done, rows: told.append((done, rows)))
    np.testing.assert_array_equal(np.array(out), image.median(whole, 3))
    assert len(told) > 5
    assert told[-1] == (300, 300)
    assert told == sorted(told)


def test_private_pages_stay(tmp_path):
    """A copy on write would lose what only memory has."""
    (tmp_path / "in").write_bytes(bytes(4096 * 64))
    source = np.memmap(tmp_path / "in", np.uint8, "c", shape=(4096, 64))
    source[:] = 7
    found = image.in_blocks(image.median, source, np.zeros((4096, 64), np.uint8), 3, block=9000)
    assert (found == 7).all()


def test_reach():
    assert image.reach(image.uniform, (3, 8)) == (1, 4)
    assert image.reach(image.gaussian, 2.0, ndim=3, dtype=np.float32) == (8, 8, 8)
    assert image.reach(image.grey_closing, (1, 5)) == (0, 4)
    assert image.reach(image.median, 3, axes=(1, 2), ndim=3) == (0, 1, 1)
    assert image.reach(image.maximum, 5, origin=(2, -1)) == (4, 3)
    with pytest.raises(InvalidProblem, match=r"runs in scipy for these arguments.*give depth="):
        image.reach(image.grey_erosion, structure=np.ones((3, 3)))


def test_shapes_must_agree():
    with pytest.raises(InvalidProblem, match=r"out has shape \(3, 3\), needs that of the source"):
        image.in_blocks(image.median, PHOTO, np.zeros((3, 3), np.uint8), 3)


@pytest.mark.parametrize("mode", ["reflect", "mirror", "constant", "wrap"])
def test_dask(mode):
    da: Any = pytest.importorskip("dask.array")
    chunks = da.from_array(PHOTO, chunks=(31, 17))
    for name, args in FILTERS.items():
        run = getattr(image, name)
        found = image.on_dask(run, chunks, *args, mode=mode)
        assert found.dtype == PHOTO.dtype
        np.testing.assert_array_equal(found.compute(), run(PHOTO, *args, mode=mode))


def test_zarr(tmp_path):
    zarr: Any = pytest.importorskip("zarr")
    source, out = (zarr.open_array(str(tmp_path / name), mode="w", shape=PHOTO.shape,
                                   chunks=(20, 20), dtype="u1") for name in ("in", "out"))
    source[:] = PHOTO
    image.in_blocks(image.median, source, out, 5, block=1000)
    np.testing.assert_array_equal(out[:], image.median(PHOTO, 5))

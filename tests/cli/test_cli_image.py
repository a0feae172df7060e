"""tilewise image filters picture files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tilewise import image
from tilewise.cli import OK, USAGE, main
from tilewise.cli.image import FILTERS

Image = pytest.importorskip("PIL.Image")
COLOUR = np.random.default_rng(0).integers(0, 256, (24, 31, 3), np.uint8)


@pytest.fixture(autouse=True)
def photo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(COLOUR).save("photo.png")
    Image.fromarray(COLOUR[..., 0]).save("grey.png")


def test_a_median(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["image", "photo.png", "--filter", "median", "--size", "3", "-o", "b.png"]) == OK
    assert np.array_equal(np.array(Image.open("b.png")), image.median(COLOUR, 3, axes=(0, 1)))
    assert "b.png: median of 24x31x3 uint8" in capsys.readouterr().out


@pytest.mark.parametrize("name", FILTERS)
def test_every_filter_of_a_grey_picture(name: str) -> None:
    assert main(["image", "grey.png", "--filter", name, "-o", "b.png"]) == OK
    found = np.array(Image.open("b.png"))
    assert found.shape == (24, 31)
    assert not np.array_equal(found, COLOUR[..., 0])


def test_a_place_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["image", "grey.png", "-o", "no/such/b.png"]) == USAGE
    assert "needs a directory that exists" in capsys.readouterr().err


def test_deep_grey_stays_deep():
    deep = np.random.default_rng(0).integers(0, 65536, (20, 30)).astype(np.uint16)
    Image.fromarray(deep).save("deep.png")
    assert main(["image", "deep.png", "--filter", "median", "--size", "3", "-o", "b.png"]) == OK
    assert np.array_equal(np.array(Image.open("b.png")), image.median(deep, 3))


def test_what_pictures_have_besides_colours():
    """Transparency, and which side is up."""
    Image.new("LA", (8, 6), (90, 40)).save("la.png")
    assert main(["image", "la.png", "-o", "b.png"]) == OK
    assert Image.open("b.png").getpixel((0, 0)) == (90, 90, 90, 40)
    turned = Image.new("RGB", (8, 6))
    exif = turned.getexif()
    exif[274] = 6
    turned.save("turned.jpg", exif=exif)
    assert main(["image", "turned.jpg", "-o", "b.png"]) == OK
    assert Image.open("b.png").size == (6, 8)


def test_pixels_that_are_no_bytes_are_refused(capsys):
    Image.new("F", (8, 6)).save("f.tiff")
    assert main(["image", "f.tiff", "-o", "b.png"]) == USAGE
    assert "mode F" in capsys.readouterr().err

"""The pictures of docs/images.md are those that the script makes."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_pictures_are_those_of_the_script(monkeypatch, tmp_path):
    io = pytest.importorskip("skimage.io")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import make_image_pictures

    make_image_pictures.main(tmp_path)
    made = sorted(path.name for path in tmp_path.iterdir())
    assert len(made) == 4
    for name in made:
        shown = io.imread(ROOT / "docs" / "images" / name)
        # the last bits of a sum may differ between instruction sets
        assert abs(io.imread(tmp_path / name).astype(int) - shown).max() <= 1
        assert (ROOT / "docs" / "images" / name).stat().st_size < 150 << 10

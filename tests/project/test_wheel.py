"""The wheel: the same bytes from two builds, small, and with a list of what it is made of."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest
from support.pages import ROOT

builders = pytest.importorskip("hatchling.builders.wheel")
tomllib = pytest.importorskip("tomllib")  # Python 3.11
LARGEST = 1 << 20
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "sbom.cdx.json")


def copied(to: Path, modified: int) -> Path:
    """What a wheel is built from, with other times of files."""
    to.mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, to / name)
    shutil.copytree(ROOT / "src", to / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for path in to.rglob("*"):
        os.utime(path, (modified, modified))
    return to


def built(root: Path) -> Path:
    [wheel] = builders.WheelBuilder(str(root)).build(directory=str(root / "dist"),
                                                     versions=["standard"])
    return Path(wheel)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place, before = tmp_path_factory.mktemp("wheels"), dict(os.environ)
    os.environ["SOURCE_DATE_EPOCH"] = "1700000000"
    try:
        return [built(copied(place / str(time), time)) for time in (1_000_000_000, 1_600_000_000)]
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_two_builds_are_the_same(wheels: list[Path]) -> None:
    first, second = (hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels)
    assert first == second
    assert wheels[0].name == wheels[1].name


def test_the_wheel_is_small_and_has_no_machine_code(wheels: list[Path]) -> None:
    assert wheels[0].stat().st_size < LARGEST
    names = zipfile.ZipFile(wheels[0]).namelist()
    assert all(name.endswith((".py", ".typed", ".json")) for name in names
               if ".dist-info/" not in name), names


def test_the_wheel_tells_what_it_is_made_of(wheels: list[Path]) -> None:
    whole = zipfile.ZipFile(wheels[0])
    [name] = [name for name in whole.namelist() if ".dist-info/sboms/" in name]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bom = json.loads(whole.read(name))
    assert bom["metadata"]["component"]["version"] == project["version"]
    needed = {text.split(">")[0] for text in project["dependencies"]}
    assert {component["name"] for component in bom["components"]} == needed



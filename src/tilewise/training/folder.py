"""A directory with a folder of images for each class; decoded by Pillow, which is optional."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import NotInstalled, TilewiseError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
HELD_OUT = 10  # without a folder "test", every tenth image of a class is for testing

Entry = tuple[Path, int]  # a file and the number of its class


class FolderImages:
    """Image files, decoded and scaled to `size` when read."""

    def __init__(self, entries: Sequence[Entry], classes: int, size: int, channels: int) -> None:
        self._decode, self._paths = _decoder(size, channels), [path for path, _ in entries]
        self.labels = torch.tensor([label for _, label in entries])
        self.classes = classes

    def read(self, numbers: Sequence[int]) -> Tensor:
        with ThreadPoolExecutor(4) as pool:  # decoding does not hold Python's lock
            images = list(pool.map(self._decode, [self._paths[number] for number in numbers]))
        x = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
        return x.contiguous().float().mul_(2 / 255).sub_(1)


def split(directory: Path, size: int, channels: int) -> tuple[FolderImages, FolderImages]:
    """Images to train with and to test with.

    Either `directory` has two folders, train and test, or the files are divided by their names.
    """
    if (directory / "train").is_dir() and (directory / "test").is_dir():
        names = _classes(directory / "train")
        train, test = (_entries(directory / part, names) for part in ("train", "test"))
    else:
        names = _classes(directory)
        every = [_entries(directory, names, only=name) for name in names]
        test = [entry for found in every for entry in found[HELD_OUT - 1::HELD_OUT]]
        train = [entry for found in every for entry in found if entry not in test]
    for part, entries in (("train", train), ("test", test)):
        if not entries:
            raise TilewiseError(f"{directory} has no images to {part} with; needs a folder of "
                                f"them ({', '.join(SUFFIXES)}) for each class")
    return (FolderImages(train, len(names), size, channels),
            FolderImages(test, len(names), size, channels))


def _classes(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


def _entries(directory: Path, names: list[str], only: str | None = None) -> list[Entry]:
    return [(path, label) for label, name in enumerate(names) if only in (None, name)
            for path in sorted((directory / name).rglob("*")) if path.suffix.lower() in SUFFIXES]


def _decoder(size: int, channels: int) -> Any:
    """Path -> bytes of (size, size, channels)."""
    try:
        from PIL import Image
    except ImportError as problem:
        raise NotInstalled(
            "reading image files needs Pillow: pip install 'tilewise[images]'") from problem

    def decode(path: Path) -> np.ndarray:
        try:
            with Image.open(path) as image:
                small = image.convert("L" if channels == 1 else "RGB").resize((size, size))
        except (OSError, ValueError) as trouble:
            raise TilewiseError(f"{path} cannot be read as an image: {trouble}") from trouble
        return np.asarray(small).reshape(size, size, channels)

    return decode

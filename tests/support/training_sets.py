"""Small sets of images on disk, for the tests of the trainer."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np


def stripes(count: int, seed: int, size: int = 28, classes: int = 3) -> tuple:
    """Images whose class is the width of their stripes; easy, but not for a broken trainer."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    labels[:classes] = range(classes)  # all are there
    column = np.arange(size) + rng.integers(0, size, (count, 1))
    lines = (column // (labels[:, None] + 2)) % 2
    images = lines[:, None, :] * 160 + rng.integers(0, 96, (count, size, size))
    return images.astype(np.uint8), labels.astype(np.uint8)


def write_idx(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    content = header + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def idx_set(directory: Path, train: int = 96, test: int = 30, suffix: str = ".gz") -> Path:
    """A directory like that of Fashion-MNIST."""
    directory.mkdir(parents=True, exist_ok=True)
    for part, count, seed in (("train", train, 1), ("t10k", test, 2)):
        images, labels = stripes(count, seed)
        write_idx(directory / f"{part}-images-idx3-ubyte{suffix}", images)
        write_idx(directory / f"{part}-labels-idx1-ubyte{suffix}", labels)
    return directory


def folder_set(directory: Path, count: int = 40) -> Path:
    """A folder of PNG files a class."""
    from PIL import Image

    images, labels = stripes(count, 3)
    for number, (image, label) in enumerate(zip(images, labels)):
        place = directory / f"stripes{label}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{number:04}.png")
    return directory

"""The pictures of docs/filter2d.md: a photo of scikit-image before and after filters.

    python scripts/make_filter_pictures.py [DIRECTORY]

Needs scikit-image.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from skimage import data, io

import tilewise

PICTURES = Path(__file__).parents[1] / "docs" / "images"
SIDE = 240  # pixels of the part that is shown


def gaussian(sigma: float) -> np.ndarray:
    reach = int(3 * sigma + 0.5)
    row = np.exp(-np.arange(-reach, reach + 1) ** 2 / (2 * sigma ** 2))
    return np.outer(row, row) / row.sum() ** 2


def edges(photo: np.ndarray) -> np.ndarray:
    """The length of the gradient, by Sobel's kernels."""
    grey = photo.astype(np.float32).mean(axis=2)
    across = np.outer([1, 2, 1], [-1, 0, 1])
    x, y = (tilewise.filter2d(grey, kernel) for kernel in (across, across.T))
    return np.clip(np.hypot(x, y) / 3, 0, 255).astype(np.uint8)


def main(directory: Path) -> None:
    photo = data.astronaut()[:SIDE, 110:110 + SIDE]
    sharpen = np.array([[0, -1, 0], [-1, 5, -1], [0, -1, 0]])
    pictures = {
        "before": photo,
        "blur": tilewise.filter2d(photo, gaussian(3)),
        "sharpen": tilewise.filter2d(photo, sharpen),
        "edges": edges(photo),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        path = directory / f"filter2d-{name}.png"
        io.imsave(path, picture, check_contrast=False)
        print(path.name, path.stat().st_size >> 10, "KB")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)

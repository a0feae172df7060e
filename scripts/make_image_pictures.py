"""The pictures of docs/images.md: a photo of scikit-image with specks, before and after filters.

    python scripts/make_image_pictures.py [DIRECTORY]

Needs scikit-image.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from skimage import data, io

from tilewise import image

PICTURES = Path(__file__).parents[1] / "docs" / "images"
SIDE = 240  # pixels of the part that is shown


def main(directory: Path) -> None:
    photo = data.astronaut()[:SIDE, 110:110 + SIDE].copy()
    rng = np.random.default_rng(0)
    photo[rng.random((SIDE, SIDE)) < 0.05] = 255
    grey = photo.astype(np.float32).mean(axis=2)
    slope = image.gaussian_gradient_magnitude(image.median(grey, 5), 1.0)
    pictures = {
        "before": photo,
        "median": image.median(photo, 5, axes=(0, 1)),
        "opening": image.grey_opening(photo, 5, axes=(0, 1)),
        "slope": np.clip(6 * slope, 0, 255).astype(np.uint8),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        path = directory / f"images-{name}.png"
        io.imsave(path, picture, check_contrast=False)
        print(path.name, path.stat().st_size >> 10, "KB")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)

"""From an image file to what a model takes: resized, cut, scaled and normalised."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import NotInstalled

# of ImageNet, as most models want
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)


class Form(NamedTuple):
    """What a model takes."""

    channels: int = 3
    height: int = 224
    width: int = 224
    normalise: bool = True


def decoded(content: Any, form: Form) -> np.ndarray[Any, Any]:
    """(C, H, W) as float32. The shorter side is fitted, and the middle is kept."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise NotInstalled("images are decoded by Pillow: pip install 'tilewise[scale]'"
                           ) from error
    if content is None:
        raise ValueError("there is no image")
    with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as opened:
        image = opened.convert("L" if form.channels == 1 else "RGB")
    image = ImageOps.fit(image, (form.width, form.height), Image.Resampling.BILINEAR)
    values = np.asarray(image, np.float32) / np.float32(255)
    if form.channels == 1:
        return values[None]
    if form.normalise:
        values = (values - MEAN) / DEVIATION
    return np.ascontiguousarray(values.transpose(2, 0, 1))

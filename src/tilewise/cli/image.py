"""tilewise image: a filter of tilewise.image over a picture file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..core.errors import InvalidProblem, NotInstalled, TilewiseError
from ..planner.measure import interleaved
from .output import Threads, console, set_threads

# filters by name, and which of the options is their argument
FILTERS = {"gaussian": "sigma", "uniform": "size", "median": "size", "minimum": "size",
           "maximum": "size", "grey_erosion": "size", "grey_dilation": "size",
           "grey_opening": "size", "grey_closing": "size", "unsharp_mask": "sigma"}


def image(
    photo: Annotated[Path, typer.Argument(help="Filter this picture.")],
    filter: Annotated[str, typer.Option(
        help=f"Choose one of {', '.join(FILTERS)}.")] = "median",
    size: Annotated[int, typer.Option(min=1, help="Give the side of the window.")] = 5,
    sigma: Annotated[float, typer.Option(
        min=0.0, help="Give the width of gaussian and unsharp_mask, in pixels.")] = 2.0,
    output: Annotated[Path, typer.Option(
        "--output", "-o", help="Write the result to this file.")] = Path("out.png"),
    threads: Threads = None,
) -> None:
    """Filter a picture; colours are filtered one by one."""
    if filter not in FILTERS:
        raise InvalidProblem(f"filter is {filter!r}, needs one of {', '.join(FILTERS)}")
    set_threads(threads)
    pixels = _read(photo)
    run = _call(filter, size, sigma)
    _write(output, run(pixels))
    seconds = interleaved([lambda: run(pixels)], rounds=3, budget=1.0)[0].minimum
    shape = "x".join(map(str, pixels.shape))
    console.print(f"{output}: {filter} of {shape} {pixels.dtype}, {seconds * 1e3:.1f} ms",
                  markup=False)


def _call(name: str, size: int, sigma: float) -> Any:
    from .. import image as filters

    if name == "unsharp_mask":
        return lambda pixels: (255 * filters.unsharp_mask(
            pixels, sigma, channel_axis=2 if pixels.ndim > 2 else None)).round().astype("uint8")
    function = getattr(filters, name)
    argument = {"size": size} if FILTERS[name] == "size" else {"sigma": sigma}
    return lambda pixels: function(pixels, **argument, axes=(0, 1))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as problem:
        raise NotInstalled(
            "reading image files needs Pillow: pip install 'tilewise[images]'") from problem
    return Image


def _read(path: Path) -> Any:
    """(H, W) or (H, W, C) of uint8."""
    import numpy as np

    try:
        with _pillow().open(path) as picture:
            plain = picture if picture.mode in ("L", "RGB", "RGBA") else picture.convert("RGB")
            return np.array(plain)
    except (OSError, ValueError) as trouble:
        raise TilewiseError(f"{path} cannot be read as an image: {trouble}") from trouble


def _write(path: Path, pixels: Any) -> None:
    try:
        _pillow().fromarray(pixels).save(path)
    except (OSError, ValueError) as trouble:
        raise TilewiseError(f"{path} cannot be written: {trouble}; needs a directory that exists "
                            "and an ending such as .png") from trouble

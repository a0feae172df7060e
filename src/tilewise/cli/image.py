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
        return lambda pixels: _integers(filters.unsharp_mask(
            pixels, sigma, channel_axis=2 if pixels.ndim > 2 else None), pixels.dtype)
    function = getattr(filters, name)
    argument = {"size": size} if FILTERS[name] == "size" else {"sigma": sigma}
    return lambda pixels: function(pixels, **argument, axes=(0, 1))


def _integers(shares: Any, dtype: Any) -> Any:
    """Values from 0 to 1 as those of a picture."""
    import numpy as np

    return (np.iinfo(dtype).max * shares).round().astype(dtype)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as problem:
        raise NotInstalled(
            "reading image files needs Pillow: pip install 'tilewise[images]'") from problem
    return Image


def _read(path: Path) -> Any:
    """(H, W) or (H, W, C) of uint8, or (H, W) of uint16."""
    import numpy as np

    try:
        with _pillow().open(path) as picture:
            from PIL import ImageOps

            upright = ImageOps.exif_transpose(picture)  # as a camera says
            return np.array(upright.convert(_mode(path, upright)))
    except (OSError, ValueError) as trouble:
        raise TilewiseError(f"{path} cannot be read as an image: {trouble}") from trouble


def _mode(path: Path, picture: Any) -> str:
    """Pillow's name for what the pixels are to be: nothing that they show is lost."""
    if picture.mode in ("L", "RGB", "RGBA", "I;16"):
        return str(picture.mode)
    if picture.mode in ("I", "F", "I;16B"):
        raise TilewiseError(f"{path} has pixels of mode {picture.mode}, needs 8 bits a colour or "
                            "16 bits of grey: read it with NumPy and call tilewise.image")
    if picture.mode in ("LA", "PA") or "transparency" in picture.info:
        return "RGBA"
    return "L" if picture.mode == "1" else "RGB"


def _write(path: Path, pixels: Any) -> None:
    try:
        _pillow().fromarray(pixels).save(path)
    except (OSError, ValueError) as trouble:
        raise TilewiseError(f"{path} cannot be written: {trouble}; needs a directory that exists "
                            "and an ending that takes such pixels: .png does") from trouble

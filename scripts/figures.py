"""Every table and every picture of README.md and docs, from the files in benchmarks/results.

    python scripts/figures.py               # all of them
    python scripts/figures.py tables report
    python scripts/figures.py --results build/results --images build/images report

Nothing is measured: `make results` does that. Pictures as PNG need resvg_py (the extra `bench`),
those of filters scikit-image, that of training matplotlib, those of the report Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import diagrams
import write_tables

ROOT = Path(__file__).parents[1]
REPORTED = ("vgg16", "vgg_layers", "ladder")
TRAINING = "training-fashion-mnist.png"
SEEDS = "training-resnet18.png"

# every picture that a page shows, and the command for it that the page tells
PICTURES = {
    "vgg16-bars.png": "tilewise report vgg16.json --png docs/images",
    "vgg_layers-roofline.png": "tilewise report vgg_layers.json --png docs/images",
    "ladder-ladder.png": "tilewise report ladder.json --png docs/images",
    "report-desktop.png": "python scripts/screenshot.py report.html docs/images/report",
    "report-phone.png": "python scripts/screenshot.py report.html docs/images/report",
    "call.svg": "python scripts/diagrams.py docs/images",
    "tiles.svg": "python scripts/diagrams.py docs/images",
    **{f"filter2d-{name}.png": "python scripts/make_filter_pictures.py"
       for name in ("before", "blur", "sharpen", "edges")},
    **{f"images-{name}.png": "python scripts/make_image_pictures.py"
       for name in ("before", "median", "opening", "slope")},
    "zoo.png": "python benchmarks/zoo.py --draw zoo.json docs/images/zoo.png",
    TRAINING: "python benchmarks/train_fashion_mnist.py --draw train_fashion_mnist.json "
              f"docs/images/{TRAINING}",
    SEEDS: "python benchmarks/train_fashion_mnist.py --draw train_resnet18.json "
           f"docs/images/{SEEDS}",
}


def python(*arguments: object) -> None:
    subprocess.run([sys.executable, *map(str, arguments)], check=True, cwd=ROOT)


def tables(results: Path, images: Path) -> None:
    write_tables.write(results)


def drawings(results: Path, images: Path) -> None:
    diagrams.main(images)


def filters(results: Path, images: Path) -> None:
    python("scripts/make_filter_pictures.py", images)


def report(results: Path, images: Path) -> None:
    """The page, its pictures, and pictures of it; those that no page shows are left out."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        python("-m", "tilewise", "report", *(results / f"{name}.json" for name in REPORTED), "-o",
               place / "report.html", "--png", place)
        python("scripts/screenshot.py", place / "report.html", place / "report")
        for picture in place.glob("*.png"):
            if picture.name in PICTURES:
                shutil.copy(picture, images / picture.name)


def training(results: Path, images: Path) -> None:
    for result, picture in (("train_fashion_mnist", TRAINING), ("train_resnet18", SEEDS)):
        python("benchmarks/train_fashion_mnist.py", "--draw", results / f"{result}.json",
               images / picture)


def zoo(results: Path, images: Path) -> None:
    python("benchmarks/zoo.py", "--draw", results / "zoo.json", images / "zoo.png")


PARTS: dict[str, Callable[[Path, Path], None]] = {
    part.__name__: part for part in (tables, drawings, filters, report, training, zoo)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--results", type=Path, default=write_tables.RESULTS)
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: needs some of {', '.join(PARTS)}")
    args.images.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in args.parts or PARTS:
        try:
            PARTS[part](args.results.resolve(), args.images.resolve())
        except subprocess.CalledProcessError:  # what one needs may be missing, and the rest be here
            failed.append(part)
        print(f"{part}: {'failed' if part in failed else 'done'}", flush=True)
    print(f"from {args.results}; nothing was measured, make results does that")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

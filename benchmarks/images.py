"""The filters of tilewise.image beside scipy.ndimage, OpenCV and a copy, on two threads.

    python benchmarks/images.py --sizes 512 2048
    python benchmarks/images.py --sizes photo --types uint8 -o benchmarks/results/images.json
    python benchmarks/images.py --equal 10000 -o benchmarks/results/images_equal.json
    python benchmarks/images.py --volume 512 --memmap 40000 -o images_large.json

`--volume` is a Gaussian of a float32 volume, `--memmap` a median of a uint8 file that is larger
than the memory it may take. Sizes are sides of grey images, or `photo`: 12 megapixels of three
colours. Outputs are written into arrays that exist. With `-o`, rows are added to those of the
file. OpenCV rounds and saturates where scipy cuts off; its Gaussian of uint8 is in fixed point.
Needs opencv-python-headless, scipy and, for photos, scikit-image.
"""

from __future__ import annotations

import argparse
import math
import mmap
import shlex
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import cv2
import numpy as np
import torch
from scipy import __version__ as SCIPY
from scipy import ndimage

from tilewise import image as ours
from tilewise.bench import machine
from tilewise.bench.results import Result
from tilewise.planner.measure import interleaved

THREADS = 2
WEIGHTS = np.random.default_rng(2).random((5, 5))
WEIGHTS /= WEIGHTS.sum()
BOX = np.ones((5, 5), np.uint8)
REFLECT = cv2.BORDER_REFLECT
# by name: scipy's function, its arguments, and what OpenCV does for it
FILTERS = {
    "gaussian sigma 1": ("gaussian_filter", {"sigma": 1.0},
                         lambda x, to: cv2.GaussianBlur(x, (9, 9), 1, to, 1, REFLECT)),
    "gaussian sigma 3": ("gaussian_filter", {"sigma": 3.0},
                         lambda x, to: cv2.GaussianBlur(x, (25, 25), 3, to, 3, REFLECT)),
    "uniform 5": ("uniform_filter", {"size": 5},
                  lambda x, to: cv2.blur(x, (5, 5), to, borderType=REFLECT)),
    "correlate 5x5": ("correlate", {"weights": WEIGHTS},
                      lambda x, to: cv2.filter2D(x, -1, WEIGHTS, to, borderType=REFLECT)),
    "laplace": ("laplace", {}, lambda x, to: cv2.Laplacian(x, -1, to, 1, borderType=REFLECT)),
    "median 3": ("median_filter", {"size": 3}, lambda x, to: cv2.medianBlur(x, 3, to)),
    "median 5": ("median_filter", {"size": 5}, lambda x, to: cv2.medianBlur(x, 5, to)),
    "median 15": ("median_filter", {"size": 15}, lambda x, to: cv2.medianBlur(x, 15, to)),
    "minimum 5": ("minimum_filter", {"size": 5},
                  lambda x, to: cv2.erode(x, BOX, to, borderType=REFLECT)),
    "maximum 15": ("maximum_filter", {"size": 15},
                   lambda x, to: cv2.dilate(x, np.ones((15, 15), np.uint8), to,
                                            borderType=REFLECT)),
    "grey opening 5": ("grey_opening", {"size": 5},
                       lambda x, to: cv2.morphologyEx(x, cv2.MORPH_OPEN, BOX, to,
                                                      borderType=REFLECT)),
}
# what has rows for some types and sizes only: scipy needs a minute for larger ones
ONLY = {"median 15": (("uint8",), ("64", "512"))}


def is_asked(label: str, kind: str, size: str) -> bool:
    """uint16 is there for medians, which OpenCV does up to 5x5."""
    kinds, sizes = ONLY.get(label, ((kind,), (size,)))
    medians = kind != "uint16" or label.startswith("median")
    return kind in kinds and size in sizes and medians


def image_of(size: str, kind: str):
    if size != "photo":
        side = int(size)
        found = np.random.default_rng(0).integers(0, 256, (side, side), np.uint8)
        return cv2.blur(found, (5, 5)).astype(kind)
    from skimage import data

    return np.ascontiguousarray(cv2.resize(data.astronaut(), (4000, 3000),
                                           interpolation=cv2.INTER_CUBIC)).astype(kind)


def check(image, name, options) -> None:
    """No time for wrong results: a corner against scipy."""
    corner = np.ascontiguousarray(image[:150, :170])
    found, expected = (getattr(module, name)(corner, **options) for module in (ours, ndimage))
    slack = 2e-6 * 255 * 8 if image.dtype == np.float32 else 0
    assert abs(found.astype(float) - expected).max() <= slack, name


def compare(size: str, kind: str, label: str, with_scipy: bool) -> dict:
    """Seconds of everybody."""
    image = image_of(size, kind)
    name, options, opencv = FILTERS[label]
    options = {**options, "axes": (0, 1)}
    check(image, name, options)
    mine, theirs, copied = (np.zeros_like(image) for _ in range(3))
    run = {"tilewise": lambda: getattr(ours, name)(image, output=mine, **options),
           "opencv": lambda: opencv(image, theirs),
           "copy": lambda: torch.from_numpy(copied).copy_(torch.from_numpy(image))}
    times = dict(zip(run, interleaved(list(run.values()), rounds=9, budget=1.5)))
    row = {"filter": label, "size": size, "dtype": kind,
           "seconds": {who: time.minimum for who, time in times.items()},
           "spread": times["tilewise"].spread}
    if with_scipy:
        slow = interleaved([run["tilewise"], lambda: getattr(ndimage, name)(image, **options)],
                           rounds=2, budget=0.1, sample=0.0)
        row["seconds"]["scipy"] = slow[1].minimum
    tell(row)
    return row


def tell(row: dict) -> None:
    ms = {who: seconds * 1e3 for who, seconds in row["seconds"].items()}
    scipy = f", {ms['scipy'] / ms['tilewise']:.0f}x scipy" if "scipy" in ms else ""
    print(f"{row['dtype']} {row['size']} {row['filter']}: {ms['tilewise']:.2f} ms, "
          f"opencv {ms['opencv']:.2f} ({ms['opencv'] / ms['tilewise']:.2f}x), "
          f"copy {ms['copy']:.2f}{scipy}", flush=True)


def volume(side: int) -> dict:
    x = np.random.default_rng(0).random((side,) * 3, np.float32)
    out = np.empty_like(x)
    mine, theirs = interleaved([lambda: ours.gaussian(x, 2.0, output=out),
                                lambda: ndimage.gaussian_filter(x, 2.0)], rounds=1, budget=0.1,
                               sample=0.0)
    corner = x[:40, :50, :60]
    assert abs(ours.gaussian(corner, 2.0) - ndimage.gaussian_filter(corner, 2.0)).max() < 1e-6
    print(f"gaussian sigma 2 of {side} cubed float32: {mine.minimum:.3f} s, scipy "
          f"{theirs.minimum:.2f} s, {theirs.minimum / mine.minimum:.0f}x")
    return {"filter": "gaussian sigma 2", "size": f"{side} cubed", "dtype": "float32",
            "seconds": {"tilewise": mine.minimum, "scipy": theirs.minimum}}


def on_disk(side: int) -> dict:
    """A median of a file into a file; all memory counts that the process has, mapped or not."""
    with tempfile.TemporaryDirectory() as directory:
        x, y = (np.memmap(f"{directory}/{name}", np.uint8, "w+", shape=(side, side))
                for name in ("in", "out"))
        for top in range(0, side, 500):
            x[top:top + 500] = np.random.default_rng(top).integers(
                0, 256, x[top:top + 500].shape, np.uint8)
        ours.median(np.array(x[:600]), 5)  # compiled before
        x._mmap.madvise(mmap.MADV_DONTNEED)
        Path("/proc/self/clear_refs").write_text("5")  # the most so far is forgotten
        before, start = most_resident(), time.perf_counter()
        ours.in_blocks(ours.median, x, y, 5, block=16 << 20)
        seconds, grown = time.perf_counter() - start, most_resident() - before
        for top in (0, side // 2, side - 60):
            rows = slice(max(0, top - 2), top + 62)
            theirs = ndimage.median_filter(np.array(x[rows]), 5)[2 if top else 0:][:58]
            assert np.array_equal(theirs, y[top:top + 58]), top
    print(f"median 5 of {side} square uint8 on disk: {seconds:.1f} s, "
          f"{grown / 1e6:.0f} MB more than before")
    return {"filter": "median 5", "size": f"{side} on disk", "dtype": "uint8",
            "seconds": {"tilewise": seconds}, "megabytes": grown / 1e6}


def most_resident() -> int:
    """Bytes of the process that were in memory at once."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) << 10


def equal(count: int, first: int, path: Path | None) -> None:
    """Random calls of the tests' kind against scipy, 250 a seed; the first that differs ends it."""
    sys.path[:0] = [str(Path(__file__).parents[1] / "tests"),
                    str(Path(__file__).parents[1] / "tests" / "image")]
    from test_image_filters import run_cases

    compared = 0
    for number in range(first, first + -(-count // 250)):
        seen = run_cases(number, 250)
        row = {"seed": number, "calls": sum(map(sum, (seen["native"].values(),
                                                      seen["elsewhere"].values()))),
               "native": sum(seen["native"].values()), "differences": 0}
        compared += row["calls"]
        if path:
            save("images-equal", [row], path)
    print(f"{compared} calls, all within the bound")


def save(kind: str, rows: list[dict], path: Path) -> None:
    """Added to what is there; a row that was measured again is replaced."""
    found = machine.facts(THREADS, limits=False)
    found["versions"] |= {"opencv": cv2.__version__, "scipy": SCIPY}
    old = Result.load(path).rows if path.exists() else []
    keys = ("filter", "size", "dtype", "seed")
    kept = {tuple(row.get(key) for key in keys): row for row in [*old, *rows]}
    Result(kind, shlex.join(["python", *sys.argv]), date.today().isoformat(), found, {},
           list(kept.values())).save(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", default=["512", "2048", "4096", "photo"])
    parser.add_argument("--types", nargs="+", default=["uint8", "float32", "uint16"])
    parser.add_argument("--filters", nargs="+", default=list(FILTERS))
    parser.add_argument("--no-scipy", action="store_true")
    parser.add_argument("-o", "--output", type=Path, help="a result file to add to")
    parser.add_argument("--volume", type=int, help="side of a volume")
    parser.add_argument("--memmap", type=int, help="side of an image on disk")
    parser.add_argument("--equal", type=int, help="random calls to compare with scipy's")
    parser.add_argument("--first", type=int, default=0, help="the first seed of them")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    cv2.setNumThreads(THREADS)
    if args.equal:
        equal(args.equal, args.first, args.output)
        return
    if args.volume or args.memmap:
        rows = [volume(args.volume)] if args.volume else []
        rows += [on_disk(args.memmap)] if args.memmap else []
        if args.output:
            save("images-large", rows, args.output)
        return
    rows = [compare(size, kind, label, not args.no_scipy) for size in args.sizes
            for kind in args.types for label in args.filters if is_asked(label, kind, size)]
    if args.output:
        save("images", rows, args.output)
    for who in ("opencv", "scipy"):
        ratios = [row["seconds"][who] / row["seconds"]["tilewise"] for row in rows
                  if who in row["seconds"]]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"{who}: geometric mean {mean:.2f}x, least {min(ratios):.2f}x")


if __name__ == "__main__":
    main()

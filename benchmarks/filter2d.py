"""filter2d against OpenCV, scipy.ndimage, torch's conv2d and a copy of the array, on two threads.

    python benchmarks/filter2d.py                    # float32, 3x3 to 7x7, 512 to 4096 square
    python benchmarks/filter2d.py --all -o filter2d.json    # all that docs/filter2d.md tells
    python benchmarks/filter2d.py --sizes 2048 --kernels 31
    python benchmarks/filter2d.py --sizes 2048 --kernels 5 --dtype uint8
    python benchmarks/filter2d.py --disk 40000       # memory-mapped, in bounded memory

Outputs are written into arrays that exist (`out=`, `dst=`), and made anew by each call ("fresh").
Kernels are dense, of full rank; with `--separable` they have rank 1 and OpenCV runs sepFilter2D.
Needs opencv-python-headless and scipy.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import tempfile
import threading
from datetime import date
from pathlib import Path
from time import perf_counter

import cv2
import numpy as np
import scipy.ndimage
import torch

import tilewise
from tilewise.bench import machine
from tilewise.bench.results import Result
from tilewise.image.arrays import ENGINE
from tilewise.planner.measure import interleaved

THREADS = 2
# sizes, kernels, type, separable, with scipy and torch: what --all measures
SUITE = (([512, 1024, 2048, 4096], [3, 5, 7], "float32", False, True),
         ([2048], [31], "float32", False, False), ([2048], [5], "uint8", False, True),
         ([2048], [5, 9, 31], "float32", True, False), ([8], [3], "float32", False, False))


def contenders(image, kernel, separable):
    """(fast ones, slow ones) by name."""
    ours, theirs, copied = (np.zeros_like(image) for _ in range(3))
    single = kernel.astype(np.float32)
    if separable:
        across, down = single[0] / single[0].sum(), single[:, 0] / single[:, 0].sum()

        def opencv(**options):
            return cv2.sepFilter2D(image, -1, across, down, **options)
    else:
        def opencv(**options):
            return cv2.filter2D(image, -1, single, **options)

    from_, to = torch.from_numpy(image), torch.from_numpy(copied)
    fast = {
        "tilewise": lambda: tilewise.filter2d(image, kernel, border="mirror", out=ours),
        "tilewise fresh": lambda: tilewise.filter2d(image, kernel, border="mirror"),
        "opencv": lambda: opencv(dst=theirs),
        "opencv fresh": lambda: opencv(),
        "copy": lambda: to.copy_(from_),
    }
    slow = {"scipy": lambda: scipy.ndimage.correlate(image, kernel, mode="mirror")}
    if image.dtype == np.float32:
        pixels, weight = from_[None, None], torch.from_numpy(single)[None, None]
        padding = kernel.shape[0] // 2
        slow["torch"] = lambda: torch.nn.functional.conv2d(pixels, weight, padding=padding)
    return fast, slow


def check(image, kernel) -> None:
    """No time for wrong results: against scipy in float64, on a corner."""
    reach = kernel.shape[0]
    corner = image[:200 + reach, :200 + reach]
    exact = scipy.ndimage.correlate(corner.astype(np.float64), kernel, mode="mirror")[:200, :200]
    found = tilewise.filter2d(image, kernel, border="mirror")[:200, :200]
    exact = exact if image.dtype == np.float32 else np.clip(np.rint(exact), 0, 255)
    error = abs(found - exact).max()
    assert error <= (1e-5 * abs(exact).max() if image.dtype == np.float32 else 1), error


def compare(size, taps, dtype, separable, with_slow) -> dict:
    """Seconds of everybody."""
    rng = np.random.default_rng(0)
    image = (255 * rng.random((size, size))).astype(dtype)
    kernel = np.outer(rng.random(taps), rng.random(taps)) if separable else rng.random((taps, taps))
    kernel /= kernel.sum()
    check(image, kernel)
    fast, slow = contenders(image, kernel, separable)
    times = dict(zip(fast, interleaved(list(fast.values()), rounds=15, budget=3)))
    row = {"dtype": dtype, "size": size, "taps": taps, "separable": separable,
           "seconds": {name: time.minimum for name, time in times.items()},
           "spread": times["tilewise"].spread,
           "median_ratio": times["opencv"].median / times["tilewise"].median, "slow": {}}
    if with_slow:
        base, *others = interleaved([fast["tilewise"], *slow.values()], rounds=3, budget=2)
        row["slow"] = {name: time.minimum / base.minimum for name, time in zip(slow, others)}
    row["algorithm"] = list(ENGINE.ready._entries.values())[-1][0].plan.algorithm
    tell(row)
    return row


def tell(row: dict) -> None:
    ms = {name: seconds * 1e3 for name, seconds in row["seconds"].items()}
    fresh = ms["opencv fresh"] / ms["tilewise fresh"]
    slow = "".join(f", {name} {ratio:.0f}x" for name, ratio in row["slow"].items())
    print(f"{row['dtype']} {row['size']} {row['taps']}x{row['taps']}: tilewise "
          f"{ms['tilewise']:.3f} ms (fresh {ms['tilewise fresh']:.3f}, spread "
          f"{row['spread']:.0%}), opencv {ms['opencv']:.3f} (fresh {ms['opencv fresh']:.3f}), "
          f"copy {ms['copy']:.3f}: {ms['opencv'] / ms['tilewise']:.2f}x opencv (median "
          f"{row['median_ratio']:.2f}x, fresh {fresh:.2f}x){slow}, "
          f"{ms['tilewise'] / ms['copy']:.2f} copies [{row['algorithm']}]", flush=True)


def save(rows: list[dict], path: Path) -> None:
    found = machine.facts(THREADS, limits=False)
    found["versions"] |= {"opencv": cv2.__version__, "scipy": scipy.__version__}
    Result("filter2d", shlex.join(["python", *sys.argv]), date.today().isoformat(), found, {},
           rows).save(path)


def anonymous_megabytes() -> float:
    """Memory of this process that no file stands behind."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return math.nan


def on_disk(size: int) -> None:
    """A uint8 image mapped from disk into another: time and the peak of extra memory."""
    with tempfile.TemporaryDirectory(dir=".") as directory:
        image = np.memmap(f"{directory}/image", np.uint8, "w+", shape=(size, size))
        row = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        for i in range(size):
            image[i] = np.roll(row, i * 7)
        out = np.memmap(f"{directory}/out", np.uint8, "w+", shape=(size, size))
        kernel = np.random.default_rng(1).random((5, 5))
        kernel /= kernel.sum()
        tilewise.filter2d(image[:64, :64], kernel)
        before, peak, done = anonymous_megabytes(), 0.0, threading.Event()

        def watch():
            nonlocal peak
            while not done.wait(0.01):
                peak = max(peak, anonymous_megabytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        start = perf_counter()
        tilewise.filter2d(image, kernel, border="reflect", out=out)
        seconds = perf_counter() - start
        done.set()
        watcher.join()
        for top in (0, size // 2, size - 60):
            rows = slice(max(0, top - 2), top + 62)
            part = tilewise.filter2d(np.array(image[rows]), kernel, border="reflect")
            assert np.array_equal(part[2:-2][:20], out[rows][2:-2][:20])
        print(f"{size}x{size} uint8 from disk to disk: {seconds:.1f} s, "
              f"{peak - before:.1f} MB of extra memory at most")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--kernels", type=int, nargs="+", default=[3, 5, 7])
    parser.add_argument("--dtype", default="float32", choices=["float32", "uint8"])
    parser.add_argument("--separable", action="store_true")
    parser.add_argument("--no-slow", action="store_true", help="leave out scipy and torch")
    parser.add_argument("--all", action="store_true", help="what docs/filter2d.md tells")
    parser.add_argument("-o", "--output", type=Path, help="a result file to write")
    parser.add_argument("--disk", type=int, help="side of an image on disk")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    cv2.setNumThreads(THREADS)
    if args.disk:
        on_disk(args.disk)
        return
    asked = (args.sizes, args.kernels, args.dtype, args.separable, not args.no_slow)
    rows = [compare(size, taps, *how) for sizes, kernels, *how in (SUITE if args.all else [asked])
            for size in sizes for taps in kernels]
    if args.output:
        save(rows, args.output)
    ratios = [row["seconds"]["opencv"] / row["seconds"]["tilewise"] for row in rows]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"geometric mean {mean:.2f}x of OpenCV {cv2.__version__}, least {min(ratios):.2f}x; "
          f"torch {torch.__version__}, scipy {scipy.__version__}")


if __name__ == "__main__":
    main()

"""What Ray Data costs: decoded images through its actors, and through bare loops.

    python benchmarks/ray_overhead.py                # 20,000 images of 3x64x64 through ResNet-18
    python benchmarks/ray_overhead.py -o ray_overhead.json
    python benchmarks/ray_overhead.py --images 2000 --rounds 1

All contenders run the same `Predictor` over the same decoded images, in blocks of 500. On Ray the
blocks lie in the object store; a bare loop has them in its own memory. Time is counted from the
beginning of the first block to the end of the last one, by the clock of the machine: the start of
Ray and of its actors is told apart, and no block is handed out before all actors are there, as the
bare processes wait for each other. Contenders take turns; the least time of the rounds counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
SHAPE, BLOCK, BATCH = (3, 64, 64), 500, 20
PATIENCE = 900  # seconds, for processes that start or compute


def model() -> Any:
    import torch

    from tilewise.models import resnet18

    torch.manual_seed(1)
    return resnet18().eval()


def block(number: int) -> Any:
    return np.random.default_rng(number).standard_normal((BLOCK, *SHAPE), np.float32)


class Timed:
    """A predictor that says when it began and ended."""

    def __init__(self, threads: int) -> None:
        from tilewise.scale import Predictor

        self._predict = Predictor(model, batch=BATCH, threads=threads, column="data")
        self._predict.results(np.zeros((BATCH, *SHAPE), np.float32))

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        begin, count = time.time(), len(rows["data"])
        found = self._predict(rows)["output"]
        return {"output": found, "begin": np.full(count, begin), "end": np.full(count, time.time())}


def loop(threads: int, numbers: list[int], barrier: Any, told: Any) -> None:
    """A bare process: its blocks, one after the other."""
    blocks, timed, total = [block(number) for number in numbers], Timed(threads), 0.0
    barrier.wait()
    spans = []
    for images in blocks:
        found = timed({"data": images})
        total += float(found["output"].astype(np.float64).sum())
        spans.append((found["begin"][0], found["end"][0]))
    told.put((min(begin for begin, _ in spans), max(end for _, end in spans), total))


def bare(workers: int, threads: int, count: int) -> tuple[float, float]:
    """Seconds of all processes together, and the sum of what they found."""
    context = multiprocessing.get_context("spawn")
    barrier, told = context.Barrier(workers), context.Queue()
    parts = [list(range(first, count, workers)) for first in range(workers)]
    running = [context.Process(target=loop, args=(threads, part, barrier, told)) for part in parts]
    for process in running:
        process.start()
    found = [told.get(timeout=PATIENCE) for _ in running]
    for process in running:
        process.join()
    return (max(end for _, end, _ in found) - min(begin for begin, _, _ in found),
            sum(total for _, _, total in found))


def by_ray(workers: int, threads: int, blocks: list[Any]) -> tuple[float, float, float]:
    """Seconds from the first block to the last, with the start of actors, and the sum."""
    import ray.data

    begin = time.time()
    data = ray.data.from_numpy_refs(blocks).map_batches(
        Timed, batch_size=BLOCK, num_cpus=threads, fn_constructor_args=[threads],
        compute=ray.data.ActorPoolStrategy(size=workers))
    first, last, total = float("inf"), 0.0, 0.0
    for rows in data.iter_batches(batch_size=BLOCK):
        first, last = min(first, rows["begin"].min()), max(last, rows["end"].max())
        total += float(rows["output"].astype(np.float64).sum())
    return last - first, time.time() - begin, total


def rows(images: int, rounds: int) -> list[dict[str, str]]:
    import ray

    count, cores = -(-images // BLOCK), os.cpu_count() or 1
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        ray.init(num_cpus=cores, include_dashboard=False, _temp_dir=temporary,
                 log_to_driver=False)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars, context.wait_for_min_actors_s = False, PATIENCE
        blocks = [ray.put(block(number)) for number in range(count)]
        found = []
        for workers, threads in ((1, cores), (cores, 1)):
            loops, actors = [], []
            for number in range(rounds):
                loops.append(bare(workers, threads, count))
                actors.append(by_ray(workers, threads, blocks))
                print(f"round {number + 1} of {rounds}, {workers} x {threads} thread(s): bare "
                      f"{loops[-1][0]:.1f} s, Ray Data {actors[-1][0]:.1f} s", flush=True)
                if abs(loops[-1][1] - actors[-1][2]) > 1e-6 * abs(loops[-1][1]):
                    raise SystemExit(f"results differ: {loops[-1][1]} and {actors[-1][2]}")
            own, theirs = min(one[0] for one in loops), min(one[0] for one in actors)
            whole = min(one[1] for one in actors)
            found.append({
                "what": f"{count * BLOCK} images of {'x'.join(map(str, SHAPE))} through ResNet-18: "
                        f"{workers} actor(s) with {threads} thread(s) of Ray Data, against as many "
                        "bare processes", "wanted": "at most 1.05 of the time",
                "found": f"{theirs / own:.3f} ({theirs:.1f} s against {own:.1f} s; with the start "
                         f"of actors {whole:.1f} s)"})
            print(found[-1]["what"], found[-1]["found"], sep=": ", flush=True)
        ray.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    found = rows(args.images, args.rounds)
    from tilewise.bench.claims import save_claims  # brings torch, which workers import apart

    save_claims(args, found)


if __name__ == "__main__":
    from ray_overhead import main as again  # classes of __main__ would go by value

    again()

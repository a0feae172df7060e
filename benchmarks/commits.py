"""Two source trees in turns: what a change costs the models of the zoo.

    git worktree add /tmp/before 06aee5e
    python benchmarks/commits.py /tmp/before . vgg16 resnet50 yolov8n --rounds 40

Each tree runs in a process of its own; the two take turns of some calls each, so that what else the
machine does slows both. A number above 1 says that the second tree is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

CALLS = 5  # in a turn, after one that warms the caches up again


def work(name: str, threads: int) -> None:
    """Optimise the model; then, for each line that comes, tell the seconds of some calls."""
    import torch
    from zoo_models import ZOO

    import tilewise

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, x = ZOO[name].make().eval(), torch.randn(1, *ZOO[name].shape)
    with torch.no_grad():
        fast = tilewise.optimize(model, x)
        for _ in range(3):
            fast(x)
        print("ready", tilewise.__file__, file=sys.stderr)
        for _ in sys.stdin:
            fast(x)
            taken = []
            for _ in range(CALLS):
                start = time.perf_counter()
                fast(x)
                taken.append(time.perf_counter() - start)
            print("times", *taken, flush=True)


class Worker:
    def __init__(self, tree: Path, name: str, threads: int) -> None:
        command = [sys.executable, __file__, "--work", name, "--threads", str(threads)]
        tree = tree.resolve()
        paths = os.pathsep.join((str(tree / "src"), str(Path(__file__).parent)))
        cache = Path.home() / ".cache" / f"commits-{tree.name}"
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": paths, "TILEWISE_CACHE_DIR": str(cache)})

    def turn(self) -> list[float]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("times "):  # models print too
                return [float(word) for word in line.split()[1:]]
        raise SystemExit("a worker ended; its message is above")

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def compare(name: str, trees: list[Path], rounds: int, threads: int) -> str:
    workers = [Worker(tree, name, threads) for tree in trees]
    for worker in workers:
        worker.turn()
    turns = [[worker.turn() for worker in workers] for _ in range(rounds)]
    for worker in workers:
        worker.close()
    best = [min(min(turn[i]) for turn in turns) * 1e3 for i in range(2)]
    ratios = [statistics.median(before) / statistics.median(after) for before, after in turns]
    return (f"{name}, {threads} threads: {best[0]:.2f} and {best[1]:.2f} ms, "
            f"{best[0] / best[1]:.3f}x by the minimum, "
            f"{statistics.median(ratios):.3f}x by the median of {rounds} rounds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", help="two trees, then the names of models")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        return work(given.work, given.threads)
    if len(given.what) < 3:
        parser.error("two source trees and at least one model are needed")
    trees = [Path(word) for word in given.what[:2]]
    for name in given.what[2:]:
        print(compare(name, trees, given.rounds, given.threads), flush=True)


if __name__ == "__main__":
    main()

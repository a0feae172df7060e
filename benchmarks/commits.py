"""Two source trees in turns: what a change costs models of the zoo, or layers of them.

    git worktree add /tmp/before c6445a3
    python benchmarks/commits.py /tmp/before . vgg16 resnet50 yolov8n --rounds 40
    python benchmarks/commits.py /tmp/before . vgg16:layers vgg16:layers:8 vgg16:gradients:8 filters

Each tree runs in a process of its own; the two take turns of some calls each, so that what else the
machine does slows both. A number above 1 says that the second tree is faster. Behind a model's
name, `layers` and `gradients` stand for its convolutions one by one, `model` for all of it, and a
number for the batch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = 5  # in a turn, after one that warms the caches up again
Runs = dict[str, Callable[[], Any]]


def model(name: str, batch: int) -> Runs:
    import torch
    from zoo_models import ZOO

    import tilewise

    x = torch.randn(batch, *ZOO[name].shape)
    fast = tilewise.optimize(ZOO[name].make().eval(), x)
    return {name: lambda: fast(x)}


def convolutions(name: str) -> dict[Any, tuple[int, int, int]]:
    """Of a model, each once: what `conv2d` takes, and the shape of its images."""
    import torch
    from torch import nn
    from zoo_models import ZOO

    found: dict[Any, tuple[int, int, int]] = {}

    def note(conv: Any, args: Any, result: Any) -> None:
        key = (tuple(conv.weight.shape), conv.stride, conv.padding, conv.dilation, conv.groups)
        found.setdefault((key, tuple(args[0].shape[1:])), tuple(args[0].shape[1:]))

    net = ZOO[name].make().eval()
    for part in net.modules():
        if isinstance(part, nn.Conv2d):
            part.register_forward_hook(note)
    net(torch.randn(1, *ZOO[name].shape))
    return found


def layers(name: str, batch: int) -> Runs:
    import torch

    import tilewise

    runs: Runs = {}
    for ((shape, *options), _), image in convolutions(name).items():
        x = torch.randn(batch, *image).contiguous(memory_format=torch.channels_last)
        weight, bias = torch.randn(shape), torch.randn(shape[0])
        runs[f"{shape} {options} on {image}"] = lambda x=x, weight=weight, bias=bias, o=options: (
            tilewise.conv2d(x, weight, bias, *o, activation="relu"))
    return runs


def gradients(name: str, batch: int) -> Runs:
    import torch

    import tilewise

    runs: Runs = {}
    for ((shape, *options), _), image in convolutions(name).items():
        x = torch.randn(batch, *image).contiguous(memory_format=torch.channels_last)
        weight = torch.randn(shape, requires_grad=True)
        with torch.enable_grad():
            y = tilewise.conv2d(x.requires_grad_(), weight, None, *options)
        grad = torch.randn_like(y)
        runs[f"{shape} {options} on {image}"] = lambda y=y, x=x, weight=weight, grad=grad: (
            torch.autograd.grad(y, (x, weight), grad, retain_graph=True))
    return runs


def filters() -> Runs:
    import numpy as np

    import tilewise

    image = np.random.rand(1080, 1920).astype(np.float32)
    kernels = [np.random.rand(side, side).astype(np.float32) for side in (3, 5, 7, 11, 15)]
    return {f"filter2d {len(kernel)}": lambda kernel=kernel: tilewise.filter2d(image, kernel)
            for kernel in kernels}


def runs_of(what: str) -> Runs:
    name, *rest = what.split(":")
    if name == "filters":
        return filters()
    kind, batch = rest[0] if rest else "model", int(rest[1]) if len(rest) > 1 else 1
    return {"model": model, "layers": layers, "gradients": gradients}[kind](name, batch)


def work(what: str, threads: int) -> None:
    """Be ready; then, for each line that comes, tell the seconds of some calls of each run."""
    import torch

    import tilewise

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    with torch.no_grad():
        runs = runs_of(what)
        for run in runs.values():
            for _ in range(3):
                run()
        print("ready", tilewise.__file__, file=sys.stderr)
        for _ in sys.stdin:
            for name, run in runs.items():
                run()
                taken = []
                for _ in range(CALLS):
                    start = time.perf_counter()
                    run()
                    taken.append(time.perf_counter() - start)
                print("times", name, *taken, sep="\t", flush=True)
            print("end", flush=True)


class Worker:
    def __init__(self, tree: Path, name: str, threads: int) -> None:
        command = [sys.executable, __file__, "--work", name, "--threads", str(threads)]
        tree = tree.resolve()
        paths = os.pathsep.join((str(tree / "src"), str(Path(__file__).parent)))
        cache = Path.home() / ".cache" / f"commits-{tree.name}"
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": paths, "TILEWISE_CACHE_DIR": str(cache)})

    def turn(self) -> dict[str, list[float]]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        found = {}
        for line in self._process.stdout:
            if line.startswith("times\t"):  # models print too
                _, name, *times = line.rstrip("\n").split("\t")
                found[name] = [float(word) for word in times]
            elif line == "end\n":
                return found
        raise SystemExit("a worker ended; its message is above")

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def compare(what: str, trees: list[Path], rounds: int, threads: int) -> None:
    workers = [Worker(tree, what, threads) for tree in trees]
    for worker in workers:
        worker.turn()
    turns = [[worker.turn() for worker in workers] for _ in range(rounds)]
    for worker in workers:
        worker.close()
    least, middle = [], []
    for name in turns[0][0]:
        best = [min(min(turn[i][name]) for turn in turns) * 1e3 for i in range(2)]
        ratios = [statistics.median(before[name]) / statistics.median(after[name])
                  for before, after in turns]
        least.append(best[0] / best[1])
        middle.append(statistics.median(ratios))
        print(f"{name}, {threads} threads: {best[0]:.3f} and {best[1]:.3f} ms, "
              f"{least[-1]:.3f}x by the minimum, {middle[-1]:.3f}x by the median of {rounds} "
              "rounds", flush=True)
    if len(least) > 1:
        print(f"{what}, {len(least)} in all: {statistics.geometric_mean(least):.3f}x by the "
              f"minimum, at least {min(least):.3f}x; {statistics.geometric_mean(middle):.3f}x by "
              f"rounds, at least {min(middle):.3f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", help="two trees, then what to run")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        return work(given.work, given.threads)
    if len(given.what) < 3:
        parser.error("two source trees and at least one model are needed")
    trees = [Path(word) for word in given.what[:2]]
    for tree in trees:
        if not (tree / "src" / "tilewise").is_dir():
            parser.error(f"{tree} has no src/tilewise; needs a source tree (git worktree add)")
    for what in given.what[2:]:
        compare(what, trees, given.rounds, given.threads)


if __name__ == "__main__":
    main()

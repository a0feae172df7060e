"""Net A on Fashion-MNIST at 86x86: the same training with torch and with tilewise.

    python benchmarks/train_fashion_mnist.py runs                    # three epochs, all engines
    python benchmarks/train_fashion_mnist.py runs --epochs 1         # in pieces: then 2, then 3
    python benchmarks/train_fashion_mnist.py runs --plot docs/training-fashion-mnist.png

Engines take turns, an epoch each, every turn a process of its own that goes on from its
checkpoint. `seconds` are those of the steps, with reading and scaling the images; `wall` is that
of the processes, with their start, planning, compiling, checkpoints and tests. The plot needs
matplotlib (the extra `plots`). Torch runs with huge pages.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

ENGINES = ("torch", "torch-channels-last", "torch-compile", "tilewise")
COLOURS = dict(zip(ENGINES, ("#8c8c8c", "#1f77b4", "#2ca02c", "#d62728")))
SMOOTH = 50  # steps


def metrics(place: Path) -> dict:
    path = place / "metrics.json"
    return json.loads(path.read_text()) if path.exists() else {"epochs": [], "losses": []}


def turn(args: argparse.Namespace, engine: str, epoch: int) -> None:
    """One engine to the end of one epoch."""
    place = args.output / engine
    if len(metrics(place)["epochs"]) >= epoch:
        return
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "tilewise", "train", str(args.data), "-o", str(place), "--model",
         args.model, "--engine", engine, "--epochs", str(epoch), "--seed", str(args.seed),
         "--lines-every", "1000"],
        check=True, env={**os.environ, "THP_MEM_ALLOC_ENABLE": "1"})
    walls = place / "walls.json"
    before = json.loads(walls.read_text()) if walls.exists() else []
    walls.write_text(json.dumps([*before, time.perf_counter() - started]))


def table(args: argparse.Namespace) -> None:
    """A line an engine; ratios are to the quickest of torch's."""
    found = {engine: metrics(args.output / engine) for engine in args.engines}
    seconds = {engine: sum(e["seconds"] for e in found[engine]["epochs"]) for engine in found}
    walls = {engine: sum(json.loads((args.output / engine / "walls.json").read_text()))
             for engine in found}
    peers = [engine for engine in found if engine != "tilewise"]
    print(f"{args.model}, seed {args.seed}, torch {torch.__version__}, "
          f"{torch.get_num_threads()} threads")
    print(f"{'engine':<20} {'accuracy after each epoch':<28} {'seconds':>8} {'ratio':>6} "
          f"{'wall':>8} {'ratio':>6}")
    for engine, run in found.items():
        accuracies = " ".join(f"{e['accuracy']:.4f}" for e in run["epochs"])
        ratio = min(seconds[peer] for peer in peers) / seconds[engine]
        whole = min(walls[peer] for peer in peers) / walls[engine]
        print(f"{engine:<20} {accuracies:<28} {seconds[engine]:8.1f} {ratio:6.2f} "
              f"{walls[engine]:8.1f} {whole:6.2f}")


def plot(args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for index, engine in enumerate(args.engines):
        run = metrics(args.output / engine)
        losses = torch.tensor(run["losses"])
        mean = losses.unfold(0, SMOOTH, 1).mean(1)
        steps = torch.arange(len(mean)) + SMOOTH
        style = "-" if engine == "tilewise" else (0, (4, 2 + index))
        left.plot(steps / (len(losses) / len(run["epochs"])), mean, color=COLOURS[engine],
                  linestyle=style, linewidth=1.2, label=engine)
        elapsed, total = [], 0.0
        for epoch in run["epochs"]:
            total += epoch["seconds"]
            elapsed.append(total)
        right.plot(elapsed, [100 * e["accuracy"] for e in run["epochs"]], "o-",
                   color=COLOURS[engine], label=engine)
    left.set(xlabel="epoch", ylabel=f"training loss, mean of {SMOOTH} steps", yscale="log")
    right.set(xlabel="seconds of training", ylabel="test accuracy in %", xlim=(0, None))
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.suptitle(f"{args.model} on Fashion-MNIST, seed {args.seed}: the same run by "
                    "several engines")
    figure.savefig(args.plot, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--model", default="lenet_a")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    for epoch in range(1, args.epochs + 1):
        for index in range(len(args.engines)):  # another one begins in each epoch
            turn(args, args.engines[(index + epoch - 1) % len(args.engines)], epoch)
    table(args)
    if args.plot:
        plot(args)


if __name__ == "__main__":
    main()

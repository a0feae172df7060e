"""A net on Fashion-MNIST: the same training with torch and with tilewise.

    python benchmarks/train_fashion_mnist.py runs                    # three epochs, all engines
    python benchmarks/train_fashion_mnist.py runs --epochs 1         # in pieces: then 2, then 3
    python benchmarks/train_fashion_mnist.py runs --best -o train_fashion_mnist.json
    python benchmarks/train_fashion_mnist.py --draw train_fashion_mnist.json picture.png
    python benchmarks/train_fashion_mnist.py runs-18 --model resnet18 --size 64 --seeds 0 1 2 \\
        --engines torch-channels-last tilewise -o train_resnet18.json
    python benchmarks/train_fashion_mnist.py runs-18 ... --images 6000 --minutes 3    # in pieces

Engines take turns, an epoch each, every turn a process of its own that goes on from its
checkpoint; with --best only the quickest of torch's goes on after the first. `seconds` are those
of the steps, with reading and scaling the images; `wall` is that of the processes, with their
start, planning, compiling, checkpoints and tests. The picture needs matplotlib (the extra
`plots`). Torch runs with huge pages. --images takes so many images to train with, and a sixth of
that to test with. --minutes begins no turn after that time: the same command goes on. A seed
that is in the result file with all its epochs is not run again; it may have run on another machine,
which its rows tell.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch

from tilewise.bench import machine
from tilewise.bench.results import Result
from tilewise.training import idx

ENGINES = ("torch", "torch-channels-last", "torch-compile", "tilewise")
COLOURS = dict(zip(ENGINES, ("#8c8c8c", "#1f77b4", "#2ca02c", "#d62728")))
PEERS = ("openvino", "onnxruntime", "triton")  # which take no part
SMOOTH = 50  # steps of which a mean is kept and drawn


def subset(data: Path, images: int, place: Path) -> Path:
    """A directory with the first of the images, and a sixth of that to test with."""
    place.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", images), ("t10k", -(-images // 6))):
        for name in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
            array = idx.load(data, name)[:count].numpy()
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (place / name).write_bytes(header + array.tobytes())
    return place


def place_of(args: argparse.Namespace, engine: str, seed: int) -> Path:
    return args.runs / (engine if len(args.seeds) == 1 else f"{engine}-{seed}")


def metrics(place: Path) -> dict:
    path = place / "metrics.json"
    return json.loads(path.read_text()) if path.exists() else {"epochs": [], "losses": []}


def turn(args: argparse.Namespace, engine: str, seed: int, epoch: int) -> None:
    """One engine to the end of one epoch."""
    place = place_of(args, engine, seed)
    if len(metrics(place)["epochs"]) >= epoch:
        return
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "tilewise", "train", str(args.data), "-o", str(place), "--model",
         args.model, "--engine", engine, "--epochs", str(epoch), "--seed", str(seed),
         "--lines-every", "1000",
         *(["--size", str(args.size)] if args.size else []),
         *(["--limit", str(args.limit)] if args.limit else [])],
        check=True, env={**os.environ, "THP_MEM_ALLOC_ENABLE": "1"})
    walls = place / "walls.json"
    before = json.loads(walls.read_text()) if walls.exists() else []
    walls.write_text(json.dumps([*before, time.perf_counter() - started]))
    with (place / "machines.txt").open("a") as file:
        file.write(f"{on(result_of(args, []))}\n")


def kept(args: argparse.Namespace) -> dict[tuple[str, int], dict]:
    """The rows that the result file has of seeds that all engines ended, by engine and seed."""
    if not args.output or not args.output.exists():
        return {}
    before = Result.load(args.output)
    alike = [{**result.settings, "seed": 0, "seeds": 0,
              "versions": {**result.machine["versions"], **dict.fromkeys(PEERS)}}
             for result in (before, result_of(args, []))]
    ended = {(row["engine"], row["seed"]): row for row in before.rows
             if len(row["epochs"]) == args.epochs}
    whole = {seed for _, seed in ended if all((one, seed) in ended for one in args.engines)}
    return {} if alike[0] != alike[1] else {
        key: {"on": on(before), **row} for key, row in ended.items() if key[1] in whole}


def on(result: Result) -> str:
    """The machine that a row ran on."""
    return f"{result.machine['processor']}, {result.machine['isa']}"


def machines(place: Path) -> list[str]:
    """Those that the turns of a run were on."""
    path = place / "machines.txt"
    return list(dict.fromkeys(path.read_text().splitlines())) if path.exists() else []


def rows(args: argparse.Namespace) -> list[dict]:
    """What each engine that has run did: its epochs, and the losses as means of many steps."""
    found, done, here = [], kept(args), on(result_of(args, []))
    for engine, seed in ((engine, seed) for engine in ENGINES for seed in args.seeds):
        place = place_of(args, engine, seed)
        if (engine, seed) in done:
            found.append(done[engine, seed])
            continue
        run, walls = metrics(place), place / "walls.json"
        if not run["epochs"]:
            continue
        losses = run["losses"]
        means = [sum(losses[i:i + SMOOTH]) / SMOOTH for i in range(0, len(losses) - SMOOTH, SMOOTH)]
        found.append({"engine": engine, "seed": seed, "epochs": run["epochs"], "means": means,
                      "steps": len(losses), "walls": json.loads(walls.read_text()),
                      "on": " and ".join(machines(place) or [here])})
    return found


def table(found: list[dict]) -> None:
    """A line an engine, and how much quicker tilewise was in as many epochs."""
    for row in found:
        ours = next((other for other in found
                     if (other["engine"], other["seed"]) == ("tilewise", row["seed"])), None)
        accuracies = " ".join(f"{e['accuracy']:.4f}" for e in row["epochs"])
        line = f"{row['engine']:<20} {accuracies:<28} {seconds(row):8.1f} {sum(row['walls']):8.1f}"
        if ours is not None and len(ours["epochs"]) >= len(row["epochs"]):
            line += f" {seconds(row) / seconds(ours, len(row['epochs'])):6.2f}"
        print(line)


def best(args: argparse.Namespace) -> list[str]:
    """Ours and the quickest of torch's in the first epoch."""
    first = {row["engine"]: seconds(row, 1) for row in rows(args) if row["engine"] != "tilewise"}
    return [min(first, key=first.__getitem__), "tilewise"]


def seconds(row: dict, epochs: int | None = None) -> float:
    return sum(epoch["seconds"] for epoch in row["epochs"][:epochs])


def result_of(args: argparse.Namespace, found: list[dict]) -> Result:
    kind = "training" if len(args.seeds) == 1 else "training-seeds"
    return Result(kind, shlex.join(["python", *sys.argv]), date.today().isoformat(),
                  machine.facts(torch.get_num_threads(), limits=False),
                  {"model": args.model, "seed": args.seeds[0], "seeds": args.seeds, "batch": 64,
                   "size": args.size, "images": args.images,
                   **({"limit": args.limit} if args.limit else {})}, found)


def draw(result: Result, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    labelled = set()
    for index, run in enumerate(result.rows):
        engine, epoch_steps = run["engine"], run["steps"] / len(run["epochs"])
        label = None if engine in labelled else engine
        labelled.add(engine)
        style = "-" if engine == "tilewise" else (0, (4, 2 + index))
        left.plot([SMOOTH * (i + 1) / epoch_steps for i in range(len(run["means"]))], run["means"],
                  color=COLOURS[engine], linestyle=style, linewidth=1.2, label=label)
        elapsed, total = [], 0.0
        for epoch in run["epochs"]:
            total += epoch["seconds"]
            elapsed.append(total)
        right.plot(elapsed, [100 * e["accuracy"] for e in run["epochs"]], "o-",
                   color=COLOURS[engine], label=label)
    left.set(xlabel="epoch", ylabel=f"training loss, mean of {SMOOTH} steps", yscale="log")
    right.set(xlabel="seconds of training", ylabel="test accuracy in %", xlim=(0, None))
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    s = result.settings
    seeds = s.get("seeds", [s["seed"]])
    figure.suptitle(f"{s['model']} on Fashion-MNIST, {'seed' if len(seeds) == 1 else 'seeds'} "
                    f"{', '.join(map(str, seeds))}: the same run by several engines")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", default=Path("runs"))
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--model", default="lenet_a")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--size", type=int, help="of the images' sides; the net's own if not said")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--images", type=int, help="to train with; all, if not said")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--best", action="store_true", help="drop what is slow after one epoch")
    parser.add_argument("--limit", type=int, help="images to train with; all, if not said")
    parser.add_argument("-o", "--output", type=Path, help="a result file to write")
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("RESULT", "PICTURE"))
    args = parser.parse_args()
    if args.draw:
        return draw(Result.load(args.draw[0]), args.draw[1])
    if args.images:
        args.data = subset(args.data, args.images, args.runs / "data")
    engines, until, done = args.engines, time.monotonic() + 60 * args.minutes, kept(args)
    for seed, epoch in itertools.product(args.seeds, range(1, args.epochs + 1)):
        for index in range(len(engines)):
            engine = engines[(index + epoch - 1) % len(engines)]  # another begins in each epoch
            if time.monotonic() < until and (engine, seed) not in done:
                turn(args, engine, seed, epoch)
        engines = best(args) if args.best else engines
        if args.output:
            result_of(args, rows(args)).save(args.output)
    table(rows(args))


if __name__ == "__main__":
    main()

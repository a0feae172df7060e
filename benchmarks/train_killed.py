"""Training that is killed at random moments ends with the weights of a run that was not.

    python benchmarks/train_killed.py                                # ResNet-18 at 64x64, ten kills
    python benchmarks/train_killed.py --model lenet_b --size 70 --kills 3 -o train_killed.json

The trainer runs once undisturbed on a few hundred images of Fashion-MNIST. Then it runs again, is
ended by SIGKILL while it starts, plans, learns, tests or writes, and is started again each time.
Losses, weights, statistics and momentum must be the same in every bit.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from train_fashion_mnist import subset

from tilewise.bench.machine import facts
from tilewise.bench.results import Result
from tilewise.training import checkpoint


def start(args: argparse.Namespace, data: Path, output: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tilewise", "train", str(data), "-o", str(output), "--model",
         args.model, "--size", str(args.size), "--batch", "16", "--epochs", "2", "--save-every",
         "2", "--average", "0.9", "--lines-every", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"})


def finish(args: argparse.Namespace, data: Path, output: Path) -> dict[str, Any]:
    run = start(args, data, output)
    run.communicate()
    assert run.returncode == 0, f"the run in {output} ended with {run.returncode}"
    return checkpoint.load(output)


def kill(run: subprocess.Popen, chance: random.Random, steps: float) -> bool:
    """After no line, or some; false if it had ended by itself."""
    lines = chance.randrange(0, max(2, int(steps)))
    for _ in range(lines and lines + 1):
        if not run.stdout.readline():
            break
    time.sleep(chance.uniform(0, 0.3 if lines else 6))
    run.send_signal(signal.SIGKILL)
    run.communicate()
    return run.returncode == -signal.SIGKILL


def position(output: Path) -> int:
    """Steps that the checkpoint has."""
    state = checkpoint.load(output)
    return 0 if state is None else len(state["history"]["losses"])


def differences(one: Any, other: Any, name: str = "") -> list[str]:
    """Where two checkpoints are not the same; times may differ."""
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [name]
    if isinstance(one, (dict, list, tuple)):
        items = list(one.items() if isinstance(one, dict) else enumerate(one))
        if len(one) != len(other):
            return [name]
        return [found for key, value in items if key not in ("seconds", "plans")
                for found in differences(value, other[key], f"{name} {key}")]
    return [] if one == other else [name]


def measure(args: argparse.Namespace) -> list[dict[str, str]]:
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        data = subset(args.data, args.images, place / "data")
        whole = finish(args, data, place / "whole")
        kills, places = 0, []
        for _ in range(args.kills):
            left = len(whole["history"]["losses"]) - position(place / "killed")
            kills += kill(start(args, data, place / "killed"), chance, left / 2)
            places.append(position(place / "killed"))
            print(f"killed, the checkpoint has {places[-1]} steps", file=sys.stderr, flush=True)
        killed = finish(args, data, place / "killed")
    wrong = differences(whole, killed)
    print(*wrong, sep="\n", file=sys.stderr)
    return [{"what": f"{args.model} at {args.size}x{args.size}, {args.images} images, two epochs; "
                     f"{kills} times ended by SIGKILL, its checkpoint after {places} of "
                     f"{len(whole['history']['losses'])} steps",
             "wanted": "the same bits as undisturbed",
             "found": f"{len(wrong)} DIFFER" if wrong else
             f"the same: {len(whole['model'])} tensors, their averages, momentum, losses"}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of kills")
    parser.add_argument("-o", "--output", type=Path, help="a result file to write")
    args = parser.parse_args()
    rows = measure(args)
    print(*(f"{row['what']}: {row['found']}" for row in rows), sep="\n")
    if args.output:
        Result("claims", shlex.join(["python", *sys.argv]), datetime.date.today().isoformat(),
               facts(1, limits=False), {"seed": args.seed}, rows).save(args.output)
    return int("DIFFER" in rows[0]["found"])


if __name__ == "__main__":
    sys.exit(main())

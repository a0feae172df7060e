"""Models with and without the plans that come with the package for this family of processors.

    python benchmarks/families.py                       # four models; wants a quiet machine
    python benchmarks/families.py resnet50 --rounds 20 -o found.json

Each model runs in two processes, which take turns: one with the family's plans, one with estimates
alone. The ratio is the least time without over the least time with.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from zoo_models import ZOO, settle

import tilewise
from tilewise.bench import machine
from tilewise.bench.results import Result

MODELS = ("resnet50", "resnet18", "mobilenet_v2", "yolov8n")
CALLS = 5  # of a turn
WARM = 4  # calls until a model runs as a program


def child(name: str, plain: bool) -> None:
    """Answers each line with the least seconds of some calls; first tells of the family's plans."""
    if plain:
        tilewise.wisdom.forget()
    torch.manual_seed(0)
    model, x = settle(ZOO[name].make()).eval(), torch.randn(1, *ZOO[name].shape)
    fast = tilewise.optimize(model)
    with torch.inference_mode():
        for _ in range(WARM):
            fast(x)
        layers = tilewise.explain(fast, x).layers
        print(sum(e.plan.source == "family" for _, e in layers), flush=True)
        for _ in sys.stdin:
            print(min(timed(fast, x) for _ in range(CALLS)), flush=True)


def timed(model: Any, x: torch.Tensor) -> float:
    start = perf_counter()
    model(x)
    return perf_counter() - start


def measured(name: str, rounds: int) -> dict[str, Any]:
    words = [sys.executable, __file__, name, "--child"]
    children = [subprocess.Popen(words + more, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 text=True) for more in ([], ["--plain"])]
    layers = [int(answer(one)) for one in children]
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for one, seen in zip(children, times):
            seen.append(float(answer(one, "go\n")))
    for one in children:
        one.communicate()
    ours, plain = map(min, times)
    return {"model": name, "family_layers": layers[0], "ms": ours * 1e3,
            "estimates_ms": plain * 1e3, "ratio": plain / ours,
            "by_rounds": statistics.median(b / a for a, b in zip(*times))}


def answer(one: Any, line: str = "") -> str:
    one.stdin.write(line)
    one.stdin.flush()
    found: str = one.stdout.readline()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.child:
        child(args.models[0], args.plain)
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # who waits leaves the other alone
    rows = []
    for name in args.models:
        rows.append(row := measured(name, args.rounds))
        print(f"{name:14} {row['family_layers']:3} layers by the family: {row['ms']:7.2f} ms, by "
              f"estimates {row['estimates_ms']:7.2f} ms: {row['ratio']:.3f}x, by rounds "
              f"{row['by_rounds']:.3f}x", flush=True)
    if args.output:
        Result("families", shlex.join(["python", *sys.argv]), date.today().isoformat(),
               machine.facts(torch.get_num_threads(), limits=False), {"rounds": args.rounds}, rows,
               []).save(args.output)


if __name__ == "__main__":
    main()

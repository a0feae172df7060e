"""How good plans are: random problems, every candidate timed, and what the planner chose.

    python benchmarks/planner.py --count 200
    python benchmarks/planner.py --first 100 --count 20 --table
    python benchmarks/planner.py --seed 1 --save times.jsonl   # other problems, to fit costs to
    python benchmarks/planner.py --again times.jsonl --table   # what estimates choose by now

A candidate is an algorithm with its default schedule. All of a problem are timed in turns; that is
the yardstick. "measure" plans by its own, shorter measurement, "estimate" by the cost model; the
loss of a choice is its time on the yardstick over the best candidate's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch

import tilewise
from tilewise.conv.running import ENGINE
from tilewise.planner.measure import interleaved

CHANNELS = (1, 3, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
IMAGES = (7, 10, 14, 20, 28, 40, 56, 80, 112, 160, 224)
FILTERS = ((1, 1),) * 3 + ((3, 3),) * 5 + ((5, 5), (7, 7), (1, 3), (3, 1))


def draw(rng: random.Random) -> str:
    """A convolution as networks have them, in channels-last."""
    while True:
        n, h, w = rng.choice((1, 1, 2, 4, 8, 16)), rng.choice(IMAGES), rng.choice(IMAGES)
        c, k = rng.choice(CHANNELS), rng.choice(CHANNELS)
        (r, s), stride, groups = rng.choice(FILTERS), rng.choice((1, 1, 1, 2)), 1
        kind = rng.random()
        if kind < 0.15:  # depthwise
            k = groups = c
        elif kind < 0.22 and c % 4 == 0 and k % 4 == 0:
            groups = 4
        if rng.random() < 0.7:
            w = h
        padding = f"p{r // 2}x{s // 2}" if max(r, s) > 1 and rng.random() < 0.85 else ""
        tail = rng.choice(("", "+bias", "+bias+relu", "+bias+relu", "+bias+residual+relu"))
        text = (f"n{n}c{c}h{h}w{w}k{k}r{r}s{s}" + (f"u{stride}" if stride > 1 else "") + padding
                + (f"g{groups}" if groups > 1 else "") + "_f32_forward" + tail)
        p = tilewise.Problem.parse(text)
        if min(p.conv_h, p.conv_w) > 0 and 1e6 < p.flops < 8e8 and p.bytes < 5e7:
            return str(p)


def losses(text: str, target: tilewise.Target, rounds: int) -> dict:
    """Seconds of every candidate, and what "measure" and "estimate" chose."""
    p = tilewise.Problem.parse(text)
    chosen = ENGINE.plan(p, target, "measure")
    tilewise.wisdom.forget()
    estimated = ENGINE.plan(p, target)
    found = {c.algorithm: c.plan for c in tilewise.explain(p, target=target).candidates
             if c.plan and c.algorithm != "reference"}
    found |= {plan.algorithm: plan for plan in (chosen, estimated)}
    times = interleaved([ENGINE.start(plan) for plan in found.values()], rounds, 0.004, 3)
    seconds = {name: time.minimum for name, time in zip(found, times, strict=True)}
    return {"problem": text, "seconds": seconds, "measure": chosen.algorithm,
            "estimate": estimated.algorithm}


def again(row: dict, target: tilewise.Target) -> dict:
    """A row of earlier times with what an estimate chooses now."""
    return row | {"estimate": ENGINE.plan(
        tilewise.Problem.parse(row["problem"]), target).algorithm}


def report(name: str, found: list[float], bound: float) -> str:
    within = sum(loss <= 1 + bound for loss in found) / len(found)
    return (f"{name}: {within:.1%} of {len(found)} within {bound:.0%} of the best candidate; "
            f"median {statistics.median(found):.3f}, worst {max(found):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="print every problem")
    parser.add_argument("--save", help="file for the times, a line a problem")
    parser.add_argument("--again", help="such a file: choose again, measure nothing")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    target = tilewise.Target.host(threads=args.threads)
    measured, estimated = [], []
    tilewise.wisdom.forget()
    for row in rows(args, target):
        seconds = row["seconds"]
        best = min(seconds, key=seconds.__getitem__)
        measured.append(seconds[row["measure"]] / seconds[best])
        estimated.append(seconds[row["estimate"]] / seconds[best])
        if args.table:
            rest = " ".join(f"{name}={t * 1e6:.0f}" for name, t in seconds.items())
            print(f"{row['problem']:58} best {best:15} measure {measured[-1]:.2f} estimate "
                  f"{row['estimate']:15} {estimated[-1]:.2f} {rest}", flush=True)
    print(report("measure", measured, 0.03))
    print(report("estimate", estimated, 0.15))


def rows(args: argparse.Namespace, target: tilewise.Target) -> Iterator[dict]:
    if args.again:
        yield from (again(json.loads(line), target)
                    for line in Path(args.again).read_text().splitlines())
        return
    rng = random.Random(args.seed)
    for text in [draw(rng) for _ in range(args.first + args.count)][args.first:]:
        row = losses(text, target, args.rounds)
        if args.save:
            with open(args.save, "a") as file:
                print(json.dumps(row), file=file)
        yield row


if __name__ == "__main__":
    main()

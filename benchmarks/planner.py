"""How good plans are: random problems, every candidate timed, and what the planner chose.

    python benchmarks/planner.py --count 200
    python benchmarks/planner.py --first 100 --count 20 --table

A candidate is an algorithm with its default schedule. All of a problem are timed in turns; that is
the yardstick. "measure" plans by its own, shorter measurement, "estimate" by the cost model; the
loss of a choice is its time on the yardstick over the best candidate's.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch

import tilewise
from tilewise.frontend.ops import ENGINE
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


def losses(text: str, target: tilewise.Target, rounds: int) -> tuple[dict[str, float], str, str]:
    """Seconds of every candidate, and what "measure" and "estimate" chose."""
    p = tilewise.Problem.parse(text)
    chosen = ENGINE.plan(p, target, "measure")
    tilewise.wisdom.forget()
    estimated = ENGINE.plan(p, target)
    found = {name_of(c.plan): c.plan for c in tilewise.explain(p, target=target).candidates
             if c.plan and c.algorithm != "reference"}
    found |= {name_of(plan): plan for plan in (chosen, estimated)}
    times = interleaved([ENGINE.start(plan) for plan in found.values()], rounds, 0.004, 3)
    seconds = {name: time.minimum for name, time in zip(found, times, strict=True)}
    return seconds, name_of(chosen), name_of(estimated)


def name_of(plan) -> str:
    """An algorithm, and what it multiplies with where it has a choice."""
    products = plan.schedule.get("products")
    return f"{plan.algorithm}:{products}" if products else plan.algorithm


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
    parser.add_argument("--table", action="store_true", help="print every problem")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    target = tilewise.Target.host(threads=args.threads)
    rng = random.Random(0)
    problems = [draw(rng) for _ in range(args.first + args.count)][args.first:]
    measured, estimated = [], []
    tilewise.wisdom.forget()
    for text in problems:
        seconds, by_measure, by_estimate = losses(text, target, args.rounds)
        best = min(seconds, key=seconds.__getitem__)
        measured.append(seconds[by_measure] / seconds[best])
        estimated.append(seconds[by_estimate] / seconds[best])
        if args.table:
            rest = " ".join(f"{name}={t * 1e6:.0f}" for name, t in seconds.items())
            print(f"{text:58} best {best:15} measure {measured[-1]:.2f} estimate {by_estimate:15} "
                  f"{estimated[-1]:.2f} {rest}", flush=True)
    print(report("measure", measured, 0.03))
    print(report("estimate", estimated, 0.15))


if __name__ == "__main__":
    main()

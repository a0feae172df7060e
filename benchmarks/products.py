"""Layers of a model by every algorithm and number of products, and what each precision chose.

    python benchmarks/products.py resnet50 --batch 16
    python benchmarks/products.py vgg16 --batch 1

All candidates of a layer are timed in turns. For each setting of
torch.set_float32_matmul_precision, the loss of the planner's choice is its time over that of the
best candidate that the setting admits.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch

import tilewise
from tilewise.conv.running import ENGINE
from tilewise.model.tuning import observe
from tilewise.models import MODELS
from tilewise.planner.measure import interleaved
from tilewise.runtime.engine import BITS, PRECISIONS


def layers(name: str, batch: int) -> dict[tilewise.Problem, int]:
    """The problems of a model, and how often each occurs."""
    model = tilewise.optimize(MODELS[name]().eval())
    found: dict[tilewise.Problem, int] = {}
    for layer in observe(model, torch.zeros(1, 3, 224, 224)):
        p = layer.plan.problem.with_(n=batch)
        found[p] = found.get(p, 0) + 1
    return found


def name_of(plan) -> str:
    return plan.algorithm.removeprefix("cpu_")


def timed(p, t, rounds, budget):
    """Every candidate with its least seconds; one of torch and one of float32 among them."""
    offers = [c.plan for c in ENGINE.planner.candidates(p, t) if c.plan]
    plans = {name_of(plan): plan for plan in offers if plan.algorithm != "reference"}
    least = min(plan.seconds for plan in plans.values())
    plans = {name: plan for name, plan in plans.items() if plan.seconds < 12 * least}
    times = interleaved([ENGINE.start(plan) for plan in plans.values()], rounds, 0.003, budget)
    return {name: (plan, time.minimum)
            for (name, plan), time in zip(plans.items(), times, strict=True)}


def chosen(p, t, precision) -> str:
    """The planner's choice."""
    return name_of(ENGINE.planner.plan(p, t, max_error=PRECISIONS[precision],
                                       bits=BITS[precision]))


def admitted(plan, precision) -> bool:
    a = ENGINE.planner.algorithm(plan.algorithm)
    return a.baseline or (plan.error <= PRECISIONS[precision]
                          and a.bits >= BITS[precision])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget", type=float, default=1.5, help="seconds a layer")
    parser.add_argument("--only", default="", help="problems that contain this")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    t = tilewise.Target.host(threads=args.threads)
    totals = {precision: [0.0, 0.0] for precision in PRECISIONS}
    torch_total, worst = 0.0, dict.fromkeys(PRECISIONS, 0.0)
    for p, count in layers(args.model, args.batch).items():
        if args.only not in str(p):
            continue
        found = timed(p, t, args.rounds, args.budget)
        torch_total += count * found.get("vendor", (None, 0.0))[1]
        print(f"{count} x {p}")
        print("   ", " ".join(f"{name}={seconds * 1e3:.2f}({plan.seconds * 1e3:.2f})"
                              for name, (plan, seconds) in found.items()))
        for precision, total in totals.items():
            best = min((name for name, (plan, _) in found.items() if admitted(plan, precision)),
                       key=lambda name: found[name][1])
            choice = chosen(p, t, precision)
            loss = found[choice][1] / found[best][1]
            worst[precision] = max(worst[precision], loss)
            total[0] += count * found[choice][1]
            total[1] += count * found[best][1]
            if loss > 1.1:
                print(f"    {precision}: {choice} instead of {best}, {loss:.2f}")
    for precision, (ours, best) in totals.items():
        print(f"{args.model} batch {args.batch} {precision}: layers {ours * 1e3:.1f} ms, best "
              f"candidates {best * 1e3:.1f} ({ours / best:.3f}), torch's eager layers "
              f"(where not hopeless) {torch_total * 1e3:.1f}; worst loss {worst[precision]:.2f}")


if __name__ == "__main__":
    main()

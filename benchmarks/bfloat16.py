"""Models in bfloat16: tilewise beside torch's forms and OpenVINO, errors against float64.

    python benchmarks/bfloat16.py                          # six models; wants a quiet machine
    python benchmarks/bfloat16.py resnet50 --batch 8 --rounds 9
    python benchmarks/bfloat16.py resnet18 --no-compile -o found.json

The model is `model.bfloat16()`. Contenders take turns: torch as it is, torch with channels-last,
`torch.compile` with channels-last and frozen weights, OpenVINO in the precision that it takes by
itself from the same weights, `tilewise.optimize(model)` in bfloat16, and the same in float32. The
ratio is the least time of torch's best form over ours. Errors are relative to float64 with the same
weights. No speed is told where ours errs more than 1.1 times torch.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import shlex
import statistics
import sys
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("TORCHINDUCTOR_FREEZING", "1")

import torch
from torch import Tensor
from zoo_engines import engines
from zoo_models import ZOO, settle, tensors

import tilewise
from tilewise.bench import machine
from tilewise.bench.results import Result
from tilewise.model.dynamo import has_compiler
from tilewise.planner.measure import interleaved

MODELS = ("resnet18", "resnet50", "mobilenet_v2", "yolov8n", "vgg16", "unet")
FORMS = ("eager", "channels_last", "compiled")  # of torch
WORSE = 1.1  # times torch's error that ours may be

Run = Callable[[], Any]


def contenders(model: Any, x: Tensor, compiles: bool, peers: list[str],
               threads: int) -> dict[str, Run]:
    """By name; the model and the images are bfloat16."""
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    images = x.contiguous(memory_format=torch.channels_last)
    ours = tilewise.optimize(copy.deepcopy(model))
    wide = tilewise.optimize(copy.deepcopy(model).float())
    runs: dict[str, Run] = {"eager": lambda: model(x), "channels_last": lambda: last(images)}
    if compiles:
        compiled = torch.compile(copy.deepcopy(last))
        runs["compiled"] = lambda: compiled(images)
    plain = x.float()  # which engines read, as long as it lives
    runs |= {"tilewise": lambda: ours(x), "tilewise float32": lambda: wide(plain)}
    try:
        runs |= engines(peers, copy.deepcopy(model).float(), plain, threads)
    except Exception as reason:  # an engine that is not there, or does not take the model
        print(f"  without {', '.join(peers)}: {type(reason).__name__}: {str(reason)[:200]}")
    return runs


def error(found: Any, wanted: Any) -> float:
    """The largest of all results."""
    pairs = zip(tensors(found), tensors(wanted))
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def measured(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A row: milliseconds and errors by contender, and the ratios."""
    torch.manual_seed(0)
    model = settle(ZOO[name].make()).eval().bfloat16()
    x = torch.randn(args.batch, *ZOO[name].shape).bfloat16()
    compiles = args.compile and has_compiler()
    runs = contenders(model, x, compiles, args.against, args.threads)
    wanted = copy.deepcopy(model).double()(x.double())
    errors = {}
    for who, run in runs.items():
        run()
        errors[who] = error(run(), wanted)
    theirs = [form for form in FORMS if form in runs]
    if not errors["tilewise"] <= WORSE * min(errors[form] for form in theirs):
        raise SystemExit(f"{name}: errors are {errors}: no speed is told of a wrong result")
    times = dict(zip(runs, interleaved(list(runs.values()), args.rounds, 0.02, args.budget),
                     strict=True))
    best = min(theirs, key=lambda form: times[form].minimum)
    ours = times["tilewise"]
    rounds = [a / b for a, b in zip(times[best].samples, ours.samples, strict=True)]
    return {"model": name, "batch": args.batch, "best": best,
            "ratio": times[best].minimum / ours.minimum, "paired": statistics.median(rounds),
            "times": {who: time.minimum for who, time in times.items()}, "errors": errors}


def tell(row: dict[str, Any]) -> None:
    print(f"{row['model']}, batch {row['batch']}: {row['ratio']:.2f}x of torch's best "
          f"({row['best']}), by rounds {row['paired']:.2f}x", flush=True)
    for who, seconds in row["times"].items():
        print(f"  {who:18} {seconds * 1e3:8.1f} ms  error {row['errors'][who]:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=30, help="seconds of measuring a model")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--against", nargs="*", default=["openvino_default"])
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    rows = []
    with torch.inference_mode():
        for name in args.models:
            rows.append(measured(name, args))
            tell(rows[-1])
    mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in rows))
    print(f"geometric mean of {len(rows)}: {mean:.2f}x, least {min(r['ratio'] for r in rows):.2f}x")
    if args.output:
        Result("bfloat16", shlex.join(["python", *sys.argv]), date.today().isoformat(),
               machine.facts(args.threads, limits=False), {"rounds": args.rounds},
               rows).save(args.output)


if __name__ == "__main__":
    main()

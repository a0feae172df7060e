"""Models in bfloat16: tilewise beside torch's forms and OpenVINO, errors against float64.

    python benchmarks/bfloat16.py                          # six models; wants a quiet machine
    python benchmarks/bfloat16.py resnet50 --batch 8 --rounds 9
    python benchmarks/bfloat16.py resnet18 --no-compile -o found.json
    python benchmarks/bfloat16.py --mode autocast --batch 1 8
    python benchmarks/bfloat16.py --mode medium            # float32 images beside bfloat16 images

The model is `model.bfloat16()`; with `--mode autocast` it is float32 and all but OpenVINO run it
under `torch.autocast`. Contenders take turns: torch as it is, torch with channels-last,
`torch.compile` with channels-last and frozen weights, OpenVINO in the precision that it takes by
itself from the same weights, `tilewise.optimize(model)` in bfloat16, and the same in float32. The
ratio is the least time of torch's best form over ours. Errors are relative to float64 with the same
weights. No speed is told where ours errs more than 1.1 times torch.

With `--mode medium`, the model is float32 and `torch.set_float32_matmul_precision` is "medium".
Then ours runs with float32 images and with images that are stored in bfloat16; "chosen" says which
of these it takes by itself.
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
from tilewise.conv.running import ENGINE
from tilewise.model.dynamo import has_compiler
from tilewise.model.storing import storing
from tilewise.planner.measure import interleaved

MODELS = ("resnet18", "resnet50", "mobilenet_v2", "yolov8n", "vgg16", "unet")
FORMS = ("eager", "channels_last", "compiled")  # of torch
KINDS = {"bfloat16": "bfloat16", "autocast": "bfloat16", "medium": "bfloat16-images"}  # of results
WORSE = 1.1  # times torch's error that ours may be

Run = Callable[[], Any]


def contenders(model: Any, x: Tensor, args: argparse.Namespace) -> dict[str, Run]:
    """By name; the model and the images are bfloat16, or are cast by autocast."""
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    images = x.contiguous(memory_format=torch.channels_last)
    ours = tilewise.optimize(copy.deepcopy(model))
    wide = tilewise.optimize(copy.deepcopy(model).float())
    runs: dict[str, Run] = {"eager": lambda: model(x), "channels_last": lambda: last(images)}
    if args.compile and has_compiler():
        compiled = torch.compile(copy.deepcopy(last))
        runs["compiled"] = lambda: compiled(images)
    runs["tilewise"] = lambda: ours(x)
    if args.mode == "autocast":
        runs = {name: torch.autocast("cpu", torch.bfloat16)(run) for name, run in runs.items()}
    plain = x.float()  # which engines read, as long as it lives
    runs["tilewise float32"] = lambda: wide(plain)
    return runs | peers(model, plain, args)


def peers(model: Any, x: Tensor, args: argparse.Namespace) -> dict[str, Run]:
    try:
        found: dict[str, Run] = engines(args.against, copy.deepcopy(model).float(), x, args.threads)
    except Exception as reason:  # an engine that is not there, or does not take the model
        print(f"  without {', '.join(args.against)}: {type(reason).__name__}: {str(reason)[:200]}")
        return {}
    return found


def error(found: Any, wanted: Any) -> float:
    """The largest of all results."""
    pairs = zip(tensors(found), tensors(wanted))
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


def measured(name: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """A row: milliseconds and errors by contender, and the ratios."""
    torch.manual_seed(0)
    model, x = settle(ZOO[name].make()).eval(), torch.randn(batch, *ZOO[name].shape)
    if args.mode == "medium":
        return stored(name, model, x, args)
    if args.mode == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16()
    runs = contenders(model, x, args)
    errors = errors_of(runs, model, x)
    theirs = [form for form in FORMS if form in runs]
    if not errors["tilewise"] <= WORSE * min(errors[form] for form in theirs):
        raise SystemExit(f"{name}: errors are {errors}: no speed is told of a wrong result")
    times = timed(runs, args)
    best = min(theirs, key=lambda form: times[form].minimum)
    return {"model": name, "batch": batch, "best": best, **compared(times, best, "tilewise"),
            "errors": errors}


def errors_of(runs: dict[str, Run], model: Any, x: Tensor) -> dict[str, float]:
    """Of the third call, which is a program."""
    wanted, errors = copy.deepcopy(model).double()(x.double()), {}
    for who, run in runs.items():
        run(), run()
        errors[who] = error(run(), wanted)
    return errors


def timed(runs: dict[str, Run], args: argparse.Namespace) -> dict[str, Any]:
    return dict(zip(runs, interleaved(list(runs.values()), args.rounds, 0.02, args.budget),
                    strict=True))


def compared(times: dict[str, Any], before: str, after: str) -> dict[str, Any]:
    """Least times, and the ratio of two by them and by rounds."""
    rounds = [a / b for a, b in zip(times[before].samples, times[after].samples, strict=True)]
    return {"ratio": times[before].minimum / times[after].minimum,
            "paired": statistics.median(rounds),
            "times": {who: time.minimum for who, time in times.items()}}


def stored(name: str, model: Any, x: Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """A row of a float32 model whose images are stored in either type."""
    ours = tilewise.optimize(copy.deepcopy(model))
    runs: dict[str, Run] = {
        "float32 images": storing(False)(lambda: ours(x)),
        "bfloat16 images": storing(True)(lambda: ours(x)), **peers(model, x, args)}
    errors, plans = errors_of(runs, model, x), []
    ENGINE.observers.append(plans.append)
    ours(x)
    ENGINE.observers.remove(plans.append)
    chosen = "bfloat16" if any(plan.problem.dtype == "bf16" for plan in plans) else "float32"
    times = timed(runs, args)
    return {"model": name, "batch": len(x), "best": "float32 images", "chosen": chosen,
            **compared(times, "float32 images", "bfloat16 images"), "errors": errors}


def tell(row: dict[str, Any]) -> None:
    chosen = f", chosen: {row['chosen']}" if "chosen" in row else ""
    print(f"{row['model']}, batch {row['batch']}: {row['ratio']:.2f}x of {row['best']}, by rounds "
          f"{row['paired']:.2f}x{chosen}", flush=True)
    for who, seconds in row["times"].items():
        print(f"  {who:18} {seconds * 1e3:8.1f} ms  error {row['errors'][who]:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--mode", choices=list(KINDS), default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=30, help="seconds of measuring a model")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--against", nargs="*", default=["openvino_default"])
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("medium" if args.mode == "medium" else "highest")
    rows = []
    with torch.inference_mode():
        for name in args.models:
            for batch in args.batch:
                rows.append(measured(name, batch, args))
                tell(rows[-1])
    mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in rows))
    print(f"geometric mean of {len(rows)}: {mean:.2f}x, least {min(r['ratio'] for r in rows):.2f}x")
    if args.output:
        Result(KINDS[args.mode], shlex.join(["python", *sys.argv]), date.today().isoformat(),
               machine.facts(args.threads, limits=False), {"rounds": args.rounds},
               rows).save(args.output)


if __name__ == "__main__":
    main()

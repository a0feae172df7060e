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
weights, and the mean of three seeds. No speed is told where ours errs more than 1.1 times what
torch errs and what OpenVINO does, which rounds weights with batch norms in them, as we do.

With `--mode medium`, the model is float32 and `torch.set_float32_matmul_precision` is "medium".
Then ours runs as it chooses, with float32 images and with images that are stored in bfloat16; the
ratio is that of OpenVINO's default. "high" beside "highest" is timed in the same run.
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
KINDS = {"bfloat16": "bfloat16", "autocast": "bfloat16", "medium": "medium"}  # of results
WORSE = 1.1  # times the others' error that ours may be
ROUNDING = "openvino_default"  # folds norms and rounds as ours does
SEEDS = 3  # of which errors are the mean

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
    errors = mean_errors(name, batch, args)
    model, x = made(name, batch, args, 0)
    if args.mode == "medium":
        return stored(name, model, x, args, errors)
    runs = contenders(model, x, args)
    errors |= {who: found for who, found in errors_of(runs, model, x).items() if who not in errors}
    theirs = [form for form in FORMS if form in runs]
    refuse(name, errors, "tilewise")
    times = timed(runs, args)
    best = min(theirs, key=lambda form: times[form].minimum)
    return {"model": name, "batch": batch, "best": best, **compared(times, best, "tilewise"),
            "errors": errors}


def made(name: str, batch: int, args: argparse.Namespace, seed: int) -> tuple[Any, Tensor]:
    """A model and images; by the seed."""
    torch.manual_seed(seed)
    model, x = settle(ZOO[name].make()).eval(), torch.randn(batch, *ZOO[name].shape)
    return (model.bfloat16(), x.bfloat16()) if args.mode == "bfloat16" else (model, x)


def mean_errors(name: str, batch: int, args: argparse.Namespace) -> dict[str, float]:
    """Of ours, of torch without compiling and of the engines."""
    plain, found = argparse.Namespace(**{**vars(args), "compile": False}), []
    for seed in range(SEEDS):
        model, x = made(name, batch, args, seed)
        runs = (images_in_turn(model, x) | peers(model, x, args) if args.mode == "medium"
                else contenders(model, x, plain))
        found.append(errors_of(runs, model, x))
    return {who: statistics.fmean(one[who] for one in found) for who in found[0]}


def refuse(name: str, errors: dict[str, float], ours: str) -> None:
    """Stop where ours errs more than all others."""
    theirs = [errors[who] for who in (ROUNDING, "eager") if who in errors]
    if theirs and not errors[ours] <= WORSE * max(theirs):
        raise SystemExit(f"{name}: errors are {errors}: no speed is told of a wrong result")


def errors_of(runs: dict[str, Run], model: Any, x: Tensor) -> dict[str, float]:
    """Of the third call, which is a program."""
    wanted, errors = copy.deepcopy(model).double()(x.double()), {}
    kinds = [y.dtype for y in tensors(runs["tilewise"]())]
    for who, run in runs.items():
        run(), run()
        found = list(tensors(run()))
        if who == ROUNDING:  # its results are float32; ours may be bfloat16, which rounds them
            found = [y.to(kinds[0]) for y in found]
        errors[who] = error(found, wanted)
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


def images_in_turn(model: Any, x: Tensor) -> dict[str, Run]:
    """A model whose images are stored in either type, and as it chooses; "highest" and "high"."""
    ours = tilewise.optimize(copy.deepcopy(model))
    return {"tilewise": at("medium", lambda: ours(x)),
            "float32 images": at("medium", storing(False)(lambda: ours(x))),
            "bfloat16 images": at("medium", storing(True)(lambda: ours(x))),
            "high": at("high", lambda: ours(x)), "highest": at("highest", lambda: ours(x))}


def at(precision: str, run: Run) -> Run:
    """The call under a setting of torch's."""
    def call() -> Any:
        torch.set_float32_matmul_precision(precision)
        return run()
    return call


def stored(name: str, model: Any, x: Tensor, args: argparse.Namespace,
           errors: dict[str, float]) -> dict[str, Any]:
    """A row of a float32 model under "medium", beside the engine that rounds by itself."""
    runs, plans = images_in_turn(model, x) | peers(model, x, args), []
    errors_of(runs, model, x)  # the first calls
    ENGINE.observers.append(plans.append)
    runs["tilewise"]()
    ENGINE.observers.remove(plans.append)
    chosen = "bfloat16" if any(plan.problem.dtype == "bf16" for plan in plans) else "float32"
    refuse(name, errors, "tilewise")
    times = timed(runs, args)
    best = ROUNDING if ROUNDING in runs else "float32 images"
    high = compared(times, "highest", "high")
    return {"model": name, "batch": len(x), "best": best, "chosen": chosen,
            **compared(times, best, "tilewise"), "errors": errors,
            "high": high["ratio"], "high_paired": high["paired"]}


def tell(row: dict[str, Any]) -> None:
    chosen = (f", images: {row['chosen']}; high of highest {row['high']:.2f}x, by rounds "
              f"{row['high_paired']:.2f}x") if "chosen" in row else ""
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
    rows = []
    with torch.inference_mode():
        for name in args.models:
            for batch in args.batch:
                rows.append(measured(name, batch, args))
                tell(rows[-1])
    mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in rows))
    least, paired = (min(row[key] for row in rows) for key in ("ratio", "paired"))
    print(f"geometric mean of {len(rows)}: {mean:.2f}x, least {least:.2f}x, "
          f"by rounds {paired:.2f}x")
    if args.mode == "medium":
        high = math.exp(statistics.fmean(math.log(row["high"]) for row in rows))
        print(f"high of highest: {high:.2f}x")
    if args.output:
        Result(KINDS[args.mode], shlex.join(["python", *sys.argv]), date.today().isoformat(),
               machine.facts(args.threads, limits=False), {"rounds": args.rounds},
               rows).save(args.output)


if __name__ == "__main__":
    main()

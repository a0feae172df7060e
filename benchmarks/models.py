"""Whole models against torch's best, interleaved in one run.

    python benchmarks/models.py vgg16 --batch 8
    python benchmarks/models.py resnet50 --batch 16 --effort measure
    python benchmarks/models.py vgg16 --precision highest high medium
    python benchmarks/models.py vgg16 --precision medium --against openvino_default
    python benchmarks/models.py resnet50 --precision highest --isa amx avx512
    python benchmarks/models.py convnext --batch 8 --effort measure     # of transformers

Torch's best is the best of eager contiguous, eager channels-last, and torch.compile with freezing
and channels-last (left out with --no-compile); it runs with huge pages and, whatever --precision
says of tilewise, in full float32. --against adds peers of `tilewise bench`; --isa adds tilewise on
rows of instructions, each in a process of its own, asked through a pipe. No speed is printed for a
result of ours that is wrong.
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("TORCHINDUCTOR_FREEZING", "1")

import numpy as np
import torch

import tilewise
from tilewise.bench.graph import export
from tilewise.bench.peers import start
from tilewise.bench.remote import Worker
from tilewise.models import MODELS
from tilewise.planner.measure import interleaved

TORCH = ("eager nchw", "eager nhwc", "compiled")
PAUSE = 0.03  # seconds until the threads of the one before have stopped spinning
# definitions with random weights
TRANSFORMERS = {"hf_resnet": ("ResNetForImageClassification", "ResNetConfig"),
                "regnet": ("RegNetForImageClassification", "RegNetConfig"),
                "convnext": ("ConvNextForImageClassification", "ConvNextConfig"),
                "mobilenet_v2": ("MobileNetV2ForImageClassification", "MobileNetV2Config")}


def build(name: str) -> torch.nn.Module:
    if name in MODELS:
        return MODELS[name]()
    import transformers

    model, config = (getattr(transformers, part) for part in TRANSFORMERS[name])
    return model(config())


def logits(result):
    return result if isinstance(result, torch.Tensor) else result.logits


def example(model: str, batch: int) -> torch.Tensor:
    channels, size = {"lenet_a": (1, 86), "lenet_b": (1, 70)}.get(model, (3, 224))
    return torch.randn(batch, channels, size, size)


def settle(model: torch.nn.Module) -> torch.nn.Module:
    """Batch norms with statistics as after training, so that values neither grow nor vanish."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None
    model.train()
    model(torch.randn(2, *example(model.kind, 1).shape[1:]))
    return model.eval()


def rms_error(y: torch.Tensor, reference: torch.Tensor) -> float:
    return float(((y.double() - reference).square().mean() / reference.square().mean()).sqrt())


def contenders(model, x, args):
    """Callables by name, and our model; the first are torch's."""
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    x_last = x.contiguous(memory_format=torch.channels_last)
    runs = {"eager nchw": lambda: model(x), "eager nhwc": lambda: last(x_last)}
    if not args.no_compile:
        compiled = torch.compile(copy.deepcopy(last))
        runs["compiled"] = lambda: compiled(x_last)
    for precision in args.precision:
        ours, runs[f"tilewise {precision}"] = optimised(model, x, precision, args.effort)
    return runs, ours


def optimised(model, x, precision, effort):
    """Our model, planned for a precision, and a call of it under that precision."""
    ours = at(precision, lambda: tilewise.optimize(model, x, effort=effort))()
    return ours, at(precision, partial(ours, x))


def peers(model, x, args, directory):
    """Engines that `tilewise bench` knows; each call returns a tensor."""
    found = {}
    for name in args.against:
        place = Path(directory, name.partition("=")[0])
        place.mkdir()
        peer = start(name, export(model, x), x.contiguous(), args.threads, place)
        found[name] = partial(lambda peer: peer.result(peer.run()), peer)
    return found


def on_rows(args, directory):
    """This script again for every row and precision: the row of a process is decided once."""
    found = {}
    for row in args.isa:
        for precision in args.precision:
            place = Path(directory, f"{row} {precision}.npy")
            command = [sys.executable, __file__, args.model, "--batch", str(args.batch),
                       "--effort", args.effort, "--threads", str(args.threads), "--precision",
                       precision, "--serve", str(place)]
            worker = Worker(row, subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, env={**os.environ, "TILEWISE_ISA": row}))
            worker.ask("ready")
            found[f"tilewise {precision} {row}"] = partial(_answer, worker, place)
    return found


def _answer(worker, place):
    worker.ask("run")
    return torch.from_numpy(np.load(place))


def serve(model, x, args):
    """Answer every line on stdin; the result of a run is left in a file."""
    _, run = optimised(model, x, args.precision[0], args.effort)
    for line in sys.stdin:
        if line.strip() == "run":
            np.save(args.serve, logits(run()).numpy())
        print("done", flush=True)


def at(precision, run):
    """The call under a setting of torch.set_float32_matmul_precision."""
    def call():
        torch.set_float32_matmul_precision(precision)
        y = run()
        torch.set_float32_matmul_precision("highest")
        return y

    return call


def gate(errors):
    """No speed for a result that is wrong."""
    theirs = errors["eager nhwc"]
    # deep nets with random weights multiply every rounding error, torch's as well
    limits = {"highest": max(5e-6, 3 * theirs), "high": max(1e-4, 40 * theirs),
              "medium": max(3e-2, 8000 * theirs)}
    for name, error in errors.items():
        ours, _, precision = name.partition(" ")
        if ours == "tilewise" and not error < limits[precision.split()[0]]:
            sys.exit(f"{name}: rms error {error:.1e}, torch {theirs:.1e}: no speed for a "
                     "wrong result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=[*MODELS, *TRANSFORMERS])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--effort", default="estimate")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--precision", nargs="+", default=["highest"],
                        choices=["highest", "high", "medium"])
    parser.add_argument("--against", nargs="+", default=[], help="peers of `tilewise bench`")
    parser.add_argument("--isa", nargs="+", default=[],
                        help="rows of instructions, each in a process of its own")
    parser.add_argument("--layers", action="store_true", help="print the table of layers")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    model = build(args.model)
    model.kind = args.model
    model, x = settle(model), example(args.model, args.batch)
    if args.serve:
        return serve(model, x, args)
    with tempfile.TemporaryDirectory() as directory:
        runs, ours = contenders(model, x, args)
        others = {**peers(model, x, args, directory), **on_rows(args, directory)}
        compare({**runs, **others}, model, x, args)
    if args.layers:
        print(tilewise.explain(ours, x, effort="measure"))


def compare(runs, model, x, args):
    """Check everybody's result, then time all in turns."""
    reference = logits(copy.deepcopy(model).double()(x[:2].double()))
    errors = {name: rms_error(logits(run())[:2], reference) for name, run in runs.items()}
    gate(errors)
    pause = PAUSE if args.against or args.isa else 0.0
    times = dict(zip(runs, interleaved(list(runs.values()), args.rounds, 0.05, 240, pause=pause),
                     strict=True))
    theirs = [time for name, time in times.items() if name in TORCH]
    best, middle = min(t.minimum for t in theirs), min(t.median for t in theirs)
    for name, time in times.items():
        print(f"{args.model} batch {args.batch} {name:23} {time.minimum * 1e3:9.2f} ms "
              f"(median {time.median * 1e3:9.2f}, spread {time.spread:.0%}), "
              f"{best / time.minimum:5.2f}x of torch's best (median {middle / time.median:5.2f}x), "
              f"error {errors[name]:.1e}", flush=True)


if __name__ == "__main__":
    main()

"""The models of the zoo, one image at a time or more: tilewise beside torch's best form.

    python benchmarks/zoo.py -o zoo.json                     # all; wants a quiet machine, an hour
    python benchmarks/zoo.py resnet50 yolov8n --rounds 9
    python benchmarks/zoo.py resnet50 --batch 8
    python benchmarks/zoo.py resnet50 --no-compile --against onnxruntime openvino
    python benchmarks/zoo.py --draw zoo.json docs/images/zoo.png  # measures nothing

Each model runs in a process of its own. Its contenders take turns: torch as it is, torch with
channels-last, `torch.compile` with channels-last and frozen weights, and `tilewise.optimize(model,
image)`, all in float32 on the same threads. The models of the picture also run in the other engines
that are named; openvino_default takes bfloat16 where it can. The ratio is the least time of torch's
best form over ours: above 1 tilewise is faster. By rounds it is the median of the ratios within a
round. The seconds of our first call, from an empty cache, are told too: a user waits for them. No
speed is told where our result is wrong.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("TORCHINDUCTOR_FREEZING", "1")

import torch
from torch import Tensor, nn
from zoo_engines import ENGINES, engines
from zoo_models import ZOO, settle, tensors

import tilewise
from tilewise.bench import machine
from tilewise.bench.figures import OURS, TORCH, WIDTH
from tilewise.bench.results import Result
from tilewise.bench.svg import FAINT, INK, Drawing
from tilewise.model.dynamo import has_compiler
from tilewise.planner.measure import interleaved

FORMS = ("eager", "channels_last", "compiled")  # of torch
# of the picture: gains, ties and losses of every kind of network
SHOWN = {"vgg16": "VGG16", "unet": "U-Net", "sd_vae": "SD autoencoder", "esrgan": "ESRGAN",
         "resnet18": "ResNet-18", "resnet50": "ResNet-50", "yolov8n": "YOLOv8n",
         "mobilenet_v2": "MobileNetV2", "efficientnet_b0": "EfficientNet-B0",
         "densenet121": "DenseNet-121", "deeplabv3": "DeepLabV3", "convnext_tiny": "ConvNeXt-T",
         "shufflenet_v2_x1_0": "ShuffleNetV2"}
TIE, LOSS = 0.05, "#1c7ed6"  # differences of less are none; a colour
TIMES, FLOOR = 10, 2e-5  # our error may be so many times torch's, or so large where torch's is less
OTHERS = {"openvino_default": 0.1}  # what an engine's may be, where not 1e-3


def contenders(model: nn.Module, x: Tensor, compiles: bool) -> dict[str, Callable[[], Any]]:
    last, x_last = copy.deepcopy(model), x
    found: dict[str, Callable[[], Any]] = {"eager": lambda: model(x)}
    if x.dim() == 4:
        last = last.to(memory_format=torch.channels_last)
        x_last = x.contiguous(memory_format=torch.channels_last)
        found["channels_last"] = lambda: last(x_last)
    if compiles:
        compiled = torch.compile(copy.deepcopy(last), dynamic=False)
        found["compiled"] = lambda: compiled(x_last)
    fast: list[nn.Module] = []

    def ours() -> Any:
        if not fast:
            fast.append(tilewise.optimize(model, x))
        return fast[0](x)

    return {**found, "tilewise": ours}


def flat(result: Any) -> Tensor:
    return torch.cat([x.detach().flatten().double() for x in tensors(result)])


def error(y: Any, exact: Tensor) -> float:
    return float((flat(y) - exact).norm() / exact.norm())


def measured(name: str, batch: int, rounds: int, threads: int, compiles: bool,
             against: list[str]) -> dict[str, Any]:
    """A model's times and errors."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    entry = ZOO[name]
    model, x = settle(entry.make()).eval(), torch.randn(batch, *entry.shape)
    first, errors, runs = {}, {}, contenders(model, x, compiles)
    if name in SHOWN:
        runs.update(engines(against, model, x, threads))
    with torch.no_grad():
        exact = flat(copy.deepcopy(model).double()(x.double()))
        for who, run in list(runs.items()):
            start = time.perf_counter()
            try:
                errors[who] = error(run(), exact)
            except Exception as problem:  # whatever a compiler does with a model
                if who == "tilewise":
                    raise
                print(f"{name}: {who} failed: {problem}", file=sys.stderr)
                del runs[who]
                continue
            first[who] = time.perf_counter() - start
            if who in ENGINES and not errors[who] <= OTHERS.get(who, 1e-3):
                del runs[who]
        if not errors["tilewise"] <= max(FLOOR, TIMES * errors["eager"]):
            return {"subject": name, "error": errors, "wrong": True}
        times = dict(zip(runs, interleaved(list(runs.values()), rounds, 0.1, 60), strict=True))
    best = min((who for who in FORMS if who in times), key=lambda who: times[who].minimum)
    paired = [theirs / ours for theirs, ours in zip(times[best].samples, times["tilewise"].samples,
                                                    strict=True)]
    return {"subject": name, "shape": list(x.shape), "best": best,
            "seconds": {who: time.minimum for who, time in times.items()},
            "median": {who: time.median for who, time in times.items()},
            "ratio": times[best].minimum / times["tilewise"].minimum,
            "by_rounds": statistics.median(paired), "error": errors, "first_call": first}


def in_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", name, "--batch", str(args.batch), "--rounds",
               str(args.rounds), "--threads", str(args.threads),
               *(["--no-compile"] if args.no_compile else []), "--against", *args.against]
    try:
        with tempfile.TemporaryDirectory() as cache:  # what a first call takes, it takes here too
            done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit,
                                  check=False, env={**os.environ, "TILEWISE_CACHE_DIR": cache})
    except subprocess.TimeoutExpired:
        return {"subject": name, "failed": f"took more than {args.limit} s"}
    if done.returncode:
        return {"subject": name, "failed": (done.stderr.strip().splitlines() or ["?"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def shown(row: dict[str, Any]) -> str:
    if "ratio" not in row:
        return f"{row['subject']:24} {row.get('failed', 'WRONG')}"
    times = "  ".join(f"{who} {seconds * 1e3:7.2f}" for who, seconds in row["seconds"].items())
    return (f"{row['subject']:24} {row['ratio']:5.2f}x ({row['by_rounds']:5.2f}x by rounds) of "
            f"{row['best']:13} {times} ms")


def drawing(rows: list[dict[str, Any]]) -> Drawing:
    """Speed by rounds of the models that are shown, torch's best form being one."""
    shown = sorted((row for row in rows if row["subject"] in SHOWN),
                   key=lambda row: -row["by_rounds"])
    left, right, bottom = 118.0, WIDTH - 150, 10 + 21.0 * len(shown)
    found = Drawing(WIDTH, bottom + 16, "speed relative to torch's best form, by model")
    scale = (right - left) / max(row["by_rounds"] for row in shown)
    for i, row in enumerate(shown):
        y, ratio = 6 + 21.0 * i, row["by_rounds"]
        fill = TORCH if abs(ratio - 1) < TIE else OURS if ratio > 1 else LOSS
        found.text(left - 6, y + 13, SHOWN[row["subject"]], 11, "end")
        found.rect(left, y + 2, scale * ratio, 15, fill)
        theirs, ours = (row["median"][who] * 1e3 for who in (row["best"], "tilewise"))
        digits = ".0f" if theirs >= 100 else ".3g"
        found.text(WIDTH, y + 13, f"{ratio:.2f}x · {theirs:{digits}} → {ours:{digits}} ms", 11,
                   "end", INK)
    found.line(left + scale, 4, left + scale, bottom, FAINT, dashed=True)
    found.text(left + scale, bottom + 12, "torch's best form", 10, "middle", FAINT)
    return found


def draw(results: Path, picture: Path) -> None:
    import resvg_py

    picture.write_bytes(bytes(resvg_py.svg_to_bytes(
        svg_string=str(drawing(Result.load(results).of("zoo").rows)), width=int(2 * WIDTH),
        background="white", sans_serif_family="DejaVu Sans")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="names of the zoo; all of them if none")
    parser.add_argument("--batch", type=int, default=1, help="images a call")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=int, default=900, help="seconds for each model")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--against", nargs="*", choices=ENGINES, default=[])
    parser.add_argument("-o", "--output", type=Path, help="a result file to write")
    parser.add_argument("--draw", nargs=2, type=Path, metavar=("RESULTS", "PICTURE"),
                        help="draw a result file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.draw:
        draw(*args.draw)
        return
    compiles = not args.no_compile and has_compiler()
    if args.one:
        warnings.filterwarnings("ignore")
        print(json.dumps(measured(args.one, args.batch, args.rounds, args.threads, compiles,
                                  args.against)))
        return
    unknown = set(args.models) - set(ZOO)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; the zoo has {', '.join(ZOO)}")
    rows = []
    for name in args.models or ZOO:
        rows.append(in_process(name, args))
        print(shown(rows[-1]), flush=True)
        if args.output:
            Result("zoo", shlex.join(["python", *sys.argv]), date.today().isoformat(),
                   machine.facts(args.threads, limits=False),
                   {"rounds": args.rounds, "batch": args.batch}, rows).save(args.output)
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    if ratios:
        print(f"{len(ratios)} models, {statistics.geometric_mean(ratios):.2f}x in the geometric "
              f"mean, {sum(ratio < 1 for ratio in ratios)} below 1")
    sys.exit(len(ratios) < len(rows))


if __name__ == "__main__":
    main()

"""Does every model of the zoo compute and learn the same after tilewise.optimize?

    python benchmarks/zoo_equal.py -o zoo_equal.json    # all 41; an hour or two
    python benchmarks/zoo_equal.py resnet18 yolov8n --limit 600

Each model runs in a process of its own. It is asked for

    eval       its result, optimised without and with an example
    switched   its results in eval, training and again eval mode, and the statistics after that
    training   the losses of five steps of SGD on two images; the momentum, which is the sum of all
               gradients, after the first and the last; then the weights, and by how much the
               statistics have changed

Rounding differs, so float64 judges: the original is run in float64 too, and our error against that
may be ten times torch's own in float32, or FLOOR where torch happens to be closer. A few times
torch's error is what Winograd's transforms, or sums in another order, cost; what is computed wrong
is off by far more. Gradients are compared, too, since weights hardly move. Where torch itself is
off by more than LOOSE, the model amplifies rounding so much that this comparison says little, and
the row says "loose"; the gradients of the first step are not amplified.

Dropout draws the same numbers on all sides, but puts them elsewhere where images have another
layout. A model that differs and has dropout is asked again without it, and the row says "p=0".
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from torch import Tensor, nn
from zoo_models import ZOO, settle, tensors

import tilewise
from tilewise.bench import machine
from tilewise.bench.results import Result

TIMES = 10  # our error against float64 to torch's
# one value that rounds to the other side of a ReLU's zero moves gradients by 5e-4, also torch's
FLOOR = {"result": 2e-5, "loss": 1e-5, "weights": 1e-6, "gradients": 2e-3, "statistics": 1e-5}
LOOSE = 1e-2
STEPS, BATCH = 5, 2
RATE = 1e-4  # with larger ones, steps amplify rounding errors more
CHANCES = ("p", "drop_prob", "drop_rate")  # of dropout, stochastic depth and drop path
Seen = dict[str, Tensor]


# what is asked of a model


def evaluated(model: nn.Module, x: Tensor, small: Tensor) -> Seen:
    with torch.no_grad():
        return {"result": flat(model(x))}


def switched(model: nn.Module, x: Tensor, small: Tensor) -> Seen:
    before = buffers(model)
    with torch.no_grad():
        seen = {"result.eval": flat(model.eval()(small))}
        torch.manual_seed(1)
        seen["result.train"] = flat(model.train()(small))
        seen["result.again"] = flat(model.eval()(small))
    return {**seen, "statistics": buffers(model) - before}


def trained(model: nn.Module, x: Tensor, small: Tensor) -> Seen:
    model.train()
    before = buffers(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses, moments = [], []
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = sum(y.pow(2).mean() for y in tensors(model(small)) if y.requires_grad)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().double())
        moments.append(flat([optimizer.state[p]["momentum_buffer"] for p in model.parameters()
                             if p in optimizer.state]))
    return {"loss": torch.stack(losses), "gradients.first": moments[0],
            "gradients.last": moments[-1], "weights": flat(list(model.parameters())),
            "statistics": buffers(model) - before}


def flat(result: Any) -> Tensor:
    return torch.cat([x.detach().flatten().double() for x in tensors(result)])


def buffers(model: nn.Module) -> Tensor:
    """The statistics of all norms, which other buffers do not join."""
    found = [b for name, b in model.named_buffers() if "running_" in name]
    return flat(found) if found else torch.zeros(0, dtype=torch.float64)


# the comparison


def compared(ask: Callable[..., Seen], original: nn.Module, ours: nn.Module, x: Tensor,
             small: Tensor) -> dict[str, Any]:
    """Errors of ours and of torch against float64, by what was asked for."""
    exact = ask(copy.deepcopy(original).double(), x.double(), small.double())
    plain = ask(copy.deepcopy(original), x, small)
    mine = ask(ours, x, small)
    return {name: judged(name, error(mine[name], exact[name]), error(plain[name], exact[name]))
            for name in exact}


def judged(name: str, mine: float, torchs: float) -> dict[str, Any]:
    limit = max(FLOOR[name.partition(".")[0]], TIMES * torchs)
    return {"ours": mine, "torch": torchs, "equal": bool(mine <= limit), "loose": torchs > LOOSE}


def error(y: Tensor, exact: Tensor) -> float:
    if y.shape != exact.shape:
        return float("inf")
    if not exact.numel() or torch.equal(y, exact):
        return 0.0
    found = float((y - exact).norm() / exact.norm())
    return found if found == found else float("inf")


def compare_model(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    entry = ZOO[name]
    model = settle(entry.make()).eval()
    x, small = torch.randn(1, *entry.shape), torch.randn(BATCH, *entry.small)
    asked: dict[str, tuple[Callable[..., Seen], Callable[[nn.Module], nn.Module]]] = {
        "eval": (evaluated, tilewise.optimize),
        "example": (evaluated, lambda model: tilewise.optimize(model, x)),
        "switched": (switched, tilewise.optimize),
        "training": (trained, lambda model: tilewise.optimize(model.train()))}
    rows = {}
    for what, (ask, make) in asked.items():
        found = compared(ask, model, make(copy.deepcopy(model)), x, small)
        if not all_equal(found) and without_chance(still := copy.deepcopy(model)):
            what, found = f"{what} p=0", compared(ask, still, make(copy.deepcopy(still)), x, small)
        rows[what] = found
    return rows


def all_equal(found: dict[str, Any]) -> bool:
    return all(cell["equal"] for cell in found.values())


def without_chance(model: nn.Module) -> int:
    """Switch dropout off, whatever it is called; returns how often there was some."""
    found = [(module, name) for module in model.modules() for name in CHANCES
             if isinstance(getattr(module, name, None), float) and getattr(module, name)]
    for module, name in found:
        setattr(module, name, 0.0)
    return len(found)


# one process for each model


def in_process(name: str, limit: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {limit} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def shown(name: str, row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{name:24} failed: {row['failed']}"
    cells = []
    for what, found in row.items():
        worst = max(found.values(), key=lambda cell: (not cell["equal"], cell["ours"]))
        verdict = "DIFFERS" if not worst["equal"] else "loose" if worst["loose"] else "equal"
        cells.append(f"{what} {verdict} {worst['ours']:.0e} ({worst['torch']:.0e})")
    return f"{name:24} " + "   ".join(f"{cell:32}" for cell in cells)


def is_equal(row: dict[str, Any]) -> bool:
    return "failed" not in row and all(map(all_equal, row.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="names of the zoo; all of them if none")
    parser.add_argument("--limit", type=int, default=1200, help="seconds for each model")
    parser.add_argument("-o", "--output", type=Path, help="a result file to write")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        warnings.filterwarnings("ignore")
        print(json.dumps(compare_model(options.one)))
        return
    unknown = set(options.models) - set(ZOO)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; the zoo has {', '.join(ZOO)}")
    rows = {}
    print("worst error against float64 (torch's own), by what was asked for")
    for name in options.models or ZOO:
        rows[name] = in_process(name, options.limit)
        print(shown(name, rows[name]), flush=True)
        if options.output:
            write(options.output, rows)
    sys.exit(0 if all(map(is_equal, rows.values())) else 1)


def write(path: Path, rows: dict[str, Any]) -> None:
    settings = {"steps": STEPS, "batch": BATCH, "times": TIMES, "floor": FLOOR}
    Result("zoo-equal", shlex.join(["python", *sys.argv]), date.today().isoformat(),
           machine.facts(torch.get_num_threads(), limits=False), settings,
           [{"subject": name, **row} for name, row in rows.items()]).save(path)


if __name__ == "__main__":
    main()

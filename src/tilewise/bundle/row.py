"""The part of a bundle for one row of instructions, collected by a process of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from ..conv.running import ENGINE
from ..core.plan import Plan
from ..kernels.cpu.emit import jit
from ..model.optimize import optimize
from ..model.tuning import tune
from ..planner.wisdom import Decided
from ..runtime.forms import MANY
from ..runtime.weights import FORMS, MADE
from ..tools.sharing import noted
from .files import ROW, Writer
from .forms import collected

TASK = "task.pt"
CALLS = 4  # of each example: as a graph, bound, and as a program


def facts_of(work: Path, row: str) -> Path:
    return work / f"{row}.facts.json"


def collect(directory: str) -> None:
    """Run the model, and write all that a worker would have to make."""
    work = Path(directory)
    # written by the process that started this one, a moment ago
    task = torch.load(work / TASK, weights_only=False)
    os.environ["TILEWISE_ISA"] = task["row"]
    torch.set_num_threads(task["threads"])
    torch.set_float32_matmul_precision(task["precision"])
    jit.NOTED = {}
    FORMS.few, MADE.limit = MANY, sys.maxsize
    model = optimize(task["model"], max_error=task["max_error"])
    if task["effort"] != "estimate":
        tune(model, task["examples"][0], task["effort"], task["max_error"])
    with noted() as plans:  # while it is noted what runs, there are no programs
        _run(model, task["examples"], 1)
    _run(model, task["examples"], CALLS)
    _write(work, task["row"], model, plans)


@torch.inference_mode()
def _run(model: Any, examples: list[Any], times: int) -> None:
    for example in examples:
        for _ in range(times):
            model(*example)


def _write(work: Path, row: str, model: Any, plans: list[Plan]) -> None:
    objects = jit.NOTED or {}
    table, start = {}, 0
    with open(work / ROW["objects"].format(row), "xb") as code:
        for digest, image in sorted(objects.items()):
            table[digest] = [start, len(image)]
            start += code.write(image)
    (work / ROW["plans"].format(row)).write_text(_decisions(plans))
    with open(work / ROW["prepared"].format(row), "xb") as prepared:
        forms = collected(model, Writer(prepared))
    facts_of(work, row).write_text(json.dumps({"objects": table, "forms": forms}))


def _decisions(plans: list[Plan]) -> str:
    """What ran, as data that holds for any number of threads."""
    decided = Decided(dict(ENGINE.planner.wisdom.versions))
    for plan in plans:
        decided.record(plan)
    return decided.to_json()

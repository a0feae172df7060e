"""How benchmarks of what was wanted and found end: a result file, where one was asked for."""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import date
from typing import Any

import torch

from . import machine
from .results import Result


def save_claims(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Rows with `what`, `wanted` and `found` go to `args.output`, if that is a file."""
    if args.output is None:
        return
    settings = vars(args) | {"output": args.output.name}
    Result("claims", shlex.join(["python", *sys.argv]), date.today().isoformat(),
           machine.facts(torch.get_num_threads(), limits=False), settings, rows).save(args.output)

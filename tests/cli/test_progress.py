"""Long work says how far it is, and a bar on a terminal shows it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tilewise
from tilewise.bench import health, machine
from tilewise.bench.ladder import ladder
from tilewise.bench.run import Options, measure
from tilewise.bench.subjects import layer
from tilewise.core import Problem, Target
from tilewise.model.tuning import tune
from tilewise.tools.gpu_audit import _told

TINY = "n1c8h8w8k8r3s3p1_f32_forward+bias+relu"


def small_net() -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1),
                        nn.Conv2d(8, 8, 3, padding=1))
    return tilewise.optimize(net.eval()), torch.randn(1, 3, 9, 9)


def heard(work: Callable[[Any], object]) -> list[tuple[str, int, int]]:
    """All that was told, after a look at its order."""
    found: list[tuple[str, int, int]] = []
    work(lambda *said: found.append(said))
    assert found
    for what, done, total in found:
        assert 0 <= done <= total, what
    for (what, done, total), (_, then, next_total) in pairwise(found):
        if next_total == total and then != 0:
            assert done <= then, what
    return found


def test_explaining_a_model_tells_of_layers_and_problems() -> None:
    said = heard(lambda tell: tilewise.explain(*small_net(), tell=tell))
    layers = [f"running {number}" for number in (0, 2, 3)]
    assert said[:3] == [(name, i, 3) for i, name in enumerate(layers)]
    assert [done for what, done, total in said[3:]] == [0, 1, 2]  # two layers are alike
    assert {total for _, _, total in said[3:]} == {2}


def test_tuning_tells_of_problems() -> None:
    said = heard(lambda tell: tune(*small_net(), "wisdom_only", tell=tell))
    assert [(done, total) for what, done, total in said if what.startswith("measuring")] == [
        (0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize("work", [
    lambda tell: tilewise.explain(TINY, effort="measure", tell=tell),
    lambda tell: measure(layer(Problem.parse(TINY)), Options(rounds=2, budget=1.0), tell),
    lambda tell: ladder(Problem.parse(TINY), Target.host(threads=1), {"peak": 1e11,
                                                                     "bandwidth": 1e10}, 2, tell),
    lambda tell: machine.measured_limits(1, tell),
    lambda tell: health.examine(1, tell),
    lambda tell: _told(iter([]), 0, tell),
], ids=["explain", "bench", "ladder", "limits", "doctor", "gpu-audit"])
def test_long_work_tells_how_far_it_is(work: Callable[[Any], object]) -> None:
    heard(work)


def on_a_terminal(*arguments: str, home: Path) -> str:
    """What a command writes to a terminal."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TILEWISE_CACHE_DIR": str(home), "COLUMNS": "120",
                   "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-m", "tilewise", *arguments], stdout=slave,
                               stderr=slave, env=environment)
    os.close(slave)
    said = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:  # Linux: the other side is closed
            break
        if not part:
            break
        said += part
    os.close(master)
    assert process.wait() == 0, said.decode()
    return said.decode()


@pytest.mark.slow
def test_a_terminal_shows_so_many_of_so_many(tmp_path: Path) -> None:
    said = on_a_terminal("tune", "lenet_b", "--batch", "1", home=tmp_path)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said)
    for doing in ("running", "measuring"):
        seen = set(re.findall(rf"{doing} \S+ +[━╸╺]+ (\d+)/(\d+) ", plain))
        assert {total for _, total in seen} == {"2"}, doing
    assert len(seen) > 1

"""Killed at random moments, the trainer ends with the weights of an undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from support import harness
from support.training_sets import idx_set

from tilewise.training import checkpoint

LINES = harness.sample((0, 1, 2, 3, 4) * 2, (0, 2, 4))  # to wait for before each kill
STEPS = 48  # in two epochs
SEED = int(os.environ.get("TILEWISE_KILL_SEED", random.randrange(1 << 30)))


def start(data: Path, output: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tilewise", "train", str(data), "--output", str(output),
         "--model", "lenet_b", "--batch", "8", "--epochs", "2", "--save-every", "2",
         "--lines-every", "1"], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"})


def finish(data: Path, output: Path) -> dict:
    process = start(data, output)
    process.communicate(timeout=120)
    assert process.returncode == 0
    return checkpoint.load(output)


def kill_somewhere(data: Path, output: Path, lines: int, rng: random.Random) -> None:
    """Let it start, and perhaps make a few steps; kill it between two instructions.

    With no line to wait for it is killed while it starts, reads or plans.
    """
    process = start(data, output)
    for _ in range(lines + 1 if lines else 0):
        assert process.stdout.readline(), "it ended before it could be killed"
    time.sleep(rng.uniform(0, 0.02 if lines else 1.5))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def position(output: Path) -> int:
    state = checkpoint.load(output)
    return 0 if state is None else len(state["history"]["losses"])


def test_killed_many_times_it_ends_with_the_same_weights(tmp_path):
    data, rng = idx_set(tmp_path / "data", train=192, test=16), random.Random(SEED)
    whole = finish(data, tmp_path / "whole")
    positions = []
    for lines in rng.sample(LINES, len(LINES)):
        kill_somewhere(data, tmp_path / "killed", lines, rng)
        positions.append(position(tmp_path / "killed"))
    killed = finish(data, tmp_path / "killed")
    told = f"TILEWISE_KILL_SEED={SEED}, checkpoints after the kills: {positions}"
    assert positions == sorted(positions), told
    assert 0 < positions[-1] < STEPS, told
    assert len(set(positions)) > 1, told  # it did go on from where it was
    assert len(killed["history"]["losses"]) == STEPS, told
    assert killed["history"]["losses"] == whole["history"]["losses"], told
    for name, weight in whole["model"].items():
        assert torch.equal(killed["model"][name], weight), f"{name} differs; {told}"
    for number, state in whole["optimizer"]["state"].items():
        assert torch.equal(killed["optimizer"]["state"][number]["momentum_buffer"],
                           state["momentum_buffer"]), told
    assert not list((tmp_path / "killed").glob("*.tmp")), told

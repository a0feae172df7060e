"""Several processes: the gradients of one on the joined batch, and one choice of plans."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training_sets import idx_set

import tilewise
from tilewise.training import Settings, checkpoint, engines
from tilewise.training.images import open_images
from tilewise.training.loop import Run
from tilewise.training.progress import Silent
from tilewise.training.ranks import Ranks


def start(*arguments: str, processes: int = 2, interval: float = 0.1) -> subprocess.Popen:
    """A job; `interval` seconds pass before torchrun notices that a rank has ended."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval",
         str(interval), "--nproc-per-node", str(processes), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True)


def torchrun(*arguments: str, processes: int = 2) -> None:
    job = start(*arguments, processes=processes)
    _, said = job.communicate(timeout=150)
    assert job.returncode == 0, said


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two ranks saw, and the directory of their images."""
    place = tmp_path_factory.mktemp("ranks")
    data = idx_set(place / "data", train=99, test=16)
    torchrun(str(Path(__file__).parents[1] / "support" / "training_rank.py"), str(data), str(place))
    return data, [torch.load(place / f"rank{rank}.pt") for rank in range(2)]


def test_gradients_are_those_of_the_joined_batch(two, tmp_path):
    data, ranks = two
    settings = Settings(str(data), "lenet_b", batch=24, seed=4)
    images = open_images(settings.data, *engines.image_shape(settings))
    alone = Run(settings, tmp_path, images, Ranks(), Silent())
    batches = alone._batches()
    assert [len(numbers) for numbers in batches] == [24] * 4 + [3]
    assert [rank["shares"] for rank in ranks] == [[12] * 4 + [2], [12] * 4 + [1]]
    start = [weight.detach().clone() for weight in alone.model.parameters()]
    for step, numbers in enumerate(batches):
        loss = alone._learn(numbers)
        assert loss == pytest.approx(ranks[0]["losses"][step], rel=1e-5)
        for index, weight in enumerate(alone.model.parameters()):
            first, second = (rank["gradients"][step][index] for rank in ranks)
            assert torch.equal(first, second)
            scale = weight.grad.square().mean().sqrt()
            assert (first - weight.grad).square().mean().sqrt() <= 2e-5 * scale
            with torch.no_grad():
                weight.copy_(start[index])
    tilewise.wisdom.forget()


def test_the_first_rank_decides_the_plans(two):
    _, (first, second) = two
    assert first["alone"] != second["alone"]  # else there was nothing to decide
    decided, used = ({problem: rest for problem, *rest in rank["plans"]}
                     for rank in (first, second))
    shared = decided.keys() & used.keys()
    assert {problem.split("_f32_")[1] for problem in shared} >= {
        "backward_data", "backward_weight"}
    assert all(decided[problem] == used[problem] for problem in shared)
    assert all(decided[problem] == rest for problem, *rest in first["alone"])
    assert any(used[problem] != rest for problem, *rest in second["alone"])


def kill_a_rank(job: subprocess.Popen, lines: int) -> str:
    """After so many lines; returns what was said until the job ended."""
    for _ in range(lines):
        assert job.stdout.readline(), "it ended before a rank could be killed"
    ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(ranks[-1]), signal.SIGKILL)
    return job.communicate(timeout=60)[1]


def test_a_rank_that_dies_ends_the_job_and_the_next_goes_on_with_the_same_bits(tmp_path):
    data = idx_set(tmp_path / "data", train=50, test=15)

    def run(name: str) -> tuple[str, ...]:
        return ("-m", "tilewise", "train", str(data), "-o", str(tmp_path / name), "--model",
                "lenet_b", "--batch", "16", "--epochs", "4", "--save-every", "3", "--lines-every",
                "1")

    torchrun(*run("whole"))
    job = start(*run("parts"), interval=2)
    said = kill_a_rank(job, 6)  # the first line tells of the run
    assert job.returncode != 0
    assert "rank 0 lost the others: one of the 2 processes has ended" in said
    assert "The same command goes on from the last checkpoint" in said
    assert 3 <= len(checkpoint.load(tmp_path / "parts")["history"]["losses"]) < 16
    torchrun(*run("parts"))
    parts, whole = (checkpoint.load(tmp_path / name) for name in ("parts", "whole"))
    assert len(parts["rng"]) == 2
    assert parts["history"]["losses"] == whole["history"]["losses"]
    assert all(torch.equal(parts["model"][name], weight)
               for name, weight in whole["model"].items())
    assert all(torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in zip(
        parts["optimizer"]["state"].values(), whole["optimizer"]["state"].values()))


def test_a_run_of_two_ranks_goes_on_in_one_and_in_four(tmp_path):
    """With the losses of a run that was always one, up to rounding; the last batch has two."""
    data = idx_set(tmp_path / "data", train=50, test=15)

    def settings(epochs: int) -> Settings:
        return Settings(str(data), "lenet_b", batch=16, epochs=epochs, average=0.9)

    def by_ranks(processes: int, epochs: int) -> None:
        torchrun("-m", "tilewise", "train", str(data), "-o", str(tmp_path / "run"), "--model",
                 "lenet_b", "--batch", "16", "--epochs", str(epochs), "--average", "0.9",
                 processes=processes)

    whole = tilewise.training.train(settings(3), tmp_path / "whole")
    by_ranks(2, 1)
    with pytest.warns(UserWarning, match="had 2 processes, has 1"):
        tilewise.training.train(settings(2), tmp_path / "run")
    by_ranks(4, 3)
    state, alone = (checkpoint.load(tmp_path / name) for name in ("run", "whole"))
    assert state["identity"]["processes"] == len(state["rng"]) == 4
    assert state["history"]["losses"] == pytest.approx(whole["losses"], rel=1e-4)
    assert state["average"]["steps"] == 12
    for name, value in alone["average"]["values"].items():
        assert torch.allclose(state["average"]["values"][name], value, rtol=1e-3, atol=1e-5)
    tilewise.wisdom.forget()


class Apart(Ranks):
    """One rank of several, run without the others."""

    first = True  # it reads the checkpoint itself

    def from_first(self, value: Any) -> Any:
        return value

    def from_all(self, value: Any) -> list[Any]:
        return [value] * self.world

    def total(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def parallel(self, model: torch.nn.Module) -> torch.nn.Module:
        return model


class Read(Silent):
    """Notes which images count in each step, and interrupts the run after so many."""

    def __init__(self, steps: int) -> None:
        self.left, self.seen = steps, []

    def learn(self, run: Run, numbers: torch.Tensor) -> float:
        self.seen.append((run.epoch, run.step, run.ranks.share(numbers).tolist()))
        return 0.5

    def step(self, epoch: int, step: int, steps: int, loss: float) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:the run had")
@pytest.mark.parametrize("worlds", [(2, 1, 3), (1, 4, 2), (3, 5, 1)])
def test_every_image_counts_once_an_epoch_however_many_ranks_go_on(
        tmp_path, monkeypatch, worlds):
    """Interrupted within epochs, also where a batch has fewer images than there are ranks."""
    settings = Settings(str(idx_set(tmp_path / "data", train=50, test=6)), "lenet_b", "torch",
                        batch=16, epochs=3, save_every=1)
    images, seen = open_images(settings.data, *engines.image_shape(settings)), []
    (tmp_path / "run").mkdir()
    for world, steps in zip(worlds, (2, 5, 12)):
        for rank in range(world):
            place = shutil.copytree(tmp_path / "run", tmp_path / f"{world} {rank}")
            reader, ranks = Read(steps), Apart(rank, world)
            monkeypatch.setattr(Run, "_learn", lambda run, numbers, r=reader: r.learn(run, numbers))
            run = Run(settings, place, images, ranks, reader)
            with pytest.raises(KeyboardInterrupt) if steps < 12 else nullcontext():
                run.to_the_end()
            seen += reader.seen
        shutil.copy(place / checkpoint.NAME, tmp_path / "run")
    steps_made = sorted({(epoch, step) for epoch, step, _ in seen})
    assert steps_made == [(epoch, step) for epoch in range(3) for step in range(4)]
    for epoch in range(3):
        found = [number for at, _, numbers in seen if at == epoch for number in numbers]
        assert sorted(found) == list(range(50))


def test_a_rank_without_a_share_changes_nothing(tmp_path):
    settings = Settings(str(idx_set(tmp_path / "data", train=50, test=6)), "lenet_b", "torch",
                        batch=16)
    images = open_images(settings.data, *engines.image_shape(settings))
    run = Run(settings, tmp_path, images, Apart(2, 3), Silent())
    assert run._learn(torch.tensor([7, 9])) == 0
    assert all(not weight.grad.any() for weight in run.model.parameters())
    assert run._learn(torch.tensor([7, 9, 11])) > 0

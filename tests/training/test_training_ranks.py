"""Several processes: the gradients of one on the joined batch, and one choice of plans."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.training_sets import idx_set

import tilewise
from tilewise.training import Settings, checkpoint, engines
from tilewise.training.images import open_images
from tilewise.training.loop import Run
from tilewise.training.progress import Silent
from tilewise.training.ranks import Ranks


def torchrun(*arguments: str, processes: int = 2) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
         str(processes), *arguments],
        env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr


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


def test_a_run_of_two_ranks_goes_on_with_the_same_bits(tmp_path):
    data = idx_set(tmp_path / "data", train=50, test=15)

    def run(name: str, epochs: int) -> dict:
        torchrun("-m", "tilewise", "train", str(data), "-o", str(tmp_path / name), "--model",
                 "lenet_b", "--batch", "16", "--epochs", str(epochs))
        return checkpoint.load(tmp_path / name)

    whole = run("whole", 2)
    assert run("parts", 1)["epoch"] == 1
    parts = run("parts", 2)
    assert len(parts["rng"]) == 2
    assert parts["history"]["losses"] == whole["history"]["losses"]
    assert all(torch.equal(parts["model"][name], weight)
               for name, weight in whole["model"].items())
    assert all(torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in zip(
        parts["optimizer"]["state"].values(), whole["optimizer"]["state"].values()))


def test_a_run_of_two_ranks_goes_on_in_one_and_in_three(tmp_path):
    """With the losses of a run that was always one, up to rounding."""
    data = idx_set(tmp_path / "data", train=48, test=15)

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
    by_ranks(3, 3)
    state, alone = (checkpoint.load(tmp_path / name) for name in ("run", "whole"))
    assert state["identity"]["processes"] == len(state["rng"]) == 3
    assert state["history"]["losses"] == pytest.approx(whole["losses"], rel=1e-4)
    assert state["average"]["steps"] == 9
    for name, value in alone["average"]["values"].items():
        assert torch.allclose(state["average"]["values"][name], value, rtol=1e-3, atol=1e-5)
    tilewise.wisdom.forget()

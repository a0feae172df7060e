"""explain and tune of a model that learns: the plans of all three directions."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import tilewise
from tilewise import TilewiseError
from tilewise.cli import OK, USAGE, main
from tilewise.conv.running import ENGINE
from tilewise.core.problem import DIRECTIONS
from tilewise.model.tuning import observe, tune


class Net(nn.Module):
    """Two layers alike, one with a stride; a norm and dropout that a step would move."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm, self.drop = nn.BatchNorm2d(16), nn.Dropout(0.5)
        self.one, self.two = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.last = nn.Conv2d(16, 8, 3, 2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.first(x)).relu())
        return self.last(self.two(self.one(x).relu()).relu())


X = torch.randn(2, 3, 18, 20)
FOUND = {"first": ["forward", "backward_weight"],  # images need no gradient
         "one": list(DIRECTIONS), "two": list(DIRECTIONS), "last": list(DIRECTIONS)}


@pytest.fixture
def fast():
    yield tilewise.optimize(Net())
    tilewise.wisdom.forget()


def test_every_layer_is_followed_by_its_gradients(fast):
    layers = observe(fast, X, training=True)
    assert [(layer.name, layer.plan.problem.direction) for layer in layers] == [
        (name, direction) for name, directions in FOUND.items() for direction in directions]
    forward = {layer.name: layer.plan.problem for layer in layers
               if layer.plan.problem.direction == "forward"}
    for layer in layers:
        p = layer.plan.problem
        assert (p.c, p.k, p.h, p.stride) == (forward[layer.name].c, forward[layer.name].k,
                                             forward[layer.name].h, forward[layer.name].stride)


def test_frozen_layers_have_no_gradient_of_weights(fast):
    for part in (fast.first, fast.one):
        part.requires_grad_(False)
    found: dict[str, list[str]] = {}
    for layer in observe(fast, X, training=True):
        found.setdefault(layer.name, []).append(layer.plan.problem.direction)
    assert found["first"] == ["forward"]
    # both are alike, so that the one gradient of weights may stand below either
    assert sorted(found["one"] + found["two"]) == sorted(
        ["forward", "backward_data"] * 2 + ["backward_weight"])
    for p in fast.parameters():
        p.requires_grad_(False)
    with pytest.raises(TilewiseError, match="Net has nothing to learn in training mode"):
        observe(fast, X, training=True)


def test_nothing_of_the_model_changes(fast):
    before = {name: value.clone() for name, value in fast.state_dict().items()}
    state = torch.get_rng_state()
    for mode in (False, True):
        fast.train(mode)
        str(tilewise.explain(fast, X, training=True))
        assert fast.training is mode
    assert all(torch.equal(before[name], value) for name, value in fast.state_dict().items())
    assert all(p.grad is None for p in fast.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_frozen_norms_stay_frozen(fast):
    fast.train().norm.eval()
    kinds = [layer.plan.problem for layer in observe(fast, X, training=True)]
    assert len(kinds) == sum(map(len, FOUND.values()))
    assert not fast.norm.training


def test_explain_shows_all_directions(fast):
    text = str(tilewise.explain(fast, X, training=True))
    lines = text.splitlines()
    assert len([line for line in lines if line.startswith("two ")]) == 3
    assert text.count("_backward_data") == 3
    assert text.count("_backward_weight") == 4
    step = next(line for line in lines if line.startswith("a step: "))
    for part in ("forward ~", "gradients of images ~", "gradients of weights ~"):
        assert part in step
    assert "backward" not in str(tilewise.explain(fast, X))


def test_explain_of_training_is_of_models(fast):
    with pytest.raises(TilewiseError, match="needs a model and no stage"):
        tilewise.explain("n1c8h8w8k8r3s3p1_f32_forward", training=True)
    with pytest.raises(TilewiseError, match="needs a model and no stage"):
        tilewise.explain(fast, X, stage="fused", training=True)


def test_what_was_measured_is_what_trains(fast):
    layers = tune(fast, X, training=True)
    assert all(layer.plan.source == "measured" for layer in layers)
    seen = []
    ENGINE.observers.append(seen.append)
    try:
        fast.train()(X).sum().backward()
    finally:
        ENGINE.observers.remove(seen.append)
    decided = {layer.plan.problem: layer.plan for layer in layers}
    assert {plan.problem for plan in seen} == set(decided)
    for plan in seen:
        assert plan.source == "wisdom"
        assert (plan.algorithm, plan.schedule) == (
            decided[plan.problem].algorithm, decided[plan.problem].schedule)


def test_the_commands(tmp_path, capsys):
    try:
        small = ["lenet_b", "--batch", "2", "--training"]
        assert main(["tune", *small, "-o", str(tmp_path / "wisdom.json")]) == OK
        out = capsys.readouterr().out
        assert "backward_weight" in out.replace("\n", "")
        assert "a step: tilewise" in out
        assert main(["explain", *small, "--json"]) == OK
        problems = [row["problem"] for row in json.loads(capsys.readouterr().out)]
        assert {p.rpartition("_f32_")[2].partition("+")[0] for p in problems} == set(DIRECTIONS)
        assert main(["explain", "n1c8h8w8k8r3s3p1_f32_forward", "--training"]) == USAGE
    finally:
        tilewise.wisdom.forget()

"""Changes of weights that no version counter tells: through `.data`, and in inference mode."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tilewise
from tilewise import models
from tilewise.kernels.cpu.prepare.fingerprint import LINE, moving, resting
from tilewise.runtime import weights
from tilewise.runtime.executable import Executable

LAST = torch.channels_last
SHAPES = ((64, 3, 7, 7), (64, 64, 1, 1), (256, 64, 1, 1), (128, 128, 3, 3), (512, 512, 3, 3),
          (1024, 512, 1, 1), (2048, 512, 1, 1), (37, 300, 3, 3))


@pytest.mark.parametrize("filters, size", [
    (1, 1), (5, 1), (16, 1), (2048, 1), (64, 147), (512, 4608), (2048, 512), (1000, 2048),
    (3, 5000), (1, 100_000), (20_000, 9), (3001, 17), (6000, 33), (4097, 300), (4, 2048)])
def test_glances_stay_inside_and_see_everything(filters, size):
    floats = filters * size
    seen, at_once = np.zeros(floats, bool), np.zeros(floats, bool)
    for row in filter(None, (resting(0, floats, filters), moving(0, floats, filters))):
        for turn in range(row.turns):
            moved = min(turn * row.move, row.farthest)
            places = row.address // 4 + moved + np.arange(row.places) * row.step
            inside = (places[:, None] + np.arange(LINE)).ravel()
            seen[inside] = True  # also fails beyond the end
            at_once[inside[: inside.size if turn == 0 else 0]] = True
            assert (inside >= 0).all()
        if row.rest:
            seen[-row.rest:] = at_once[-row.rest:] = True
    assert seen.all()
    if filters <= 256 or (filters <= 512 and filters % 2 == 0):
        assert at_once.reshape(filters, size).any(1).all()


def made_from(tensor: torch.Tensor) -> weights.Made:
    made = weights.Made((tensor,))
    assert made.is_of((tensor,))
    return made


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST], ids=["planes", "last"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_filter_set_to_zero_is_noticed(shape, layout):
    """At once up to 512 filters, else within as many calls as there are times 512."""
    weight = nn.Parameter(torch.randn(shape).contiguous(memory_format=layout))
    for number in {0, 1, shape[0] // 3, shape[0] // 2, shape[0] - 2, shape[0] - 1}:
        made = made_from(weight)
        weight.data[number] = 0
        glances = [made.is_of((weight,)) for _ in range(max(1, shape[0] // 512))]
        assert not all(glances), number


@pytest.mark.parametrize("shape, most", [((64, 64, 3, 3), 72), ((8, 5), 1), ((3,), 1), ((), 1)])
def test_a_value_is_noticed_after_some_glances(shape, most):
    tensor = torch.randn(shape)
    values = tensor.data.view(-1)
    for place in {0, values.numel() // 2, values.numel() - 1}:
        made = made_from(tensor)
        assert all(made.is_of((tensor,)) for _ in range(2 * most))
        values[place] += 1
        assert not all(made.is_of((tensor,)) for _ in range(most))
        assert not any(made.is_of((tensor,)) for _ in range(most))  # it does not forget


def test_filters_that_change_places_are_noticed():
    weight = torch.randn(64, 512, 3, 3)
    for other in (1, 2, 16, 32, 63):
        made = made_from(weight)
        weight.data[[0, other]] = weight.data[[other, 0]]
        assert not made.is_of((weight,))


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with every weight that is prepared."""
    found, prepare = [], Executable.prepare
    monkeypatch.setattr(Executable, "prepare",
                        lambda self, weight: found.append(1) or prepare(self, weight))
    return found


def built_inside() -> nn.Module:
    return models.resnet18(classes=10).eval()


def converted_inside() -> nn.Module:
    return outside().to(memory_format=LAST)


def copied_inside() -> nn.Module:
    return copy.deepcopy(outside())


def assigned_inside() -> nn.Module:
    model, other = outside(), outside()
    other.load_state_dict({name: value * 1 for name, value in model.state_dict().items()},
                          assign=True)
    return other


def outside() -> nn.Module:
    with torch.inference_mode(False):
        return models.resnet18(classes=10).eval()


@pytest.mark.parametrize("make", [built_inside, converted_inside, copied_inside, assigned_inside])
@pytest.mark.parametrize("keep", [True, False], ids=["", "keep_original=False"])
def test_what_was_made_in_inference_mode_is_prepared_once(make, keep, prepared):
    x = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        model = make()
        fast = tilewise.optimize(model, keep_original=keep)
        assert any(t.is_inference() for t in fast.state_dict().values())
        fast(x)
        before = len(prepared)
        assert before
        for _ in range(3):
            y = fast(x)
        assert len(prepared) == before
        torch.testing.assert_close(y, model(x), rtol=1e-3, atol=1e-3)


def test_changes_in_inference_mode_are_followed(prepared):
    x = torch.randn(1, 64, 9, 9)
    with torch.inference_mode():
        conv = nn.Conv2d(64, 64, 3)
        block = tilewise.nn.Block(conv, activation="relu")
        for change in (lambda w: w.mul_(2), lambda w: w.copy_(torch.randn_like(w)),
                       lambda w: w[7].zero_(), lambda w: w):
            change(conv.weight)
            for _ in range(2):
                torch.testing.assert_close(block(x), conv(x).relu(), rtol=1e-4, atol=1e-4)
        assert len(prepared) == 3
        conv.weight[5, 5, 1, 1] = 100.0
        for _ in range(72):  # the places that move have been everywhere
            y = block(x)
        torch.testing.assert_close(y, conv(x).relu(), rtol=1e-4, atol=1e-4)


def test_linear_layers_made_in_inference_mode_are_prepared_once(prepared):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.inference_mode():
            layer, x = nn.Linear(2048, 1024), torch.randn(2, 2048)
            ours = tilewise.conv.linear.Linear(layer)
            for factor in (1, 2):
                layer.weight.mul_(factor)
                for _ in range(3):
                    torch.testing.assert_close(ours(x), layer(x), rtol=2e-2, atol=2e-2)
                assert len(prepared) == factor
    finally:
        torch.set_float32_matmul_precision(before)

"""Weights that were trained, on real photographs: values that no random draw has."""

from __future__ import annotations

import copy
import pickle
from io import BytesIO

import pytest
import torch
from support import pretrained

import tilewise


@torch.no_grad()
def test_features_of_vgg16_are_as_exact_as_float32() -> None:
    model, x = pretrained.vgg16_features(), pretrained.vgg_input(pretrained.photos())
    reference = copy.deepcopy(model).double()(x.double())
    y = tilewise.optimize(model)(x).double()
    assert float((y - reference).norm() / reference.norm()) < 5e-6
    each = (y - reference).flatten(1).norm(dim=1) / reference.flatten(1).norm(dim=1)
    assert float(each.max()) < 5e-6


@torch.no_grad()
def test_resnet50_sees_what_torch_sees() -> None:
    model, labels = pretrained.keras_resnet50()
    x = pretrained.resnet_input(pretrained.photos())
    expected = model(x)
    found = tilewise.optimize(model)(x)
    best = expected.topk(5).indices
    assert torch.equal(found.topk(5).indices, best)
    # that the weights are in their places: the cat and the cup
    assert "egyptian" in labels[best[1, 0]].lower()
    assert "espresso" in labels[best[2, 0]].lower()
    reference = copy.deepcopy(model).double()(x.double())
    assert float((found.double() - reference).norm() / reference.norm()) < 5e-6


def test_a_pickle_of_anything_but_arrays_is_refused() -> None:
    with pytest.raises(pickle.UnpicklingError, match="not an array"):
        pretrained._OnlyArrays(BytesIO(pickle.dumps(print))).load()

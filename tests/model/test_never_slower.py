"""Whole models beside eager torch in both layouts: none may lose.

Clocks of shared machines err, so this leaves room: it finds a model that has become slow.
benchmarks/zoo.py measures what is claimed, on all models of the zoo, and beside torch.compile.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from support.harness import LONG

import tilewise
from tilewise.planner.measure import interleaved

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

with patch.dict(os.environ):  # what they set for torch is not for other tests
    import models as benchmark
from zoo_models import ZOO, package, settle

pytestmark = pytest.mark.timing
ATTEMPTS = 4
ROOM = 0.9
CLEAR = 1.05  # a first short look is believed from here on
# models that branch on image sizes come in parts, which lie in planes: MobileNetV2 of transformers
# was at .70 to .83 of torch's channels-last in four runs
PARTS_ROOM = 0.65
# of every kind: wide and narrow, plain and depthwise, tiny layers, branches, dilation, detection
MODELS = ("resnet50", "mobilenet_v2", "shufflenet_v2_x1_0", "squeezenet1_0", "deeplabv3", "dncnn")
# of the same kinds, or minutes to compile or to measure: with TILEWISE_LONG
MORE = ("resnet18", "efficientnet_b0", "googlenet", "fastvit_t8")
OTHERS = [("hf_resnet", "estimate"), ("regnet", "measure")]
MORE_OTHERS = [("mobilenet_v2", "measure")]


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield
    tilewise.wisdom.forget()


def ratio(model, x, effort: str, enough: float = ROOM) -> float:
    """How much faster than torch's better layout, by the minimum of rounds in turns."""
    ours = tilewise.optimize(model, x, effort=effort)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    x_last = x.contiguous(memory_format=torch.channels_last)
    runs = [lambda: ours(x), lambda: model(x), lambda: last(x_last)]
    first = look(runs, 3)
    if first >= CLEAR:
        return first
    best = 0.0
    for _ in range(ATTEMPTS):
        best = max(best, look(runs, 7))
        if best >= enough:
            break
    return best


def look(runs, rounds: int) -> float:
    mine, planes, pixels = interleaved(runs, rounds, 0.02, 10)
    return min(planes.minimum, pixels.minimum) / mine.minimum


def installed(name: str):
    """A package of models; where all that tests need must be there, it must be."""
    try:
        return package(name)
    except ImportError:
        if "TILEWISE_TEST_DATA" in os.environ:
            raise
        pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize("name", MODELS + MORE if LONG else MODELS)
def test_models_of_the_zoo(name):
    """By the default effort, one image at a time."""
    installed("torchvision")
    installed("timm")
    torch.manual_seed(0)
    model, x = settle(ZOO[name].make()).eval(), torch.randn(1, *ZOO[name].shape)
    assert ratio(model, x, "estimate") >= ROOM


@pytest.mark.parametrize("name, effort", [("lenet_a", "measure"), ("lenet_b", "measure"),
                                          ("vgg11", "estimate")])
def test_models(name, effort):
    torch.manual_seed(0)
    model = benchmark.build(name)
    model.kind = name
    x = benchmark.example(name, 2)
    assert ratio(benchmark.settle(model), x, effort) >= ROOM


@pytest.mark.parametrize("name, effort", OTHERS + MORE_OTHERS if LONG else OTHERS)
def test_models_of_others(name, effort, monkeypatch):
    transformers = installed("transformers")
    small = {"hf_resnet": {"depths": [1, 1, 1, 1]}, "regnet": {"depths": [1, 1, 2, 1]},
             "mobilenet_v2": {"depth_multiplier": 0.5}}
    torch.manual_seed(0)
    kind, config = (getattr(transformers, part) for part in benchmark.TRANSFORMERS[name])
    model, x = kind(config(**small[name])).eval(), torch.randn(2, 3, 224, 224)
    monkeypatch.setattr("tilewise.model.variants.has_compiler", lambda: False)  # minutes
    room = PARTS_ROOM if name == "mobilenet_v2" else ROOM
    assert ratio(model, x, effort, room) >= room

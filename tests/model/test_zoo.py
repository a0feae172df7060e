"""Models of other packages: as whole graphs, so that layouts and fusion reach all, and right."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._pytree import tree_flatten

import tilewise
from tilewise.model.capture import Capture

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

with patch.dict(os.environ):  # what they set for torch is not for other tests
    import models as benchmark
from zoo_models import ZOO, package, settle

# with stochastic depth, squeeze and excitation, branches, attention over channels, dilation
WHOLE = ("efficientnet_b0", "convnext_tiny", "regnet_y_1_6gf", "shufflenet_v2_x1_0", "googlenet",
         "mobilenetv4_conv_medium", "resnest26d", "fastvit_t8", "deeplabv3", "unet")
# of transformers, small
OTHERS: dict[str, dict[str, Any]] = {
    "hf_resnet": {"depths": [1, 2], "embedding_size": 8, "hidden_sizes": [16, 32]},
    "regnet": {"depths": [1, 2], "embedding_size": 8, "hidden_sizes": [16, 32], "groups_width": 8}}


def installed(*names: str) -> list[Any]:
    """Packages of models; where all that tests need must be there, they must be."""
    try:
        return [package(name) for name in names]
    except ImportError:
        if "TILEWISE_TEST_DATA" in os.environ:
            raise
        pytest.skip(f"{' or '.join(names)} is not installed")


@pytest.mark.parametrize("name", WHOLE)
def test_whole_graphs(name: str) -> None:
    installed("torchvision", "timm")
    model, x = settle(ZOO[name].make()).eval(), torch.randn(1, *ZOO[name].small)
    with torch.no_grad():
        capture = Capture(model, *tree_flatten(((x,), {})), None)
    assert capture.opaque == []
    assert capture.is_channels_last


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_may_not_be_traced_are_right(name: str) -> None:
    transformers, = installed("transformers")
    torch.manual_seed(0)
    kind, config = (getattr(transformers, part) for part in benchmark.TRANSFORMERS[name])
    model, x = kind(config(**OTHERS[name])).eval(), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        fast = tilewise.optimize(model, x)
        expected = copy.deepcopy(model).double()(x.double()).logits
        assert benchmark.rms_error(fast(x).logits, expected) < 1e-4

"""Models of other packages come as whole graphs: then layouts and fusion reach all of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_flatten

from tilewise.model.capture import Capture

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from zoo_models import ZOO, package, settle

# with stochastic depth, squeeze and excitation, branches, attention over channels, dilation
WHOLE = ("efficientnet_b0", "convnext_tiny", "regnet_y_1_6gf", "shufflenet_v2_x1_0", "googlenet",
         "mobilenetv4_conv_medium", "resnest26d", "fastvit_t8", "deeplabv3", "unet")


@pytest.mark.parametrize("name", WHOLE)
def test_whole_graphs(name: str) -> None:
    try:
        package("torchvision"), package("timm")
    except ImportError:
        if "TILEWISE_TEST_DATA" in os.environ:  # where all that tests need must be there
            raise
        pytest.skip("torchvision and timm are not installed")
    model, x = settle(ZOO[name].make()).eval(), torch.randn(1, *ZOO[name].small)
    with torch.no_grad():
        capture = Capture(model, *tree_flatten(((x,), {})), None)
    assert capture.opaque == []
    assert capture.is_channels_last

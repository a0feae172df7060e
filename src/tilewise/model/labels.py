"""What the steps of a program are, for people."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn


class Label(NamedTuple):
    """A step's module, name, algorithm and products."""

    module: Any
    name: str
    algorithm: str
    flops: int


def described(layer: Any) -> str:
    """A convolution or a linear layer in few words."""
    if isinstance(layer, nn.Linear):
        return f"linear {layer.in_features} to {layer.out_features}"
    kind = "transposed" if "Transpose" in type(layer).__name__ else "conv"
    taps = "x".join(map(str, layer.kernel_size))
    step = "" if set(layer.stride) == {1} else f" stride {'x'.join(map(str, layer.stride))}"
    groups = "" if layer.groups == 1 else f" groups {layer.groups}"
    return f"{kind} {taps} {layer.in_channels} to {layer.out_channels}{step}{groups}"

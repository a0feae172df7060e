"""Transposed convolutions, and gradients of the input of strided ones, beside torch.

    python benchmarks/transposed.py
    python benchmarks/transposed.py --rounds 25 U-Net ResNet

As benchmarks/dilated.py: torch in both layouts, ours channels-last, all in turns, and no speed
where our result is wrong.
"""

from __future__ import annotations

import argparse

import torch
from dilated import RIGHT, compared, error
from torch import nn
from torch.nn import functional as F

import tilewise
from tilewise.core import Problem, Target
from tilewise.runtime.engine import random_operands

LAYERS = {  # gradients of the input, by what is wanted of them
    "DCGAN 512 to 256, 4x4": ("n1c256h8w8k512r4s4u2p1", 1.7),
    "DCGAN 256 to 128, 4x4": ("n1c128h16w16k256r4s4u2p1", 1.7),
    "DCGAN 128 to 64, 4x4": ("n1c64h32w32k128r4s4u2p1", 1.7),
    "DCGAN, batch 8": ("n8c128h16w16k256r4s4u2p1", 1.7),
    "U-Net 1024 to 512, 2x2": ("n1c512h32w32k1024r2s2u2", 1.3),
    "U-Net 512 to 256, 2x2": ("n1c256h64w64k512r2s2u2", 1.3),
    "U-Net 128 to 64, 2x2": ("n1c64h256w256k128r2s2u2", 1.3),
    "ResNet 3x3, 128 to 64": ("n1c64h56w56k128r3s3u2p1", 1.8),
    "ResNet 3x3, 256 to 128": ("n1c128h28w28k256r3s3u2p1", 1.8),
    "ResNet 3x3, batch 8": ("n8c128h28w28k256r3s3u2p1", 1.8),
    "ResNet 1x1, 512 to 256": ("n1c256h56w56k512r1s1u2", 1.2),
    "ResNet 1x1, batch 8": ("n8c256h56w56k512r1s1u2", 1.2),
}
DEMUCS = 1.5


def layer(name: str, rounds: int) -> None:
    text, wanted = LAYERS[name]
    p = Problem.parse(text + "_f32_backward_data")
    x, weight, *_ = random_operands(p)
    x_last, last = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    x, weight = x.contiguous(), weight.contiguous()
    down, left = p.padding[::2]
    more = (p.h - (p.conv_h - 1) * p.stride[0] + 2 * down - p.span_h,
            p.w - (p.conv_w - 1) * p.stride[1] + 2 * left - p.span_w)
    options = None, p.stride, (down, left), more
    runs = {"planes": lambda: F.conv_transpose2d(x, weight, *options),
            "channels_last": lambda: F.conv_transpose2d(x_last, last, *options),
            "tilewise": lambda: tilewise.conv_transpose2d(x_last, last, *options)}
    found = error(runs["tilewise"](), F.conv_transpose2d(x.double(), weight.double(), *options))
    assert found < RIGHT, f"{name}: error is {found:.1e}"
    compared(name, runs, wanted, tilewise.explain(p).plan.algorithm, rounds)


def demucs() -> nn.Module:
    """Two encoders and two decoders of a Demucs-like stack."""
    return nn.Sequential(
        nn.Conv1d(2, 64, 8, 4, 2), nn.ReLU(), nn.Conv1d(64, 64, 1), nn.ReLU(),
        nn.Conv1d(64, 128, 8, 4, 2), nn.ReLU(), nn.Conv1d(128, 128, 3, padding=1), nn.ReLU(),
        nn.ConvTranspose1d(128, 64, 8, 4, 2), nn.ReLU(), nn.Conv1d(64, 64, 3, padding=1),
        nn.ReLU(), nn.ConvTranspose1d(64, 2, 8, 4, 2)).eval()


def stack(rounds: int) -> None:
    model, x = demucs(), torch.randn(1, 2, 64000)
    ours = tilewise.optimize(model, x)
    found = error(ours(x), demucs_exact(model, x))
    assert found < RIGHT, f"Demucs: error is {found:.1e}"
    compared("Demucs-like, 64,000", {"eager": lambda: model(x), "tilewise": lambda: ours(x)},
             DEMUCS, "optimize", rounds)


def demucs_exact(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    copy = demucs().double()
    copy.load_state_dict(model.state_dict())
    result: torch.Tensor = copy(x.double())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of names; all without")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    print(Target.host(threads=args.threads))
    chosen = tuple(args.names) or ("",)
    for name in LAYERS:
        if name.startswith(chosen):
            layer(name, args.rounds)
    if "Demucs".startswith(chosen):
        stack(args.rounds)


if __name__ == "__main__":
    main()

"""Models of signals (speech, sound, hearts) beside torch.

    python benchmarks/signals.py
    python benchmarks/signals.py --rounds 25 WaveNet

They are small nets of the kinds that are named, with random weights. Torch runs eager, as it has no
channels-last layout for signals; all take turns, and no speed is told where our result is wrong.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from dilated import RIGHT, compared, error
from torch import Tensor, nn
from torch.nn import functional as F
from transposed import demucs

import tilewise
from tilewise.core import Target


class Residual(nn.Module):
    """Dilated and plain convolutions in turns, around each a shortcut."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.wide = nn.ModuleList(
            nn.Conv1d(channels, channels, taps, padding=d * (taps - 1) // 2, dilation=d)
            for d in (1, 3, 5))
        self.plain = nn.ModuleList(
            nn.Conv1d(channels, channels, taps, padding=(taps - 1) // 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for wide, plain in zip(self.wide, self.plain):
            x = plain(F.leaky_relu(wide(F.leaky_relu(x, 0.1)), 0.1)) + x
        return x


class HiFiGan(nn.Module):
    """A vocoder: spectra to sound."""

    def __init__(self, channels: int = 128) -> None:
        super().__init__()
        self.first = nn.Conv1d(80, channels, 7, padding=3)
        self.up, self.residual = nn.ModuleList(), nn.ModuleList()
        for stride in (8, 8, 2, 2):
            self.up.append(nn.ConvTranspose1d(channels, channels // 2, 2 * stride, stride,
                                              stride // 2))
            channels //= 2
            self.residual.append(nn.ModuleList(Residual(channels, taps) for taps in (3, 7)))
        self.last = nn.Conv1d(channels, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for up, parts in zip(self.up, self.residual):
            x = up(F.leaky_relu(x, 0.1))
            x = sum(part(x) for part in parts) / len(parts)
        return torch.tanh(self.last(F.leaky_relu(x)))


class Wav2Vec(nn.Module):
    """The convolutions before a transformer of speech."""

    def __init__(self, channels: int = 256) -> None:
        super().__init__()
        steps = ((10, 5), *[(3, 2)] * 4, *[(2, 2)] * 2)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(channels if i else 1, channels, taps, stride, bias=False)
            for i, (taps, stride) in enumerate(steps))
        self.norm = nn.GroupNorm(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        for i, convolution in enumerate(self.convolutions):
            x = convolution(x)
            x = F.gelu(x if i else self.norm(x))
        return x.transpose(1, 2)


class WaveNet(nn.Module):
    """Dilated convolutions with gates."""

    def __init__(self, channels: int = 64, layers: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, channels, 1), nn.Conv1d(channels, 1, 1)
        self.wide = nn.ModuleList(
            nn.Conv1d(channels, 2 * channels, 3, padding=2 ** i, dilation=2 ** i)
            for i in range(layers))
        self.narrow = nn.ModuleList(nn.Conv1d(channels, 2 * channels, 1) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.first(x), 0
        for wide, narrow in zip(self.wide, self.narrow):
            value, gate = wide(x).chunk(2, 1)
            more, skip = narrow(torch.tanh(value) * torch.sigmoid(gate)).chunk(2, 1)
            x, total = x + more, total + skip
        return self.last(F.relu(total))


class Heart(nn.Module):
    """A residual net of twelve leads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(12, 64, 15, 2, 7), nn.BatchNorm1d(64), nn.ReLU(),
                                   nn.MaxPool1d(3, 2, 1))
        self.blocks, channels = nn.ModuleList(), 64
        for more in (64, 128, 256, 512):
            stride = 1 if more == channels else 2
            self.blocks.append(nn.ModuleList([
                nn.Conv1d(channels, more, 7, stride, 3), nn.BatchNorm1d(more),
                nn.Conv1d(more, more, 7, padding=3), nn.BatchNorm1d(more),
                nn.Conv1d(channels, more, 1, stride)]))
            channels = more
        self.last = nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for one, norm, two, other, short in self.blocks:
            x = F.relu(other(two(F.relu(norm(one(x))))) + short(x))
        return self.last(x.mean(-1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "HiFi-GAN-like": (HiFiGan, (1, 80, 100)), "wav2vec-like": (Wav2Vec, (1, 1, 32000)),
    "WaveNet-like": (WaveNet, (1, 1, 16000)), "heart, 12 leads": (Heart, (4, 12, 5000)),
    "Demucs-like": (demucs, (1, 2, 64000))}


def model(name: str, rounds: int) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    net, x = make().eval(), torch.randn(shape)
    ours = tilewise.optimize(net, x)
    found = error(ours(x), copy.deepcopy(net).double()(x.double()))
    assert found < RIGHT, f"{name}: error is {found:.1e}"
    compared(name, {"eager": lambda: net(x), "tilewise": lambda: ours(x)}, 1.0, "optimize", rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="beginnings of names; all without")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    print(Target.host(threads=args.threads))
    for name in MODELS:
        if name.startswith(tuple(args.names) or ("",)):
            model(name, args.rounds)


if __name__ == "__main__":
    main()

"""idx files, the format of MNIST and Fashion-MNIST: a header, then bytes."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.errors import TilewiseError
from ..core.files import open_regular

BYTES = 8  # the code of unsigned bytes, the only type these sets use


def is_there(directory: Path) -> bool:
    """Whether a directory holds such a set."""
    return _find(directory, "train-images-idx3-ubyte") is not None


class IdxImages:
    """All images of a file, in memory; scaled to `size` when read."""

    def __init__(self, directory: Path, part: str, size: int, channels: int) -> None:
        self._pixels = load(directory, f"{part}-images-idx3-ubyte")
        self.labels = load(directory, f"{part}-labels-idx1-ubyte").long()
        if len(self._pixels) != len(self.labels):
            raise TilewiseError(f"{directory}: {len(self._pixels)} images of {part} have "
                                f"{len(self.labels)} labels, need as many")
        self.classes, self._shape = int(self.labels.max()) + 1, (channels, size, size)

    def read(self, numbers: Sequence[int]) -> Tensor:
        x = self._pixels[torch.as_tensor(numbers)][:, None].float().mul_(2 / 255).sub_(1)
        if x.shape[2:] != self._shape[1:]:
            x = F.interpolate(x, size=self._shape[1:], mode="bilinear")
        return x.expand(-1, *self._shape).contiguous()


def load(directory: Path, name: str) -> Tensor:
    """The array of an idx file, compressed or not."""
    path = _find(directory, name)
    if path is None:
        raise TilewiseError(f"{directory} has no {name} and no {name}.gz, needs one of them")
    try:
        with open_regular(path) as file:
            return _parse(gzip.open(file).read() if path.suffix == ".gz" else file.read())
    except (OSError, EOFError, ValueError, zlib.error) as problem:
        raise TilewiseError(f"{path} cannot be read: {problem}") from problem


def _parse(content: bytes) -> Tensor:
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != BYTES:
        raise ValueError("not an idx file of unsigned bytes")
    start = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:start], dtype=">u4").astype(int)
    data = np.frombuffer(content, dtype=np.uint8, offset=start)
    return torch.from_numpy(data.reshape(shape).copy())


def _find(directory: Path, name: str) -> Path | None:
    places = (directory / name, directory / (name + ".gz"))
    return next((path for path in places if path.is_file()), None)

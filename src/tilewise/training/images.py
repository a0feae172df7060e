"""Images with labels, read by number, as batches a network takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.errors import TilewiseError
from . import folder, idx


class Images(Protocol):
    """A set of labelled images."""

    labels: Tensor
    classes: int

    def read(self, numbers: Sequence[int]) -> Tensor:
        """Some of them, as (N, C, size, size), from -1 to 1."""


class Split(NamedTuple):
    """Images to train with and images to test with."""

    train: Images
    test: Images


def open_images(place: str, size: int, channels: int) -> Split:
    """The images of a directory, of whichever kind it is, grey (one channel) or in colour."""
    directory = Path(place)
    if not directory.is_dir():
        raise TilewiseError(f"data is {place!r}, needs a directory")
    if idx.is_there(directory):
        parts = ("train", "t10k")
        return Split(*(idx.IdxImages(directory, part, size, channels) for part in parts))
    return Split(*folder.split(directory, size, channels))


def batch(images: Images, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Images and labels of these numbers."""
    return images.read(numbers.tolist()), images.labels[numbers]


def order(count: int, batch: int, seed: int, epoch: int) -> list[Tensor]:
    """The batches of an epoch: a function of the seed and the epoch, of nothing else."""
    generator = torch.Generator().manual_seed((seed << 20) + epoch)
    return list(torch.randperm(count, generator=generator).split(batch))

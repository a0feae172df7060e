"""A run on disk, replaced whole: a process killed at any moment leaves one to go on from."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..core.errors import TilewiseError
from ..core.files import locked, remove_leftovers, write_atomically

FORMAT = 1
NAME = "checkpoint.pt"


def save(directory: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint; on return it is on the disk."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    write_atomically(directory / NAME, buffer.getbuffer(), durable=True)


def load(directory: Path) -> dict[str, Any] | None:
    """The last checkpoint, if there is one. It is data: nothing in it is executed."""
    path = directory / NAME
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception as problem:  # torch names many
        raise TilewiseError(f"{path} is not a checkpoint: {problem}") from problem
    if state.get("format") != FORMAT:
        raise TilewiseError(f"{path} has format {state.get('format')}, needs {FORMAT}")
    return state


@contextmanager
def owned(directory: Path) -> Iterator[None]:
    """One run a directory at a time; what a killed one left half written goes."""
    try:
        with locked(directory / NAME, wait=False):
            remove_leftovers(directory / NAME)
            yield
    except BlockingIOError as problem:
        raise TilewiseError(f"{directory} is in use by another run, needs its own") from problem

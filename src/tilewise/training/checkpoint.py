"""A run on disk, replaced whole: a process killed at any moment leaves one to go on from."""

from __future__ import annotations

import hashlib
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
CHECKSUM = "checksum"  # torch reads a flipped byte of a tensor as if it were right


def save(directory: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint; on return it is on the disk."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state, CHECKSUM: _checksum(state)}, buffer)
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
    if state.pop(CHECKSUM, None) not in (None, _checksum(state)):  # older ones have none
        raise TilewiseError(f"{path} is damaged: its content is not what was written; restore a "
                            "copy of it, or remove it to begin the run anew")
    return state


def _checksum(state: dict[str, Any]) -> str:
    digest = hashlib.sha256()
    for part in _parts({name: value for name, value in state.items() if name != "format"}):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[Any]:
    """All that a value consists of, in its order, as bytes."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().reshape(-1)
        yield f"{flat.dtype} {tuple(value.shape)}".encode()
        yield flat.view(torch.uint8).numpy()
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield f"{len(value)} items".encode()
        for name, item in items:
            yield repr(name).encode()
            yield from _parts(item)
    else:
        yield repr(value).encode()


@contextmanager
def owned(directory: Path) -> Iterator[None]:
    """One run a directory at a time; what a killed one left half written goes."""
    try:
        with locked(directory / NAME, wait=False):
            remove_leftovers(directory / NAME)
            yield
    except BlockingIOError as problem:
        raise TilewiseError(f"{directory} is in use by another run, needs its own") from problem

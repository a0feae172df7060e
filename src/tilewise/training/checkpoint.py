"""A run on disk, replaced whole: a process killed at any moment leaves one to go on from."""

from __future__ import annotations

import hashlib
import io
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..core.errors import OtherVersion, TilewiseError, cut
from ..core.files import locked, open_regular, remove_leftovers, write_atomically

FORMAT = 1
NAME = "checkpoint.pt"
PARTS = {"settings": dict, "identity": dict, "model": OrderedDict, "optimizer": dict, "epoch": int,
         "step": int, "seconds": float, "rng": list, "plans": str, "history": dict}
CHECKSUM = "checksum"  # torch reads a flipped byte of a tensor as if it were right


def save(directory: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint; on return it is on the disk."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state, CHECKSUM: _checksum(state)}, buffer)
    write_atomically(directory / NAME, buffer.getbuffer(), durable=True)


def load(directory: Path) -> dict[str, Any] | None:
    """The last checkpoint, if there is one. It is data: nothing in it is executed."""
    path = directory / NAME
    if not os.path.lexists(path):
        return None
    try:
        with open_regular(path) as file:
            state: dict[str, Any] = torch.load(file, weights_only=True)
    except Exception as problem:  # torch names many
        raise TilewiseError(f"{path} is not a checkpoint: {cut(str(problem))}") from problem
    if not isinstance(state, dict):
        raise TilewiseError(f"{path} is not a checkpoint of a run")
    if state.get("format") != FORMAT:
        raise TilewiseError(f"{path} has format {cut(repr(state.get('format')))}, needs {FORMAT}")
    with understood(directory):
        damaged = state.pop(CHECKSUM, None) not in (None, _checksum(state))  # older have none
    if damaged:
        raise TilewiseError(f"{path} is damaged: its content is not what was written; restore a "
                            "copy of it, or remove it to begin the run anew")
    return state


@contextmanager
def understood(directory: Path) -> Iterator[None]:
    """Parts of a checkpoint are used: complains of what cannot be, since anybody may write one."""
    try:
        yield
    except (TilewiseError, KeyError, TypeError, ValueError, AttributeError, IndexError,
            ArithmeticError, RuntimeError) as problem:  # the last: torch's, and of recursion
        if isinstance(problem, TilewiseError) and (
                isinstance(problem, OtherVersion) or str(directory) in str(problem)):
            raise  # which says better what to do
        raise TilewiseError(f"{directory / NAME} cannot be used ({cut(repr(problem))}): restore a "
                            "copy of it, or remove it to begin the run anew") from problem


def check(state: dict[str, Any]) -> None:
    """Raise TypeError or ValueError unless all parts of a run are of their types."""
    wrong = [name for name, kind in PARTS.items() if type(state[name]) is not kind]
    history = state["history"]
    numbers = all(type(loss) is float for loss in history["losses"])
    tables = all(type(one) is dict for one in history["epochs"])
    if wrong or not numbers or not tables:
        raise TypeError(f"{', '.join(wrong) or 'history'} is of another type")
    if min(state["epoch"], state["step"]) < 0:
        raise ValueError("a position below zero")


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
            remove_leftovers(directory, NAME)
            yield
    except BlockingIOError as problem:
        raise TilewiseError(f"{directory} is in use by another run, needs its own") from problem

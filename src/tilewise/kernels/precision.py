"""How many bits of a float32 torch's own CPU kernels use, and having them use all for a while.

The settings are the process's, so whoever holds them is counted; other threads' calls of torch
are more exact meanwhile, never less.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..core.locks import fork_safe_lock

LEGACY = {"none": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium"}
MODERN = hasattr(torch.backends.mkldnn, "conv")  # torch 2.9: a setting for each kind of operator


class _Legacy:
    """The one setting of older releases, in the newer names."""

    @property
    def fp32_precision(self) -> str:
        return {old: new for new, old in LEGACY.items()}[torch.get_float32_matmul_precision()]

    @fp32_precision.setter
    def fp32_precision(self, value: str) -> None:
        torch.set_float32_matmul_precision(LEGACY[value])


# small convolutions are products of matrices in torch, and follow their setting
KINDS: dict[str, Any] = ({"conv": torch.backends.mkldnn.conv,
                          "matmul": torch.backends.mkldnn.matmul} if MODERN
                         else {"matmul": _Legacy()})
_lock = fork_safe_lock()
_holders = 0
_found: dict[str, str] = {}  # what to go back to when nobody holds them any more


def asked() -> str:
    """`torch.get_float32_matmul_precision()`, also where newer settings make it refuse."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # they can differ from backend to backend, and it names none
        return LEGACY[KINDS["matmul"].fp32_precision]


def lowered() -> dict[str, str]:
    """The kinds of operators for which torch uses fewer bits, and what it rounds to."""
    now = {kind: setting.fp32_precision for kind, setting in KINDS.items()}
    return {kind: value for kind, value in now.items() if value not in ("none", "ieee")}


@contextmanager
def full() -> Iterator[None]:
    """Inside, torch's own CPU kernels keep all bits of a float32."""
    _hold()
    try:
        yield
    finally:
        _release()


def _hold() -> None:
    global _holders
    with _lock:
        _holders += 1
        for kind, value in lowered().items():  # also what was set since others hold them
            _found[kind] = value
            KINDS[kind].fp32_precision = "ieee"


def _release() -> None:
    global _holders
    with _lock:
        _holders -= 1
        if _holders:
            return
        for kind, value in _found.items():
            if KINDS[kind].fp32_precision == "ieee":  # else it was set anew meanwhile
                _restore(KINDS[kind], value)
        _found.clear()


def _restore(setting: Any, value: str) -> None:
    """To what was inherited from the settings above it, if that is what it was."""
    setting.fp32_precision = "none"
    if setting.fp32_precision != value:
        setting.fp32_precision = value

"""What is around a trace: other threads, garbage, modes of torch."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..kernels.cpu.emit.workers import COMPILING


def has_company() -> bool:
    """Whether threads besides this one and those that compile are there."""
    return any(thread is not threading.current_thread() and thread.name != COMPILING
               for thread in threading.enumerate())


@contextmanager
def no_collection() -> Iterator[None]:
    """Finalizers of what is garbage elsewhere are none of the model's code."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def modes() -> tuple[Any, ...]:
    """What changes the meaning of operators, and is no operator."""
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.get_default_dtype(), torch._C._is_any_autocast_enabled(),
            torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))

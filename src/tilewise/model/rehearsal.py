"""Running a model to learn from it, so that nothing of it, or of the caller's, changes."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..core.errors import TilewiseError


def sharing_copy(model: nn.Module) -> nn.Module:
    """New modules around the same tensors."""
    shared: dict[int, Any] = {id(tensor): tensor
                              for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            shared[id(module)] = module  # which would copy its tensors
        else:  # what was computed from parameters cannot be copied
            _share_computed(list(module.__dict__.values()), shared)
    try:
        return copy.deepcopy(model, shared)
    except (TypeError, RuntimeError) as error:  # a lock, a file, a process
        raise TilewiseError(f"{type(model).__name__} cannot be copied ({error}): optimise the "
                            f"inner torch.nn.Module{_inner(model)}") from error


def _inner(model: nn.Module) -> str:
    """By name, where there is only one."""
    names = [name for name, _ in model.named_children()]
    return f", its `{names[0]}`" if len(names) == 1 else ""


def _share_computed(values: list[Any], shared: dict[int, Any]) -> None:
    for value in values:
        if isinstance(value, Tensor) and value.grad_fn is not None:
            shared[id(value)] = value
        elif type(value) in (list, tuple):
            _share_computed(list(value), shared)
        elif type(value) is dict:
            _share_computed(list(value.values()), shared)


@contextmanager
def rehearsal(model: nn.Module, training: bool = False) -> Iterator[nn.Module]:
    """A copy in eval mode, without gradients; tensors and random generators stay as they are.

    Or one that learns: in training mode, or in its own modes if some of it is frozen.
    """
    trial = sharing_copy(model)
    if not (training and model.training):
        trial.train(training)
    kept = [(tensor, tensor.detach().clone())
            for tensor in (*trial.buffers(), *trial.parameters())]
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training):
            yield trial
    finally:
        random.setstate(state)
        with torch.no_grad():
            for tensor, before in kept:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


def cloned(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments that a model may write to."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, arguments)


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Eval mode without gradients, and then as it was."""
    modes = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training

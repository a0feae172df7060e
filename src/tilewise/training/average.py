"""Weights averaged over the steps of a run: often better than the last ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """An exponential moving average of all that a model learns, its buffers too.

    The k-th step keeps min(decay, k / (k + 9)) of what there was, so that the first weights are
    soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self.steps = 0
        self.values = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self) -> None:
        """After a step."""
        self.steps += 1
        kept = min(self._decay, self.steps / (self.steps + 9))
        for name, value in self._model.state_dict().items():
            self._move(self.values[name], value, kept)

    def _move(self, old: Tensor, new: Tensor, kept: float) -> None:
        if old.is_floating_point():
            old.lerp_(new, 1 - kept)
        else:  # a count of batches
            old.copy_(new)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the averages meanwhile."""
        own = {name: value.clone() for name, value in self._model.state_dict().items()}
        self._put(self.values)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        """Into the tensors that the model has: engines share them."""
        for name, value in self._model.state_dict().items():
            value.copy_(values[name])

    def state(self) -> dict[str, object]:
        return {"steps": self.steps, "values": self.values}

    def restore(self, state: dict[str, object]) -> None:
        self.steps = int(str(state["steps"]))
        values = state["values"]
        if not isinstance(values, dict) or values.keys() != self.values.keys():
            raise TypeError("averages of another model")
        for name, value in values.items():
            self.values[name].copy_(value)

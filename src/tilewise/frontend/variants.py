"""Whole models against each other: what was planned layer by layer must also win as a whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx, nn

from ..planner.measure import interleaved
from .dynamo import has_compiler, tilewise
from .layout import inside
from .tuning import evaluating

MARGIN = 0.97  # others must beat ours by more than clocks err
UNFROZEN = {"freezing": False}  # whatever is set: the result follows changes of the weights


def fastest(original: nn.Module, ours: nn.Module, example: Any,
            max_error: float | None) -> nn.Module:
    """Ours, or the way of running the original that is faster than ours on this example."""
    arguments = example if isinstance(example, tuple) else (example,)
    models = [ours, *(model for make in _others(ours, max_error) for model in [make(original)]
                      if _runs(model, arguments))]
    with evaluating(*models):
        times = interleaved([partial(model, *arguments) for model in models], sample=0.03,
                            budget=10)
    best = min(range(len(models)), key=lambda i: times[i].minimum)
    if times[best].minimum < MARGIN * times[0].minimum:
        return models[best].train(original.training)
    return ours


def _others(ours: nn.Module,
            max_error: float | None) -> list[Callable[[nn.Module], nn.Module]]:
    """Torch in both layouts; where tracing saw only parts, also the graph that Dynamo captures,
    with our convolutions and with torch's."""
    found = [sharing_copy, lambda model: inside(sharing_copy(model))]
    if not isinstance(ours, fx.GraphModule) and has_compiler():
        # ours knows no bound but torch's setting
        backends = ["inductor"] if max_error is not None else ["inductor", tilewise]
        found += [partial(_compiled, backend=backend) for backend in backends]
    return found


def _compiled(model: nn.Module, backend: Any) -> nn.Module:
    twin = inside(sharing_copy(model))
    twin.compile(backend=backend, options=UNFROZEN)  # saved and copied without what was compiled
    return twin


def _runs(model: nn.Module, arguments: tuple[Any, ...]) -> bool:
    try:
        with evaluating(model):
            model(*arguments)
    except Exception:  # whatever a model, or a compiler, does with what it was not made for
        return False
    return True


def sharing_copy(model: nn.Module) -> nn.Module:
    """New modules around the same tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})

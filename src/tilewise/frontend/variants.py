"""Whole models against each other: what was planned layer by layer must also win as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..planner.measure import interleaved
from .captured import is_whole
from .dynamo import has_compiler, tilewise
from .layout import enter, leave
from .rehearsal import evaluating, sharing_copy

MARGIN = 0.97  # others must beat ours by more than clocks err
UNFROZEN = {"freezing": False}  # whatever is set: the result follows changes of the weights


def fastest(original: nn.Module, ours: nn.Module, arguments: tuple[Any, ...],
            max_error: float | None) -> nn.Module:
    """Ours, or the way of running the original that is faster than ours on this example."""
    models = [ours, *(model for make in _others(ours, max_error) for model in [make(original)]
                      if _runs(model, arguments))]
    with evaluating(*models):
        times = interleaved([partial(model, *arguments) for model in models], sample=0.03,
                            budget=10)
    best = min(range(len(models)), key=lambda i: times[i].minimum)
    return models[best] if times[best].minimum < MARGIN * times[0].minimum else ours


def _others(ours: nn.Module,
            max_error: float | None) -> list[Callable[[nn.Module], nn.Module]]:
    """Torch as it is, and channels-last where the graph shows that nobody can tell; where tracing
    saw only parts, also the graph that Dynamo captures, with our convolutions and torch's."""
    if is_whole(ours):
        return [sharing_copy, lambda model: channels_last(sharing_copy(model))]
    found: list[Callable[[nn.Module], nn.Module]] = [sharing_copy]
    if has_compiler():
        # ours knows no bound but torch's setting
        backends = ["inductor"] if max_error is not None else ["inductor", tilewise]
        found += [partial(_compiled, backend=backend) for backend in backends]
    return found


def _compiled(model: nn.Module, backend: Any) -> nn.Module:
    twin = sharing_copy(model)
    twin.compile(backend=backend, options=UNFROZEN)  # saved and copied without what was compiled
    return twin


def _runs(model: nn.Module, arguments: tuple[Any, ...]) -> bool:
    try:
        with evaluating(model):
            model(*arguments)
    except Exception:  # whatever a model, or a compiler, does with what it was not made for
        return False
    return True


def channels_last(model: nn.Module) -> nn.Module:
    """The model with a forward that enters and leaves; everything else stays."""
    model.__dict__["forward"] = _ChannelsLast(model)
    return model


class _ChannelsLast:
    """A forward in channels-last; a class, so that it is copied and saved with its model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **options: Any) -> Any:
        inputs = tuple(x for x in (*args, *options.values()) if isinstance(x, Tensor))
        result = type(self.model).forward(
            self.model, *map(enter, args), **{name: enter(x) for name, x in options.items()})
        return leave((result,), inputs)[0] if isinstance(result, Tensor) else result

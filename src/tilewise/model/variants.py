"""Whole models against each other: what was planned layer by layer must also win as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..core.progress import Tell
from ..planner.measure import interleaved
from .captured import is_whole
from .dynamo import has_compiler, tilewise
from .layout import enter, leave
from .rehearsal import evaluating, sharing_copy

OURS = "tilewise"
MARGIN = 0.97  # others must beat ours by more than clocks err
UNFROZEN = {"freezing": False}  # whatever is set: the result follows changes of the weights


def fastest(original: nn.Module, ours: nn.Module, arguments: tuple[Any, ...],
            max_error: float | None, tell: Tell) -> nn.Module:
    """Ours, or the way of running the original that is faster than ours on this example."""
    tell("timing the whole model", 0, 1)
    made = {name: make(original) for name, make in _others(ours, max_error).items()}
    models = {OURS: ours, **{name: model for name, model in made.items()
                             if _runs(model, arguments)}}
    with evaluating(*models.values()):
        timings = interleaved([partial(model, *arguments) for model in models.values()],
                              sample=0.03, budget=10)
    times = {name: timing.minimum for name, timing in zip(models, timings, strict=True)}
    best = min(times, key=lambda name: times[name])
    best = best if times[best] < MARGIN * times[OURS] else OURS
    beside = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in times.items())
    tell(f"returned: {best} ({beside})", 1, 1)
    return models[best]


def _others(ours: nn.Module,
            max_error: float | None) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Torch as it is, and channels-last where the graph shows that nobody can tell; where tracing
    saw only parts, also the graph that Dynamo captures, with our convolutions and torch's."""
    if is_whole(ours):
        return {"torch": sharing_copy,
                "torch in channels-last": lambda model: channels_last(sharing_copy(model))}
    found: dict[str, Callable[[nn.Module], nn.Module]] = {"torch": sharing_copy}
    if has_compiler():
        found["torch.compile"] = partial(_compiled, backend="inductor")
        if max_error is None:  # the backend knows no bound but torch's setting
            found["torch.compile with tilewise"] = partial(_compiled, backend=tilewise)
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

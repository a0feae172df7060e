"""Networks to train, and what runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import TilewiseError
from ..model.optimize import optimize
from ..models import MODELS
from .settings import Settings

# sides and channels of the images that nets of one size take; all others take any in colour
OWN = {"lenet_a": (86, 1), "lenet_b": (70, 1)}


def image_shape(settings: Settings) -> tuple[int, int]:
    """Sides and channels of the images that the model takes."""
    size, channels = OWN.get(settings.model, (settings.size or 224, 3))
    if settings.size not in (None, size):
        raise TilewiseError(f"size is {settings.size}, needs {size} for {settings.model}")
    return size, channels


def build(settings: Settings, classes: int) -> nn.Module:
    """The network with the first weights of a seed, the same for every engine."""
    torch.manual_seed(settings.seed)
    return MODELS[settings.model](classes=classes)


def restore(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """What an optimizer was; raises ValueError for what this one could not have been."""
    wanted, found = optimizer.state_dict()["param_groups"], state["param_groups"]
    if len(found) != len(wanted) or not all(map(_alike, found, wanted)):
        raise ValueError("settings of another optimizer")
    optimizer.load_state_dict(state)
    for weight, parts in optimizer.state.items():
        for value in parts.values():
            if value is not None and (value.shape != weight.shape or value.is_sparse):
                raise ValueError("the momentum of another weight")


def _alike(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """By all that both have but the learning rate, which steps change; another torch has more."""
    both = found.keys() & wanted.keys() - {"lr", "initial_lr"}
    return "params" in both and all(found[name] == wanted[name] for name in both)


class ChannelsLast(nn.Module):
    """A network whose weights and images are channels-last."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.contiguous(memory_format=torch.channels_last))


RUNNERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "tilewise": optimize,
    "torch": lambda model: model,
    "torch-channels-last": ChannelsLast,
    "torch-compile": lambda model: torch.compile(ChannelsLast(model)),
}


def runner(settings: Settings, model: nn.Module) -> nn.Module:
    """The model as its engine runs it; the parameters are the model's."""
    return RUNNERS[settings.engine](model)

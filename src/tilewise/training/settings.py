"""What a run is: everything that its weights depend on, and a little that they do not."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..core.errors import TilewiseError
from ..models import MODELS

ENGINES = ("tilewise", "torch", "torch-channels-last", "torch-compile")
# may differ between a run and its continuation without changing a bit of the weights
FREE = ("data", "epochs", "save_every")
SCHEDULES = ("constant", "cosine")
PRECISIONS = ("highest", "high", "medium")


@dataclass(frozen=True)
class Settings:
    """A training run.

    Attributes:
        data: A directory of idx files, or of one folder of images a class.
        model: A name of `tilewise.models.MODELS`.
        engine: "tilewise", "torch", "torch-channels-last" or "torch-compile".
        epochs: Passes over the images.
        batch: Images of a step, of all processes together.
        rate: Learning rate of SGD.
        momentum: Momentum of SGD.
        decay: Weight decay of SGD.
        seed: Of the weights and of the order of images.
        size: Sides of the images; the model's own, if None.
        limit: Training images that are used; all, if None.
        save_every: Steps between checkpoints; each epoch also ends with one.
        schedule: "constant", or "cosine": the rate falls to zero along half a wave.
        average: How much of the averaged weights each step keeps, such as 0.999; they are then
            tested and kept too. 0 averages nothing.
        precision: A setting of `torch.set_float32_matmul_precision`, for the run.

    >>> Settings("images", "lenet_b", epochs=1).batch
    64
    """

    data: str  # a directory of idx files, or of one folder of images a class
    model: str = "lenet_a"
    engine: str = "tilewise"
    epochs: int = 3
    batch: int = 64  # of all processes together
    rate: float = 0.01
    momentum: float = 0.9
    decay: float = 0.0
    seed: int = 0
    size: int | None = None  # of the images' sides; None is the model's own
    limit: int | None = None  # of training images; None is all
    save_every: int = 200  # steps between checkpoints; each epoch also ends with one
    schedule: str = "constant"
    average: float = 0.0
    precision: str = "highest"

    def __post_init__(self) -> None:
        _needs_one_of("model", self.model, MODELS)
        _needs_one_of("engine", self.engine, ENGINES)
        _needs_one_of("schedule", self.schedule, SCHEDULES)
        _needs_one_of("precision", self.precision, PRECISIONS)
        if not 0 <= self.average < 1:
            raise TilewiseError(f"average is {self.average}, needs at least 0 and less than 1")
        for name, least in (("epochs", 0), ("batch", 1), ("seed", 0), ("save_every", 1)):
            if getattr(self, name) < least:
                raise TilewiseError(f"{name} is {getattr(self, name)}, needs at least {least}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def rate_at(self, step: int, steps: int) -> float:
        """The learning rate of a step, from 0, of all steps of the run."""
        if self.schedule == "constant":
            return self.rate
        return self.rate * (1 + math.cos(math.pi * step / steps)) / 2

    def differences(self, earlier: dict[str, Any]) -> list[str]:
        """One line for each setting that makes this another run than an earlier one.

        One that an earlier run did not know yet had its default.
        """
        free = [name for name in FREE if name != "epochs" or self.schedule == "constant"]
        was = {field.name: field.default for field in fields(self)} | earlier
        return [f"{name} was {was[name]}, is {value}" for name, value in self.to_dict().items()
                if name not in free and was[name] != value]


def _needs_one_of(name: str, value: str, known: Any) -> None:
    if value not in known:
        raise TilewiseError(f"{name} is {value!r}, needs one of {', '.join(known)}")

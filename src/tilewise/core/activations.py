"""One row for each activation that can follow a convolution.

A step is its name, and its numbers where it has some: "silu", "leaky_relu:0.2", "clamp:0:6".
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InvalidProblem

ROUNDED = 3e-7  # relative error of a function of a few units in the last place


@dataclass(frozen=True)
class Activation:
    """What everybody has to know of it; who computes it has a function of its name.

    Attributes:
        name: As in `torch.nn.functional`, where that has it.
        monotone: Whether the largest of a window stays the largest, so that pooling may come first.
        numbers: Defaults of its numbers.
        error: What it adds to the relative error of a result.
    """

    name: str
    monotone: bool = False
    numbers: tuple[float, ...] = ()
    error: float = ROUNDED

    def step(self, *numbers: float) -> str:
        """The step with these numbers; defaults are not written."""
        given = (*map(float, numbers), *self.numbers[len(numbers):])
        return self.name if given == self.numbers else _written(self.name, given)


ROWS = (
    Activation("relu", monotone=True, error=0.0),
    Activation("relu6", monotone=True, error=0.0),
    Activation("leaky_relu", numbers=(0.01,), error=6e-8),
    Activation("clamp", numbers=(-1.0, 1.0), monotone=True, error=0.0),
    Activation("silu"), Activation("gelu"), Activation("gelu_tanh"), Activation("mish"),
    Activation("sigmoid", monotone=True), Activation("tanh", monotone=True),
    Activation("elu", numbers=(1.0,)),
    Activation("hardswish", error=6e-8), Activation("hardsigmoid", monotone=True, error=6e-8),
)
ACTIVATIONS = {row.name: row for row in ROWS}


def parsed(step: str) -> tuple[Activation, tuple[float, ...]]:
    """An activation and its numbers."""
    name, *words = step.split(":")
    row = ACTIVATIONS.get(name)
    if row is None:
        raise InvalidProblem(f"activation is {step!r}, needs None or one of "
                             f"{', '.join(ACTIVATIONS)}")
    try:
        numbers = tuple(map(float, words))
    except ValueError:
        numbers = (float("nan"),)
    if len(words) not in (0, len(row.numbers)) or any(n != n for n in numbers):
        raise InvalidProblem(f"activation is {step!r}, needs {name} with "
                             f"{len(row.numbers)} numbers, as in {_written(name, row.numbers)!r}")
    return row, numbers or row.numbers


def _written(name: str, numbers: tuple[float, ...]) -> str:
    """In full; a plus sign would begin the next step."""
    return name + "".join(f":{number!r}".replace("e+", "e") for number in numbers)


def is_activation(step: str) -> bool:
    return step.partition(":")[0] in ACTIVATIONS

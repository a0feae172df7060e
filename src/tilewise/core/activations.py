"""One row for each activation that can follow a convolution.

A step is its name, and its numbers where it has some: "silu", "leaky_relu:0.2", "clamp:0:6".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import InvalidProblem

ROUNDED = 3e-7  # relative error of a function of a few units in the last place
ONE = 6e-8  # of one product
INNER = ("scale", "input_scale")  # fixed arguments that only torch's inner functions have


@dataclass(frozen=True)
class Activation:
    """All that is known of it, but for the code: each backend has a function of its name.

    Attributes:
        name: Stable: problems are written with it.
        modules: Classes of `torch.nn` that compute it.
        function: What computes it in `torch.nn.functional` or torch, where that has another name.
        arguments: Names of its numbers, as arguments of the function and attributes of the modules.
        numbers: Their defaults.
        fixed: Other arguments and attributes, with the values that make it this one.
        operand: Name of a tensor with one value for each output channel, as argument and attribute.
        monotone: Whether the largest of a window stays the largest, so that pooling may come first.
        gradient: "mask", if a bit tells whether one passes, or "value", if it needs the sum.
        error: What it adds to the relative error of a result.
    """

    name: str
    modules: tuple[str, ...] = ()
    function: str = ""
    arguments: tuple[str, ...] = ()
    numbers: tuple[float, ...] = ()
    fixed: tuple[tuple[str, object], ...] = ()
    operand: str = ""
    monotone: bool = False
    gradient: str = "value"
    error: float = ROUNDED

    def step(self, *numbers: float) -> str:
        """The step with these numbers; defaults are not written."""
        given = (*map(float, numbers), *self.numbers[len(numbers):])
        return self.name if given == self.numbers else _written(self.name, given)


ROWS = (
    Activation("relu", ("ReLU",), monotone=True, gradient="mask", error=0.0),
    Activation("relu6", monotone=True, error=0.0),
    Activation("clamp", ("Hardtanh", "ReLU6"), "hardtanh", ("min_val", "max_val"), (-1.0, 1.0),
               monotone=True, error=0.0),
    # torch.clamp: the same values, but gradients pass where a value is at an end
    Activation("clip", (), "clamp", ("min", "max"), (-math.inf, math.inf), monotone=True,
               error=0.0),
    Activation("leaky_relu", ("LeakyReLU",), "", ("negative_slope",), (0.01,), error=ONE),
    Activation("prelu", ("PReLU",), operand="weight", error=ONE),  # slopes may be negative
    Activation("elu", ("ELU",), "", ("alpha",), (1.0,), (("scale", 1), ("input_scale", 1))),
    Activation("silu", ("SiLU",)),
    Activation("gelu", ("GELU",), fixed=(("approximate", "none"),)),
    Activation("gelu_tanh", ("GELU",), "gelu", fixed=(("approximate", "tanh"),)),
    Activation("mish", ("Mish",)),
    Activation("sigmoid", ("Sigmoid",), monotone=True),
    Activation("tanh", ("Tanh",), monotone=True),
    Activation("hardswish", ("Hardswish",), error=ONE),
    Activation("hardsigmoid", ("Hardsigmoid",), monotone=True, error=ONE),
)
ACTIVATIONS = {row.name: row for row in ROWS}
MASKED = frozenset(row.name for row in ROWS if row.gradient == "mask")
SLOPED = frozenset(row.name for row in ROWS if row.operand)


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


def by_mask(step: str | None) -> bool:
    """Whether bits tell all that a gradient needs: nothing to compute, or a mask."""
    return step is None or step in MASKED

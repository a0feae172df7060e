"""What follows a convolution, fused into its kernel as far as that can do it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from .activations import ACTIVATIONS, MASKED, SLOPED, by_mask, is_activation, parsed
from .errors import InvalidProblem


@dataclass(frozen=True)
class Epilogue:
    """The fused tail, in the order in which it is applied.

    Attributes:
        bias: Whether a bias is added.
        residual: Whether a residual is added.
        activation: "relu" and the like, or None.
        pool: Side of the max-pooling windows; 1 is none.
        mask: Whether a bit for every value before pooling tells if a gradient passes it.

    >>> str(Epilogue(bias=True, activation="relu"))
    '+bias+relu'
    """

    bias: bool = False
    residual: bool = False
    activation: str | None = None
    pool: int = 1
    mask: bool = False

    def __post_init__(self) -> None:
        if self.activation is not None:
            parsed(self.activation)
        if self.pool < 1:
            raise InvalidProblem(f"pool is {self.pool}, needs 1 (none) or more (2: 2x2, stride 2)")
        if self.mask and (not by_mask(self.activation) or self.pool not in (1, 2)
                          or (self.activation is None and self.pool == 1)):
            raise InvalidProblem(f"mask is asked for with activation {self.activation} and pool "
                                 f"{self.pool}, needs relu, pool 2 or both")

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the steps in order of application."""
        steps = ("bias" if self.bias else "", "residual" if self.residual else "",
                 self.activation or "", f"pool{self.pool}" if self.pool > 1 else "",
                 "mask" if self.mask else "")
        return tuple(step for step in steps if step)

    @property
    def has_slopes(self) -> bool:
        """Whether the activation reads a value for each channel; they lie behind the bias."""
        return self.activation in SLOPED

    def __str__(self) -> str:
        return "".join(f"+{step}" for step in self.steps)

    @classmethod
    def of(cls, steps: tuple[str, ...]) -> Epilogue:
        """The epilogue with these steps; the inverse of `steps`."""
        activation = next(filter(is_activation, steps), None)
        pools = [int(step[4:]) for step in steps if re.fullmatch(r"pool\d+", step)]
        found = cls("bias" in steps, "residual" in steps, activation, pools[0] if pools else 1,
                    "mask" in steps)
        if found.steps != tuple(steps):
            raise InvalidProblem(f"epilogue steps are {', '.join(steps)}, need some of bias, "
                                 f"residual, an activation ({', '.join(ACTIVATIONS)}), pool2 "
                                 "and mask, in this order")
        return found

    def split(self, fusable: frozenset[str]) -> tuple[Epilogue, tuple[str, ...]]:
        """The longest prefix made of fusable steps, and the steps that are left over."""
        return _split(self, fusable)


@lru_cache(maxsize=1024)
def _split(epilogue: Epilogue, fusable: frozenset[str]) -> tuple[Epilogue, tuple[str, ...]]:
    steps = epilogue.steps
    if epilogue.mask and "mask" not in fusable:  # what makes the mask also does what it tells of
        fusable = fusable - MASKED - {"pool2"}
    if epilogue.activation is not None and not parsed(epilogue.activation)[0].monotone:
        fusable = fusable - {"pool2"}  # who pools does it first
    cut = next((i for i, step in enumerate(steps) if step.partition(":")[0] not in fusable),
               len(steps))
    return Epilogue.of(steps[:cut]), steps[cut:]

"""What a layer has met: the code that it has, and the sizes of its images."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..core.problem import Problem
from ..core.schedule import Schedule

# code that a layer has already is taken if it takes at most so many times as long as the best, or
# so many seconds more: other code would have to be compiled, and needs the weight in another form
NEAR, SOON = 1.25, 4e-5
MANY = 8  # sizes: a layer that met so many will meet others, each of them a few times only
GROWN = 2  # times the outputs of the largest image: what was found for smaller ones may not do
Code = tuple[str, Schedule]  # an algorithm and its schedule


@dataclass(frozen=True)
class Layer:
    """The code of a layer, all that was chosen for it; the first sizes, and the largest."""

    codes: tuple[Code, ...] = ()
    sizes: frozenset[tuple[int, int, int]] = frozenset()
    largest: int = 0

    def met(self, p: Problem) -> Layer:
        """With one more problem."""
        largest = max(self.largest, outputs(p))
        if len(self.sizes) >= MANY:
            return self if largest == self.largest else replace(self, largest=largest)
        return replace(self, sizes=self.sizes | {(p.n, p.h, p.w)}, largest=largest)

    def with_codes(self, codes: tuple[Code, ...]) -> Layer:
        return replace(self, codes=codes)

    def is_versed(self, p: Problem) -> bool:
        """Whether the code that it has is enough: no better one is looked for."""
        return len(self.sizes) >= MANY and outputs(p) <= GROWN * self.largest


def outputs(p: Problem) -> int:
    """Pixels of all outputs."""
    return p.n * p.conv_h * p.conv_w

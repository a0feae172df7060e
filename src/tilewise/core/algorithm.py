"""The contract of a method of convolution."""

from __future__ import annotations

import math
from typing import Any

from .activations import parsed
from .problem import Problem
from .schedule import Schedule, Space
from .target import Target

EPS32 = 2.0 ** -24  # unit roundoff of float32
RMS_BF16 = 2.0 ** -8 / math.sqrt(6)  # of roundings to bfloat16, whose largest is 2 ** -8


class Algorithm:
    """A method: a stateless object that declares what it can run and how well.

    Subclasses override what follows; `docs/adding-an-algorithm.md` walks through one.
    """

    name: str  # stable: it is written into wisdom
    version: int = 1  # bump when code, or the meaning of a tunable, changes
    fuses: frozenset[str] = frozenset()  # epilogue steps done inside the kernel
    directions: frozenset[str] = frozenset({"forward"})  # what the kernel computes
    layouts: frozenset[str] = frozenset({"nhwc"})  # what the kernel reads and writes
    device: str | None = "cpu"  # where it runs; None: wherever torch does
    baseline: bool = False  # what runs where nothing better is known
    takes: str = "addresses"  # or "tensors": what the built function is called with
    exact_on_integers: bool = True  # sums products of the inputs themselves, nothing scaled
    bits: int = 24  # leading bits of the operands that products keep; float32 has 24
    unit: str | None = None  # "matrix": it asks for that unit of a row of ISA
    # whether a value that is not finite reaches results that it has no part in, or a huge one
    # becomes infinite on its way: the kernel then tells of results that are not finite, and the
    # call is run by another
    spreads: bool = False
    by_strides: bool = False  # prepares what has an address and strides, be it a tensor or not
    keeps_infinities: bool = True  # as float32 has them; parts of floats make NaN of them

    def is_for(self, t: Target) -> bool:
        """Whether a target is of the kind that it is written for."""
        if self.device != t.device:
            return self.device is None
        writes = t.device == "cpu" and self.takes == "addresses"
        has_unit = self.unit is None or t.row.matrix is not None
        return not writes or (t.row.is_written and has_unit)

    def reject(self, p: Problem, t: Target) -> list[str]:
        """Reasons with the value found and the value needed; empty means it can run."""
        raise NotImplementedError

    def error(self, p: Problem, t: Target, s: Schedule) -> float:
        """Bound on the rms error over the rms output, against float64."""
        raise NotImplementedError

    def error_as_set(self, p: Problem, t: Target, s: Schedule) -> float:
        """The same where torch's kernels may use as few bits as the process has set them to."""
        return self.error(p, t, s)

    def bound(self, p: Problem, t: Target, s: Schedule, held: bool = True) -> float:
        """Of the kernel with its epilogue; held to float32, or as the process has set torch."""
        step = p.epilogue.activation
        added = parsed(step)[0].error if step else 0.0
        return (self.error if held else self.error_as_set)(p, t, s) + added

    def certain(self, p: Problem, t: Target, s: Schedule) -> float:
        """Bound on the error of every result, whatever the data, as a share of its reach: the
        largest magnitude of the input times the sum of those that it is multiplied with."""
        raise NotImplementedError

    def space(self, p: Problem, t: Target) -> Space:
        """Every legal schedule."""
        return Space()

    def default(self, p: Problem, t: Target) -> Schedule:
        """A legal schedule, found without searching."""
        return Schedule()

    def adapted(self, p: Problem, t: Target, s: Schedule) -> Schedule:
        """A schedule with the same code, the rest of it chosen for this problem."""
        return s

    def shared_by(self, p: Problem, t: Target, s: Schedule) -> Schedule:
        """A schedule that was made for two threads, for the target's number; it has its bits."""
        return s

    def cost(self, p: Problem, t: Target, s: Schedule) -> float:
        """Estimated seconds; runs nothing."""
        raise NotImplementedError

    def workspace(self, p: Problem, t: Target, s: Schedule) -> int:
        """Bytes of scratch a call needs."""
        return 0

    def prepare(self, p: Problem, t: Target, s: Schedule, weight: Any) -> Any:
        """The weight as the kernel wants it; made once, used by every call."""
        return weight

    def prepared_floats(self, p: Problem, t: Target, s: Schedule) -> int:
        """How many it has then, if `prepare_into` writes them; 0: it does not."""
        return 0

    def prepare_into(self, p: Problem, t: Target, s: Schedule, weight: Any, whole: Any) -> None:
        """As `prepare`, to memory of so many floats."""
        raise NotImplementedError

    def weight_of(self, p: Problem, s: Schedule) -> tuple[Problem, Schedule]:
        """Problem and schedule with no more than a prepared weight depends on.

        It is kept under them, and `prepare` is given them: what they lack, it cannot read.
        """
        return p.weight, s

    def requests(self, p: Problem, t: Target, s: Schedule) -> list[Any]:
        """All that a first call has to compile, for processes that do it ahead of need."""
        return []

    def build(self, p: Problem, t: Target, s: Schedule) -> Any:
        """Compile; returns the function that runs it."""
        raise NotImplementedError


def accumulation_error(terms: int, dtype: str = "f32") -> float:
    """Bound on the relative rms error of sums of `terms` products, and of storing them.

    A running sum of random products errs by about eps * sqrt(terms) / 2 relative to its own
    size, one of non-negative products by as much again; small sums are bounded by one rounding.
    """
    stored = {"f32": 0.0, "f64": 0.0, "f16": 2.0 ** -10, "bf16": 2.0 ** -7}[dtype]
    unit = 2.0 ** -53 if dtype == "f64" else EPS32
    return stored + unit * (2.0 + math.sqrt(terms))


def certain_error(roundings: int, products: int = 0, bits: int = 24, dtype: str = "f32") -> float:
    """Bound on what a sum errs if all of its roundings go the same way, as a share of the sum of
    the terms' magnitudes. Some more are for what follows the sum.

    Parts leave out as much as they may; an operand may keep fewer leading bits.
    """
    left_out = {0: 0.0, 1: 2.1 * 2.0 ** -8, 3: 3.1 * 2.0 ** -16, 6: 6.0 * 2.0 ** -24}[products]
    kept = 2.0 ** -bits if bits < 24 and not products else 0.0
    return EPS32 * (roundings * max(1, products) + 8) + left_out + kept + storing_error(dtype)


def storing_error(dtype: str) -> float:
    """Bound on what one rounding of a float32 to nearest errs when it is stored: half a unit in the
    last place."""
    return {"f32": 0.0, "f16": 2.0 ** -11, "bf16": 2.0 ** -8}[dtype]


def split_error(products: int, terms: int) -> float:
    """Bound on what sums of `terms` products err because the products are made of parts.

    Every part rounds what it was made from, and what is left out is as large. In long sums these
    errors are independent, in short ones they can all be as large as they get.
    """
    left_out = {0: 0.0, 1: math.sqrt(2) * RMS_BF16, 3: math.sqrt(3) * RMS_BF16 ** 2,
                6: 2 * RMS_BF16 ** 3}
    return left_out[products] * (2.0 + 8.0 / math.sqrt(terms))


def rounding_error(bits: int, terms: int) -> float:
    """Bound on what such sums err because one operand keeps so many leading bits; all with 24."""
    return 2.0 ** -bits / math.sqrt(6) * (2.0 + 8.0 / math.sqrt(terms)) if bits < 24 else 0.0


def split_bits(products: int) -> int:
    """Leading bits that so many products keep."""
    return {1: 8, 3: 16, 6: 24}[products]

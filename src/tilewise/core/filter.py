"""What is asked of an image filter: images, a window, what is made of it, a border; plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from .borders import BORDERS
from .errors import InvalidProblem
from .problem import Epilogue

ELEMENTS = {"u8": 1, "u16": 2, "i16": 2, "i32": 4, "f32": 4, "f64": 8}
WIDE = {"i32", "f64"}  # whose values a float32 would round
SMALL = {"u8", "u16", "i16"}  # integers of which float32 holds sums
FORMS = {  # what an output is of the values under a window
    "sum": "weighted and summed in any order, rounded to nearest and saturated",
    "whole": "weighted by integers and summed in any order, the lowest bits of it",
    "taps": "weighted and summed tap by tap in float64, cut off as C does it",
    "line": "the same of a line, its last tap first",
    "even": "the same of a line whose weights are symmetric: pairs are added, then weighted",
    "odd": "the same of a line whose weights are antisymmetric",
    "mean": "summed, then divided by their number, cut off as C does it",
    "lines": "a line down, cut off as C does it, then a line across, cut off",
    "bells": "the same of bytes, where both lines are bells: symmetric, of sum one",
    "means": "a mean down, cut off as C does it, then a mean across, cut off",
    "order": "sorted; the `order`-th, from 0, is taken",
}

FUSED = ("lines", "bells", "means")  # of two lines
UNSIGNED = {"u8": 255, "u16": 65535}  # and their largest value
UNIT = {"f32": 2.0 ** -24, "f64": 2.0 ** -53}  # of rounding


@dataclass(frozen=True)
class Filter:
    """One kernel over every channel of a batch of images; the output has the size of the input.

    It answers what the planner asks of a `Problem` (batch, layout, direction, epilogue, bytes),
    so that planner, plan and wisdom take it as it is.

    >>> str(Filter(1, 480, 640, 3, 5, 5, (2, 2), border="reflect", dtype="u8", out="u8", rank=1))
    'n1h480w640c3r5s5a2x2_u8_to_u8_reflect_rank1'
    """

    n: int  # images, and planes where channels lie apart
    h: int
    w: int
    c: int  # channels side by side in a pixel
    r: int
    s: int
    anchor: tuple[int, int]  # the tap that meets the output's own pixel
    border: str = "reflect"
    dtype: str = "f32"
    out: str = "f32"
    rank: int = 0  # of the kernel within float rounding; 0 where nobody has looked
    strided: bool = False  # pixels do not lie side by side
    in_lines: bool = False  # rows of the output are whole cache lines apart
    form: str = "sum"  # one of FORMS
    order: int = 0
    footprint: str = ""  # taps that count, row by row as 1 and 0; all of them where it is empty
    layout: str = field(default="nhwc", init=False)
    direction: str = field(default="forward", init=False)
    epilogue: Epilogue = field(default=Epilogue(), init=False)

    def __post_init__(self) -> None:
        complaints = list(self._complaints())
        if complaints:
            raise InvalidProblem("; ".join(complaints))

    def _complaints(self) -> Iterator[str]:
        for name in ("h", "w", "c", "r", "s"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}, needs at least 1"
        for place, size, axis in zip(self.anchor, (self.r, self.s), ("row", "column")):
            if not 0 <= place < size:
                yield f"the anchor's {axis} is {place}, needs one of the kernel's {size}"
        if self.border not in BORDERS:
            yield f"border is {self.border!r}, needs one of {', '.join(BORDERS)}"
        for name in ("dtype", "out"):
            if getattr(self, name) not in ELEMENTS:
                yield f"{name} is {getattr(self, name)!r}, needs one of {', '.join(ELEMENTS)}"
        yield from self._complaints_of_form()

    def _complaints_of_form(self) -> Iterator[str]:
        if self.form not in FORMS:
            yield f"form is {self.form!r}, needs one of {', '.join(FORMS)}"
        if self.footprint and len(self.footprint) != self.r * self.s:
            yield f"footprint has {len(self.footprint)} taps, needs {self.r * self.s}"
        if not 0 <= self.order < max(1, self.taps):
            yield f"order is {self.order}, needs one of the footprint's {self.taps}"
        if self.form == "order" and self.dtype != self.out:
            yield f"out is {self.out}, needs the type that is sorted, {self.dtype}"

    @property
    def taps(self) -> int:
        """Values that an output is made of."""
        return self.footprint.count("1") if self.footprint else self.r * self.s

    @property
    def is_extreme(self) -> bool:
        """Whether it takes the least or the largest value."""
        return self.form == "order" and self.order in (0, self.taps - 1)

    @property
    def work(self) -> str:
        """The type that values are summed, or compared, in."""
        if self.form == "order":
            return self.dtype
        if self.form == "mean":
            return "f32" if self._divides_in_f32 else "f64"
        if self.form not in ("sum", "whole"):
            return "f64"
        return "f64" if WIDE & {self.dtype, self.out} else "f32"

    @property
    def _divides_in_f32(self) -> bool:
        """Whether float32 has all bits of a sum, and of a quotient those before the point."""
        return {self.dtype, self.out} <= SMALL and self.taps <= 256

    @property
    def guarded(self) -> str:
        """The type whose sums of these integers are mostly far enough from integers."""
        return "f32" if {self.dtype, self.out} == {"u8"} else "f64"

    @property
    def has_sure_means(self) -> bool:
        """Whether rounding moves no quotient, half a step up, over an integer."""
        if not {self.dtype, self.out} <= UNSIGNED.keys():
            return False
        largest = max(UNSIGNED[self.dtype], UNSIGNED[self.out])
        counts = (self.r, self.s) if self.form in FUSED else (self.taps,)
        return all(largest * (n + 8) * UNIT[self.guarded] * n < 0.5 for n in counts)

    @property
    def pixels(self) -> int:
        """Values of the output."""
        return self.n * self.h * self.w * self.c

    @property
    def flops(self) -> int:
        """Multiplications and additions of the direct method."""
        return 2 * self.pixels * self.r * self.s

    @property
    def input_bytes(self) -> int:
        return self.pixels * ELEMENTS[self.dtype]

    @property
    def output_bytes(self) -> int:
        return self.pixels * ELEMENTS[self.out]

    @property
    def bytes(self) -> int:
        return self.input_bytes + self.output_bytes

    @property
    def compiled(self) -> Filter:
        """What code depends on: not the size of the image, its border or the anchor."""
        return self.with_(n=1, h=1, w=1, anchor=(0, 0), border="constant", in_lines=False)

    @property
    def code(self) -> str:
        """Names all that code depends on."""
        return str(self.compiled)

    def with_(self, **changes: object) -> Filter:
        """A copy with some fields changed; what a filter has no word for stays as it is."""
        known = {name: value for name, value in changes.items() if name not in FIXED}
        return replace(self, **known)  # type: ignore[arg-type]

    def __str__(self) -> str:
        words = [f"n{self.n}h{self.h}w{self.w}c{self.c}r{self.r}s{self.s}"
                 f"a{self.anchor[0]}x{self.anchor[1]}", self.dtype, "to", self.out, self.border]
        words += [f"rank{self.rank}"] * (self.rank > 0) + ["strided"] * self.strided
        words += [self.form] * (self.form != "sum") + [f"{self.order}"] * (self.form == "order")
        words += [f"of{int(self.footprint or '0', 2):x}"] * bool(self.footprint)
        return "_".join(words)


FIXED = ("layout", "direction", "epilogue")  # of a Problem, the same for every filter

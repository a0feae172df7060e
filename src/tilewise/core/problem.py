"""What is asked: one convolution, as plain data with a one-line name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from .cached import cached
from .epilogue import Epilogue
from .errors import InvalidProblem
from .grid import Grid

__all__ = ["DIRECTIONS", "DTYPES", "LAYOUTS", "Epilogue", "Problem"]
DTYPES = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2}
LAYOUTS = ("nhwc", "nchw")
DIRECTIONS = ("forward", "backward_data", "backward_weight")


@dataclass(frozen=True)
class Problem:
    """One convolution: no device in it, no data, one line when printed.

    Attributes:
        n: Images.
        c: Input channels.
        h: Height of an image.
        w: Width of an image.
        k: Filters, which are output channels.
        r: Height of a filter.
        s: Width of a filter.
        stride: Down and across.
        padding: Top, bottom, left and right.
        dilation: Down and across.
        groups: Groups of channels.
        dtype: "f32", "f64", "f16" or "bf16".
        layout: "nhwc" (channels-last) or "nchw".
        direction: "forward", "backward_data" or "backward_weight".
        epilogue: What follows the convolution.
        grid: Where the outputs lie in a larger result; None: they are all of it.
        pitch: Channels of the images that the input is a slice of; 0: it is all of them.

    >>> Problem.parse("n8c64h224w224k64r3s3p1_f32_forward+bias+relu").out_h
    224
    """

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)  # top, bottom, left, right
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    dtype: str = "f32"
    layout: str = "nhwc"
    direction: str = "forward"
    epilogue: Epilogue = field(default_factory=Epilogue)
    grid: Grid | None = None
    pitch: int = 0

    def __post_init__(self) -> None:
        if not self._is_plain():
            complaints = list(self._complaints())
            if complaints:
                raise InvalidProblem("; ".join(complaints))

    def __hash__(self) -> int:
        return self._hash

    @cached
    def _hash(self) -> int:
        return hash(tuple(getattr(self, name) for name in FIELDS))

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FIELDS}  # hashes are a process's own

    @cached
    def bare(self) -> Problem:
        """The convolution alone, without what follows it."""
        return self.with_(epilogue=Epilogue())

    def _is_plain(self) -> bool:
        """Whether there is nothing to complain about, at a glance: a new size makes many."""
        return (min(self.c, self.h, self.w, self.k, self.r, self.s, self.groups, *self.stride,
                    *self.dilation) > 0 and self.n >= 0 and min(self.padding) >= 0
                and self.c % self.groups == self.k % self.groups == 0 and self.dtype == "f32"
                and self.layout in LAYOUTS and self.direction in DIRECTIONS
                and not (self.epilogue.mask or self.grid or self.pitch)
                and min(self.out_h, self.out_w) > 0)

    def _complaints(self) -> Iterator[str]:
        for name in ("c", "h", "w", "k", "r", "s", "groups"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}, needs at least 1"
        if self.n < 0:
            yield f"n is {self.n}, needs at least 0"
        for name, least in (("stride", 1), ("dilation", 1), ("padding", 0)):
            if name == "padding" and self.grid:
                continue  # negative: rows and columns that a phase does not need
            if min(getattr(self, name)) < least:
                yield f"{name} is {getattr(self, name)}, needs at least {least} everywhere"
        if self.groups > 0 and (self.c % self.groups or self.k % self.groups):
            yield (f"groups is {self.groups}, needs a divisor of the input channels ({self.c}) "
                   f"and of the output channels ({self.k})")
        for name, known in (("dtype", DTYPES), ("layout", LAYOUTS), ("direction", DIRECTIONS)):
            if getattr(self, name) not in known:
                yield f"{name} is {getattr(self, name)!r}, needs one of {', '.join(known)}"
        if self.epilogue.mask and (self.layout, self.dtype, self.direction) != (
                "nhwc", "f32", "forward"):
            yield (f"mask is asked for with {self.layout}, {self.dtype}, {self.direction}, needs "
                   "nhwc, f32, forward")
        if self.grid and (self.direction == "backward_weight" or
                          (self.layout, self.epilogue.pool) != ("nhwc", 1)):
            yield (f"grid is asked for with {self.direction}, {self.layout}, pool "
                   f"{self.epilogue.pool}, needs images as results, nhwc, no pool")
        if self.pitch and (self.pitch < self.c or (self.direction, self.layout) != (
                "forward", "nhwc")):
            yield (f"pitch is {self.pitch} with {self.c} channels, {self.direction}, "
                   f"{self.layout}, needs at least as many, forward, nhwc")
        if min(*self.stride, *self.dilation) < 1:
            return  # no output size to speak of
        if min(self.conv_h, self.conv_w) < 1:
            yield (f"the dilated filter ({self.span_h}x{self.span_w}) does not fit into the padded "
                   f"input ({self.padded_h}x{self.padded_w})")
        elif min(self.out_h, self.out_w) < 1:
            yield (f"pool is {self.epilogue.pool}, needs an output at least as large, found "
                   f"{self.conv_h}x{self.conv_w}")

    @property
    def padded_h(self) -> int:
        return self.h + self.padding[0] + self.padding[1]

    @property
    def padded_w(self) -> int:
        return self.w + self.padding[2] + self.padding[3]

    @property
    def span_h(self) -> int:
        """Input rows under one dilated filter."""
        return (self.r - 1) * self.dilation[0] + 1

    @property
    def span_w(self) -> int:
        """Input columns under one dilated filter."""
        return (self.s - 1) * self.dilation[1] + 1

    @cached
    def conv_h(self) -> int:
        """Rows of the convolution before pooling."""
        return (self.padded_h - self.span_h) // self.stride[0] + 1

    @cached
    def conv_w(self) -> int:
        """Columns of the convolution before pooling."""
        return (self.padded_w - self.span_w) // self.stride[1] + 1

    @property
    def out_h(self) -> int:
        return self.conv_h // self.epilogue.pool

    @property
    def out_w(self) -> int:
        return self.conv_w // self.epilogue.pool

    @cached
    def mirrored(self) -> Problem | None:
        """The forward convolution that turns gradients of the output into those of the input.

        Its weight has the channels swapped and the taps reversed. There is none with a stride,
        or with more padding than the filter reaches.
        """
        top, bottom, left, right = self.padding
        padding = (self.span_h - 1 - top, self.span_h - 1 - bottom,
                   self.span_w - 1 - left, self.span_w - 1 - right)
        if self.stride != (1, 1) or min(padding) < 0:
            return None
        return self.with_(c=self.k, k=self.c, h=self.conv_h, w=self.conv_w, padding=padding,
                          direction="forward")

    @property
    def result_shape(self) -> tuple[int, int, int, int]:
        """Of what is computed: the output, or the gradient of the input or of the weight."""
        whole = None if self.grid is None else self.grid[2:4]
        return {"forward": (self.n, self.k, *(whole or (self.out_h, self.out_w))),
                "backward_data": (self.n, self.c, *(whole or (self.h, self.w))),
                "backward_weight": (self.k, self.group_c, self.r, self.s)}[self.direction]

    @property
    def group_c(self) -> int:
        """Input channels of one group."""
        return self.c // self.groups

    @property
    def group_k(self) -> int:
        """Output channels of one group."""
        return self.k // self.groups

    @property
    def terms(self) -> int:
        """Products in one sum of the direct method, the strides of a gradient not looked at."""
        if self.direction == "backward_weight":
            return self.n * self.conv_h * self.conv_w
        return (self.group_k if self.direction == "backward_data" else self.group_c) * (
            self.r * self.s)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the direct method."""
        return 2 * self.n * self.conv_h * self.conv_w * self.k * self.group_c * self.r * self.s

    @cached
    def share_inside(self) -> float:
        """The share of the direct method's products whose input is no padding."""
        down = _taps_inside(self.h, self.conv_h, self.r, self.stride[0], self.padding[0],
                            self.dilation[0])
        across = _taps_inside(self.w, self.conv_w, self.s, self.stride[1], self.padding[2],
                              self.dilation[1])
        return down * across / (self.conv_h * self.r * self.conv_w * self.s)

    @property
    def input_bytes(self) -> int:
        return self.n * self.c * self.h * self.w * DTYPES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        return self.k * self.group_c * self.r * self.s * DTYPES[self.dtype]

    @property
    def output_bytes(self) -> int:
        return self.n * self.k * self.out_h * self.out_w * DTYPES[self.dtype]

    @property
    def image_bytes(self) -> int:
        """Images read and written once."""
        residual = self.output_bytes if self.epilogue.residual else 0
        return self.input_bytes + self.output_bytes + residual

    @property
    def bytes(self) -> int:
        """The least traffic: everything read once, the output written once."""
        return self.image_bytes + self.weight_bytes

    @property
    def compiled(self) -> Problem:
        """What code depends on: not the batch."""
        return self.with_(n=1)

    @cached
    def code(self) -> str:
        """Names all that code depends on if its kernel takes image sizes from its frame."""
        shape = f"c{self.c}k{self.k}r{self.r}s{self.s}u{self.stride[0]}x{self.stride[1]}"
        shape += f"d{self.dilation[0]}x{self.dilation[1]}g{self.groups}"
        padded = "_padded" if self.is_padded else ""
        padded += "_apart" if self.grid else ""
        padded += "_slice" if self.pitch else ""
        return f"{shape}{padded}_{self.dtype}_{self.layout}_{self.direction}{self.epilogue}"

    @property
    def is_padded(self) -> bool:
        return any(self.padding)

    @property
    def is_linear(self) -> bool:
        """Whether it is a product of matrices: every image is one pixel, and so is the filter."""
        return (self.h, self.w, self.r, self.s, self.groups) == (1,) * 5 and not any(self.padding)

    @property
    def weight(self) -> Problem:
        """What a prepared weight may depend on: the smallest image, one output, nothing behind."""
        return _weight(self.c, self.span_h, self.span_w, self.k, self.r, self.s, self.dilation,
                       self.groups, self.dtype, self.layout, self.direction)

    def with_(self, **changes: object) -> Problem:
        """A copy with some fields changed."""
        same: dict[str, Any] = {name: getattr(self, name) for name in FIELDS}
        return Problem(**{**same, **changes})

    @cached
    def name(self) -> str:
        return _print(self)

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def parse(text: str) -> Problem:
        """The problem that prints as `text`."""
        return _parse(text)


def _taps_inside(size: int, outputs: int, taps: int, stride: int, before: int,
                 dilation: int) -> int:
    """Pairs of an output and a tap along an axis that meet within the input."""
    found = 0
    for tap in range(taps):
        offset = tap * dilation - before  # where the first output finds this tap
        first = max(0, -(offset // stride))
        found += max(0, min(outputs, (size - 1 - offset) // stride + 1) - first)
    return found


def _pair(letter: str, a: str, b: str, default: str) -> str:
    if a == b:
        return "" if a == default else f"{letter}{a}"
    return f"{letter}{a}x{b}"


def _sides(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


FIELDS = tuple(entry.name for entry in fields(Problem))


@lru_cache(maxsize=4096)
def _weight(c: int, h: int, w: int, k: int, r: int, s: int, dilation: tuple[int, int], groups: int,
            dtype: str, layout: str, direction: str) -> Problem:
    return Problem(1, c, h, w, k, r, s, dilation=dilation, groups=groups, dtype=dtype,
                   layout=layout, direction=direction)


def _print(p: Problem) -> str:
    top, bottom, left, right = p.padding
    shape = f"n{p.n}c{p.c}h{p.h}w{p.w}k{p.k}r{p.r}s{p.s}"
    shape += _pair("u", str(p.stride[0]), str(p.stride[1]), "1")
    shape += _pair("p", _sides(top, bottom), _sides(left, right), "0")
    shape += _pair("d", str(p.dilation[0]), str(p.dilation[1]), "1")
    shape += f"g{p.groups}" if p.groups > 1 else ""
    words = [shape, p.dtype]
    words += [p.layout] if p.layout != "nhwc" else []
    words += [p.direction]
    words += [str(p.grid)] if p.grid else []
    words += [f"of{p.pitch}"] if p.pitch else []
    return "_".join(words) + str(p.epilogue)


_SIDES = r"-?\d+(?:--?\d+)?"
_GRAMMAR = re.compile(
    r"n(?P<n>\d+)c(?P<c>\d+)h(?P<h>\d+)w(?P<w>\d+)k(?P<k>\d+)r(?P<r>\d+)s(?P<s>\d+)"
    r"(?:u(?P<u>\d+(?:x\d+)?))?"
    rf"(?:p(?P<p>{_SIDES}(?:x{_SIDES})?))?"
    r"(?:d(?P<d>\d+(?:x\d+)?))?(?:g(?P<g>\d+))?"
    r"_(?P<dtype>[a-z]+\d+)(?:_(?P<layout>nchw|nhwc))?_(?P<direction>forward|backward_data|"
    r"backward_weight)(?:_grid(?P<grid>\d+x\d+of\d+x\d+(?:x\d+)?))?(?:_of(?P<pitch>\d+))?"
    r"(?P<epilogue>(?:\+\w+(?::[-.\w]+)*)*)"
)


def _two(text: str | None, default: str) -> tuple[str, str]:
    first, _, second = (text or default).partition("x")
    return first, second or first


def _both_sides(text: str) -> tuple[int, int]:
    numbers = re.findall(r"(?:^|(?<=\d)-)(-?\d+)", text)  # a minus between two is not their sign
    return int(numbers[0]), int(numbers[-1])


@lru_cache(maxsize=4096)
def _parse(text: str) -> Problem:
    match = _GRAMMAR.fullmatch(text.strip())
    if not match:
        raise InvalidProblem(
            f"cannot read the problem {text!r}; needs a line such as "
            "n8c64h224w224k64r3s3p1_f32_forward+bias+relu (u = stride, p = padding, "
            "d = dilation, g = groups; 2x1 for two axes, 0-1 for two sides)")
    field_ = match.groupdict()
    numbers = {name: int(field_[name]) for name in "nchwkrs"}
    vertical, horizontal = _two(field_["p"], "0")
    u, d = _two(field_["u"], "1"), _two(field_["d"], "1")
    return Problem(
        **numbers, stride=(int(u[0]), int(u[1])),
        padding=(*_both_sides(vertical), *_both_sides(horizontal)),
        dilation=(int(d[0]), int(d[1])), groups=int(field_["g"] or 1), dtype=field_["dtype"],
        layout=field_["layout"] or "nhwc", direction=field_["direction"],
        epilogue=Epilogue.of(tuple(field_["epilogue"].split("+")[1:])),
        grid=Grid(*map(int, re.findall(r"\d+", field_["grid"]))) if field_["grid"] else None,
        pitch=int(field_["pitch"] or 0))

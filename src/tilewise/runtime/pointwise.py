"""Chains of elementwise operations on tensors, by one kernel each.

Callers pass plain tensors. What is not for the kernel is answered with None: torch computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.isa import KNOWN
from ..core.places import address
from ..core.remembered import Remembered
from ..core.schedule import Schedule
from ..core.target import Target
from ..kernels.cpu import memory
from ..kernels.cpu.between.pointwise import PLACES, Chain, Step, make, sizes
from ..kernels.cpu.emit.launch import Launch, launch_of
from ..kernels.cpu.emit.requests import Request
from .images import Layout, Sizes, as_images, channels_last, is_dense, pitch_of, without_row
from .types import element_of

FEW, FEW_LONG = 1 << 16, 1 << 15  # floats below which one thread is as good, by `Chain.is_long`
POOLED = 16 << 20  # bytes from which memory of the pool is worth what it takes to get it

Layouts = tuple[tuple[Sizes, Sizes, torch.dtype], ...]


class Run(NamedTuple):
    """A launch for tensors of these shapes and strides."""

    launch: Launch
    batch: int
    threads: int
    made: Layout  # of a result that the caller does not give
    kinds: tuple[str, ...]
    columns: int
    pitches: Sizes  # of the operands and the result
    spans: Sizes  # floats from the first to behind the last, of the same
    unused: Sizes  # a zero for the address of each operand that there is not
    dtype: torch.dtype = torch.float32

    def __call__(self, operands: Sequence[Tensor], y: Tensor) -> Tensor:
        self.launch(*[address(x) for x in operands], *self.unused, address(y), 0, self.batch,
                    self.threads)
        return y

    def may_write(self, operands: Sequence[Tensor], y: Tensor) -> bool:
        """Whether every value that y shares with an operand is read for that value alone."""
        *pitches, pitch = self.pitches
        for x, kind, own, span in zip(operands, self.kinds, pitches, self.spans):
            ahead, odd = divmod(x.data_ptr() - y.data_ptr(), self.dtype.itemsize)
            if not -span <= ahead < self.spans[-1]:
                continue
            beside = self.columns <= ahead % pitch <= pitch - self.columns
            if kind != "image" or own != pitch or odd or not (ahead == 0 or beside):
                return False
        return True


class Pointwise:
    """The steps of a `Chain`, to be called with tensors often: launches are remembered.

    Args:
        steps: Those of a `Chain`.
        kinds: Those of a `Chain`, for vectors (C,) and others whose shape does not tell.
    """

    def __init__(self, steps: Sequence[Step], kinds: Sequence[str | None] | None = None) -> None:
        self.steps = tuple(tuple(step) for step in steps)
        self.kinds = None if kinds is None else tuple(kinds)
        self._runs = Remembered(partial(_run_of, self.steps, self.kinds))

    def __call__(self, operands: Sequence[Tensor], out: Tensor | None = None) -> Tensor | None:
        """As `pointwise`."""
        run = self.run(operands, out)
        if run is None:
            return None
        if out is None:
            return run(operands, empty(*run.made, run.dtype))
        return run(operands, out) if run.may_write(operands, out) else None

    def run(self, operands: Sequence[Tensor], out: Tensor | None) -> Run | None:
        """The launch for such tensors, if the kernel can take them."""
        tensors = operands if out is None else (*operands, out)
        layouts = layouts_of(tensors)
        if layouts is None:
            return None
        return self._runs[layouts, out is None, torch.get_num_threads()]


class Steps(NamedTuple):
    """Of a `Chain`, and what its operands hold."""

    steps: tuple[Step, ...]
    dtype: str
    kinds: tuple[str | None, ...] = ()  # where some are of another type

    def chain(self, kinds: Sequence[str]) -> Chain:
        return Chain(tuple(kinds), self.steps, self.dtype)

    def operand(self, i: int, layout: Layout, whole: Sizes) -> tuple[str, int] | None:
        """Kind and pitch of an operand."""
        found = _operand(layout, whole)
        is_norm = bool(self.kinds) and self.kinds[i] == "norm"
        return ("norm", 0) if found is not None and is_norm else found


def _run_of(steps: tuple[Step, ...], kinds: Sequence[str | None] | None, layouts: Layouts,
            is_new: bool, threads: int) -> Run | None:
    count = len(layouts) if is_new else len(layouts) - 1
    dtype = layouts[0][2]
    element = element_of(dtype)
    kinds = kinds or (None,) * count
    types = [torch.float32 if kind == "norm" else dtype for kind in kinds]
    if element is None or any(own != want or prod(shape) == 0 for (shape, _, own), want in zip(
            layouts, (*types, dtype))):
        return None
    tensors = [(tuple(shape), strides) for shape, strides, _ in layouts]
    rank = max(4, *(len(shape) for shape, _ in tensors))
    given = [_whole(*layout, kind, rank) for layout, kind in zip(tensors[:count], kinds)]
    to = tensors[count] if len(tensors) > count else None
    code = Steps(steps, element, tuple(kinds) if "norm" in kinds and element != "f32" else ())
    if code.kinds:  # which lie as channels do, and are of another type
        run = _in_rows(code, given, to) or _volumes(code, given, to)
        return run and run._replace(dtype=dtype)
    run = (_flat(code, given, to) or _in_rows(code, given, to) or _volumes(code, given, to)
           or _signals(code, given, to) or (None if to else _moved(code, given)))
    return run and run._replace(dtype=dtype)


_known = Remembered(lambda text, steps, kinds: Pointwise(steps, kinds))


def pointwise(steps: Sequence[Step], operands: Sequence[Tensor], out: Tensor | None = None,
              kinds: Sequence[str | None] | None = None) -> Tensor | None:
    """The steps of a `Chain` on up to four operands, which broadcast as torch's do.

    Images are channels-last, or slices of channels of such; or all operands have the same strides
    without gaps, at any rank. `kinds` are those of a `Chain`, for vectors (C,) and such. `out` has
    the result's shape; it may be one of the images. The result does not depend on the layout.
    """
    chosen = None if kinds is None else tuple(kinds)
    # its text too: 1 == 1.0, and an operand's number is no constant
    return _known[repr(steps), tuple(map(tuple, steps)), chosen](operands, out)


def layouts_of(tensors: Sequence[Tensor]) -> Layouts | None:
    """What a launch depends on; None if torch must see the tensors."""
    follows = torch.is_grad_enabled()
    found = []
    for x in tensors:
        if not x.is_cpu or x.is_neg() or (follows and x.requires_grad):
            return None
        found.append((x.shape, x.stride(), x.dtype))
    return tuple(found) if KNOWN else None


def _whole(shape: Sizes, strides: Sizes, kind: str | None, rank: int) -> Layout:
    """With the sizes of one that a vector for channels, images or pixels has by its kind."""
    behind = (rank - 2) * (1,), (rank - 2) * (0,)
    if kind in ("channel", "norm") and len(shape) == 1:
        return (1, *shape, *behind[0]), (0, *strides, *behind[1])
    if kind == "each" and len(shape) == 2:
        return (*shape, *behind[0]), (*strides, *behind[1])
    if kind == "pixel" and len(shape) == 3:
        return (shape[0], 1, *shape[1:]), (strides[0], 0, *strides[1:])
    return shape, strides


# all memory as one row


def _flat(code: Steps, given: list[Layout], to: Layout | None) -> Run | None:
    """Operands, and a result, of the same strides without gaps; single values beside them."""
    whole = max(given, key=lambda layout: prod(layout[0]))
    count, rank = prod(whole[0]), len(whole[0])
    images = [prod(shape) == count for shape, _ in given]
    others = [layout for layout, image in zip(given, images) if image]
    alike = [_seen(*layout) for layout in (*others, *([to] if to else []))]
    single = all(prod(shape) == 1 and len(shape) <= rank
                 for (shape, _), image in zip(given, images) if not image)
    shapes = {layout[0] for layout in (*others, *([to] if to else []))}
    if not single or len(shapes) > 1 or len(set(alike)) > 1 or not is_dense(*others[0]):
        return None
    kinds = tuple("image" if image else "pixel" for image in images)
    pitches = [count if image else 0 for image in images]
    return _made(code.chain(kinds), (1, 1, count), pitches, count, whole)


def _seen(shape: Sizes, strides: Sizes) -> tuple[tuple[int, int], ...]:
    """Sizes and strides that make a difference."""
    return tuple((size, stride) for size, stride in zip(shape, strides) if size > 1)


# pixels as rows


def _in_rows(code: Steps, given: list[Layout], to: Layout | None) -> Run | None:
    if max(len(shape) for shape, _ in given) != 4:
        return None
    given = [_padded(layout, 4) for layout in given]
    shape = tuple(max(sizes) for sizes in zip(*(shape for shape, _ in given)))
    found = [code.operand(i, layout, shape) for i, layout in enumerate(given)]
    made = channels_last(shape)
    pitch = pitch_of(*(to or made)) if to is None or to[0] == shape else 0
    if not pitch or None in found:
        return None
    kinds, pitches = zip(*(one for one in found if one))
    n, c, h, w = shape
    return _made(code.chain(kinds), (n, h * w, c), pitches, pitch, made)


def _volumes(code: Steps, given: list[Layout], to: Layout | None) -> Run | None:
    """Images whose rows are those of all slices; what broadcasts does so along both axes."""
    if max(len(shape) for shape, _ in given) != 5:
        return None
    padded = [_padded(layout, 5) for layout in given]
    whole = tuple(max(sizes) for sizes in zip(*(shape for shape, _ in padded)))
    if any(shape[2:4] not in ((1, 1), whole[2:4]) for shape, _ in padded) or (
            to is not None and to[0] != whole):
        return None
    run = _in_rows(code, [as_images(*layout) for layout in padded], to and as_images(*to))
    return run and run._replace(made=channels_last(whole))


def _signals(code: Steps, given: list[Layout], to: Layout | None) -> Run | None:
    """Images of one row."""
    if any(len(shape) != 3 for shape, _ in (*given, *([to] if to else []))):
        return None
    run = _in_rows(code, [as_images(*layout) for layout in given], to and as_images(*to))
    return run and run._replace(made=without_row(run.made))


def _moved(code: Steps, given: list[Layout]) -> Run | None:
    """Images that have other axes: channels are the last, or two axes of five side by side."""
    rank = max(len(shape) for shape, _ in given)
    if rank <= 4:
        run = _in_rows(code, [_axes(_padded(layout, 4), (0, 3, 1, 2)) for layout in given], None)
        if run is None:
            return None
        shape, strides = _axes(run.made, (0, 2, 3, 1))
        return run._replace(made=(shape[4 - rank:], strides[4 - rank:]))
    if rank != 5:
        return None
    padded = [_padded(layout, 5) for layout in given]
    merged = [_merged(layout) for layout in padded]
    run = None if None in merged else _in_rows(code, [one for one in merged if one], None)
    if run is None:
        return None
    whole = tuple(max(sizes) for sizes in zip(*(shape for shape, _ in padded)))
    if any(size not in (1, most) for shape, _ in padded for size, most in zip(shape, whole)):
        return None  # they do not broadcast, though as many channels do
    image, *rest = run.made[1]
    return run._replace(made=(whole, (image, whole[2], *rest)))


def _padded(layout: Layout, rank: int) -> Layout:
    """With axes of one before the others, as torch's broadcasting sees it."""
    shape, strides = layout
    return (1,) * (rank - len(shape)) + shape, (0,) * (rank - len(shape)) + strides


def _axes(layout: Layout, order: Sizes) -> Layout:
    return tuple(layout[0][i] for i in order), tuple(layout[1][i] for i in order)


def _merged(layout: Layout) -> Layout | None:
    """The second and the third of five axes as one."""
    (n, a, b, h, w), (image, outer, inner, row, column) = layout
    if a > 1 and (b == 1 or outer != b * inner):
        return None
    return (n, a * b, h, w), (image, inner, row, column)


def _operand(layout: Layout, whole: Sizes) -> tuple[str, int] | None:
    """Kind and pitch of an operand, seen as a part of images of this shape."""
    (shape, strides), (n, c, h, w) = layout, whole
    own = pitch_of(shape, strides)
    if not own:
        return None
    if shape == whole:
        return "image", own
    if shape == (1, 1, 1, 1):
        return "pixel", 0
    if shape == (1, c, 1, 1):
        return "channel", 0
    if shape == (n, c, 1, 1):
        return "each", own
    return ("pixel", own) if shape == (n, 1, h, w) else None


def _made(chain: Chain, extent: tuple[int, int, int], pitches: Sequence[int], pitch: int,
          made: Layout) -> Run:
    """The run of images, rows of each, and columns."""
    images, rows, columns = extent
    target, threads = host(images * rows * columns, FEW_LONG if chain.is_long else FEW)
    batch, words = sizes(chain, images, rows, columns, pitches, pitch)
    launch = launch_of(Request(make, chain, Schedule(), target.row, (), True), words)
    counts = {"image": (images * rows, columns), "pixel": (images * rows, 1),
              "each": (images, columns), "channel": (1, columns), "norm": (1, columns)}
    spans = [(counts[kind][0] - 1) * own + counts[kind][1]
             for kind, own in zip((*chain.kinds, "image"), (*pitches, pitch))]
    return Run(launch, batch, threads, made, chain.kinds, columns, (*pitches, pitch), tuple(spans),
               (0,) * (len(PLACES) - len(pitches)))


def host(floats: int, few: int = FEW) -> tuple[Target, int]:
    """This machine, and on how many of its threads such work runs."""
    target = Target.host(threads=torch.get_num_threads())
    return target, target.threads if floats >= few else 1


def empty(shape: Sizes, strides: Sizes, dtype: torch.dtype = torch.float32) -> Tensor:
    """A result without gaps, from the pool where that is worth its while."""
    count = prod(shape)
    if dtype.itemsize * count < POOLED:
        return memory.noted(torch.empty_strided(shape, strides, dtype=dtype))
    return memory.empty(count, dtype=dtype).as_strided(shape, strides)

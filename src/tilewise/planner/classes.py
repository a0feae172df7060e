"""Classes of problems that one choice serves: images of about the same size, batches too."""

from __future__ import annotations

import math
from functools import lru_cache

from ..core.problem import Problem

# sides of images in steps of about the root of two; those of 224 and 640 pixels, halved again and
# again, are among them
VERSION = "2"  # of the classes: wisdom about others is measured anew
LONG = 4  # times as long as wide: not planned as a square
PHASE = 20  # outputs of a dilated filter that share no input with their neighbours, along an axis
SIDES = (1, 2, 3, 4, *(side << i for i in range(19) for side in (5, 7)))  # lines can be long


@lru_cache(maxsize=4096)
def side(pixels: int) -> int:
    """The nearest of the sides of a square image with so many pixels."""
    return min(SIDES, key=lambda s: abs(math.log(s * s / pixels)))


def bucket(p: Problem) -> int:
    """The batch, rounded up to a power of two."""
    return 1 << (p.n - 1).bit_length() if p.n else 0


def representative(p: Problem) -> Problem:
    """The problem that is planned instead: the nearest square image, or the nearest sides of one
    that is long, and the next batch.

    Gradients of weights are planned for their own size, as their code is; so are linear layers,
    whose rows decide, filters, and what falls apart into so small images that a few pixels decide.
    """
    if not isinstance(p, Problem) or p.direction == "backward_weight":
        return p.with_(n=bucket(p))
    if p.is_linear:
        return p
    if _is_scattered(p):
        return p.with_(n=bucket(p))
    sides = [side(p.conv_h * p.conv_w)] * 2
    if max(p.conv_h, p.conv_w) > LONG * min(p.conv_h, p.conv_w):
        sides = [side(p.conv_h ** 2), side(p.conv_w ** 2)]
    found = _with_outputs(p, *sides)
    return found if found is not None else p.with_(n=bucket(p))


def _is_scattered(p: Problem) -> bool:
    """Whether a dilated filter divides the image into small ones, or a gradient's stride into
    phases: a pixel more is a tile more."""
    if p.direction == "backward_data" and p.stride != (1, 1):
        return True
    return any(apart > 1 and outputs < PHASE * apart
               for apart, outputs in zip(p.dilation, (p.conv_h, p.conv_w), strict=True))


def _with_outputs(p: Problem, rows: int, columns: int) -> Problem | None:
    """The same convolution with so many outputs, if there is one."""
    top, bottom, left, right = p.padding
    h = (rows - 1) * p.stride[0] + p.span_h - top - bottom
    w = (columns - 1) * p.stride[1] + p.span_w - left - right
    if min(h, w) < 1 or min(rows, columns) < p.epilogue.pool:
        return None
    return p.with_(n=bucket(p), h=h, w=w)


def share(p: Problem) -> float:
    """How much of the representative's work a problem is."""
    like = representative(p)
    if not isinstance(p, Problem):
        return p.n / max(1, like.n)
    return p.n * p.conv_h * p.conv_w / max(1, like.n * like.conv_h * like.conv_w)

"""Problems and schedules as launches of Winograd's three kernels, and calls with tensors.

The squares of the input become an image of tiles with a group of channels for every position;
what lies between the transforms is a 1x1 convolution of that image, one filter a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.problem import Problem
from ..winograd_math import Matrix, Op, matrices, straight_line
from . import conv, epilogue, launch, winograd
from .launch import Launch

SIGNS = {"add": 1, "fma": 1, "sub": -1}  # of the second operand; others have none


def code(matrix: Matrix) -> dict[str, Any]:
    """Straight-line code as constants of a kernel: steps of factor * a + sign * b, outputs."""
    program = straight_line(matrix)
    return {"STEPS": tuple(map(_step, program.ops)), "OUTPUTS": program.outputs}


def _step(op: Op) -> tuple[int, float, int, int]:
    first, second = (*op.operands, 0)[:2]
    factor = -1.0 if op.kind == "neg" else float(op.constant) if op.constant else 1.0
    return first, factor, second, SIGNS.get(op.kind, 0)


def image_of_tiles(p: Problem, s: Any) -> Problem:
    """The products as a convolution: an image of tiles, a group of channels for a position."""
    positions = (s.tile + p.r - 1) ** 2
    return Problem(p.n, positions * p.c, math.ceil(p.conv_h / s.tile),
                   math.ceil(p.conv_w / s.tile), positions * p.k, 1, 1, groups=positions,
                   dtype=p.dtype)


def prepare_weight(p: Problem, s: Any, weight: Tensor) -> Tensor:
    """G g G^T of every filter, in float64, as the filters of the image of tiles."""
    G = torch.tensor([[float(value) for value in row] for row in matrices(s.tile, p.r).G],
                     dtype=torch.float64, device=weight.device)
    filters = torch.einsum("ir,kcrs,js->ijkc", G, weight.double(), G).to(weight.dtype)
    return conv.prepare_weight(s, filters.reshape(-1, p.c, 1, 1))


def launches(p: Problem, s: Any, precision: str) -> list[Launch]:
    """What runs for a problem, in order: transform, multiply, transform back."""
    tiles, transform = image_of_tiles(p, s), matrices(s.tile, p.r)
    same = {"ROWS": tiles.h, "COLS": tiles.w, "TILE": s.tile, "SIDE": transform.n,
            "BT": s.tiles, "BC": s.channels}
    blocks = math.ceil(p.n * tiles.h * tiles.w / s.tiles)
    into = Launch(winograd.transform_input, (blocks, math.ceil(p.c / s.channels)),
                  {"x": ("x", p.dtype), "v": ("v", p.dtype)}, {"N": p.n},
                  {**same, **code(transform.BT), "H": p.h, "W": p.w, "C": p.c,
                   "TOP": p.padding[0], "LEFT": p.padding[2]}, s.transform_warps)
    multiply, = conv.launches(tiles, s.with_(flat=False), precision)
    roles = {"x": ("v", p.dtype), "w": ("weight", p.dtype)}
    multiply = replace(multiply, pointers={name: roles.get(name, ("m", "f32"))
                                           for name in multiply.pointers})
    named = {name: (role, p.dtype) for name, role in epilogue.roles(p.epilogue).items()}
    back = Launch(winograd.transform_output, (blocks, math.ceil(p.k / s.channels)),
                  {"m": ("m", "f32"), **named, "y": ("y", p.dtype)}, {"N": p.n},
                  {**same, **code(transform.AT), "OH": p.conv_h, "OW": p.conv_w, "K": p.k,
                   **epilogue.constants(p.epilogue)}, s.transform_warps)
    return [into, multiply, back]


def runner(p: Problem, s: Any, precision: str, images: int) -> Callable[..., Tensor]:
    """run(x, prepared weight, bias, residual), so many images at a time."""
    parts = [(first, launches(p.with_(n=min(images, p.n - first)), s, precision))
             for first in range(0, p.n, images)]
    tiles = image_of_tiles(p.with_(n=min(images, p.n)), s)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None,
            residual: Tensor | None = None) -> Tensor:
        y = launch.empty((p.n, p.out_h, p.out_w, p.k), dtype=x.dtype, device=x.device)
        v = launch.empty((tiles.n, tiles.h, tiles.w, tiles.c), dtype=x.dtype, device=x.device)
        m = launch.empty((tiles.n, tiles.h, tiles.w, tiles.k), dtype=torch.float32,
                         device=x.device)
        for first, steps in parts:
            tensors = {"x": x[first:], "weight": weight, "bias": bias, "y": y[first:], "v": v,
                       "m": m, "residual": None if residual is None else residual[first:]}
            for step in steps:
                step.start(tensors)
        return y.permute(0, 3, 1, 2)

    return run

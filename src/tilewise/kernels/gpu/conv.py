"""Problems and schedules as launches of the implicit-GEMM kernels, and calls with tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core.problem import Problem
from . import epilogue, implicit_gemm, launch
from .launch import Launch

ADD_BLOCK = 1024  # elements of a weight gradient that one program adds up


def prepare_weight(s: Any, weight: Tensor) -> Tensor:
    """(K, C, R, S) in the order of memory that the schedule names."""
    order = (2, 3, 1, 0) if s.weight == "rsck" else (0, 2, 3, 1)
    return weight.permute(order).contiguous()


def launches(p: Problem, s: Any, precision: str, parts: int = 1) -> list[Launch]:
    """What runs for a problem, in order."""
    return {"forward": _forward, "backward_data": _backward_data,
            "backward_weight": _backward_weight}[p.direction](p, s, precision, parts)


def _shape(p: Problem) -> dict[str, int]:
    return {"H": p.h, "W": p.w, "C": p.c, "K": p.k, "R": p.r, "S": p.s, "OH": p.conv_h,
            "OW": p.conv_w, "STRIDE_H": p.stride[0], "STRIDE_W": p.stride[1],
            "TOP": p.padding[0], "LEFT": p.padding[2], "DIL_H": p.dilation[0],
            "DIL_W": p.dilation[1], "GROUPS": p.groups}


def _tiling(s: Any, precision: str) -> dict[str, Any]:
    return {"FLAT": s.flat, "PRECISION": precision, "BM": s.bm, "BN": s.bn, "BK": s.bk,
            "SWIZZLE": s.swizzle}


def _weight(p: Problem, s: Any, depth: str) -> dict[str, int]:
    """How far apart the weights of groups, taps, terms of a sum and columns of a tile are.

    `depth` is what a sum runs over below a tap: c forward, k backward.
    """
    whole = p.group_c * p.r * p.s
    apart = ({"group": p.group_k * whole, "tap": p.group_c, "c": 1, "k": whole}
             if s.weight == "krsc" else
             {"group": p.group_k, "tap": p.group_c * p.k, "c": p.k, "k": 1})
    return {"W_GROUP": apart["group"], "W_TAP": apart["tap"], "W_DEPTH": apart[depth],
            "W_COLUMN": apart["k" if depth == "c" else "c"]}


def _tiles(rows: int, columns: int, s: Any) -> int:
    return math.ceil(rows / s.bm) * math.ceil(columns / s.bn)


def _forward(p: Problem, s: Any, precision: str, parts: int) -> list[Launch]:
    constants = {**_shape(p), **_tiling(s, precision), **_weight(p, s, "c"),
                 **epilogue.constants(p.epilogue)}
    rows = p.n * p.out_h * p.out_w * p.epilogue.pool ** 2
    roles = {"x": "x", "w": "weight", **epilogue.roles(p.epilogue), "y": "y"}
    return [Launch(implicit_gemm.forward, (_tiles(rows, p.group_k, s), p.groups),
                   {name: (role, p.dtype) for name, role in roles.items()}, {"N": p.n}, constants,
                   s.warps, s.stages)]


def _backward_data(p: Problem, s: Any, precision: str, parts: int) -> list[Launch]:
    (high, wide), (down, across) = p.stride, p.dilation
    constants = {**_shape(p), **_tiling(s, precision), **_weight(p, s, "k"),
                 "RSTEP": high // math.gcd(high, down), "SSTEP": wide // math.gcd(wide, across)}
    rows = p.n * math.ceil(p.h / high) * math.ceil(p.w / wide)
    return [Launch(implicit_gemm.backward_data,
                   (_tiles(rows, p.group_c, s), p.groups * high * wide),
                   {name: (role, p.dtype) for name, role in
                    (("dy", "x"), ("w", "weight"), ("dx", "y"))}, {"N": p.n}, constants,
                   s.warps, s.stages)]


def _backward_weight(p: Problem, s: Any, precision: str, parts: int) -> list[Launch]:
    atomic = s.split == "atomic" and parts > 1
    columns = p.r * p.s * (p.group_c if s.flat else math.ceil(p.group_c / s.bn) * s.bn)
    steps = math.ceil(math.ceil(p.n * p.conv_h * p.conv_w / s.bk) / parts)
    whole = parts == 1
    written = ("y", p.dtype) if whole else ("partial", "f32")
    first = Launch(implicit_gemm.backward_weight,
                   (_tiles(p.group_k, columns, s), p.groups * parts),
                   {"x": ("x", p.dtype), "dy": ("weight", p.dtype), "dw": written},
                   {"N": p.n, "steps": steps},
                   {**_shape(p), **_tiling(s, precision), "ATOMIC": atomic}, s.warps, s.stages)
    if whole or atomic:
        return [first]
    size = p.k * p.group_c * p.r * p.s
    return [first, Launch(implicit_gemm.add_parts, (math.ceil(size / ADD_BLOCK),),
                          {"partial": ("partial", "f32"), "dw": ("y", p.dtype)},
                          {"parts": parts}, {"SIZE": size, "BLOCK": ADD_BLOCK})]


def runner(p: Problem, s: Any, precision: str, parts: int = 1) -> Callable[..., Tensor]:
    """run(x, prepared weight, bias, residual); backward, dy stands for x or for the weight."""
    if p.direction == "backward_weight":
        return _weight_gradient(p, s, precision, parts)
    planned = launches(p, s, precision)
    shape = ((p.n, p.out_h, p.out_w, p.k) if p.direction == "forward"
             else (p.n, p.h, p.w, p.c))

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None,
            residual: Tensor | None = None) -> Tensor:
        y = launch.empty(shape, dtype=x.dtype, device=x.device)
        tensors = {"x": x, "weight": weight, "bias": bias, "residual": residual, "y": y}
        for step in planned:
            step.start(tensors)
        return y.permute(0, 3, 1, 2)

    return run


def _weight_gradient(p: Problem, s: Any, precision: str, parts: int) -> Callable[..., Tensor]:
    shape = (p.k, p.r, p.s, p.group_c)
    ways = {split: launches(p, s.with_(split=split), precision, parts)
            for split in ("parts", "atomic")}

    def run(x: Tensor, dy: Tensor, *unused: Any) -> Tensor:
        # the order of atomic additions differs from run to run
        atomic = s.split == "atomic" and not torch.are_deterministic_algorithms_enabled()
        add_up = atomic and parts > 1
        y = launch.empty(() if add_up else shape, dtype=x.dtype, device=x.device)
        make = torch.zeros if add_up else launch.empty
        partial = make((1 if atomic else parts, *shape), device=x.device) if parts > 1 else None
        for step in ways["atomic" if atomic else "parts"]:
            step.start({"x": x, "weight": dy, "y": y, "partial": partial})
        if add_up and partial is not None:
            y = partial[0].to(x.dtype)
        return y.permute(0, 3, 1, 2)

    return run

"""Norms by statistics of what they are given, on tensors, with the arguments of torch's functions.

Each returns None where torch is to compute: other types, devices or layouts, gradients, arguments
that torch refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from ..core.activations import SLOPED, parsed
from ..core.problem import Epilogue
from ..core.schedule import Schedule
from ..core.target import Target
from ..kernels.cpu.between import groups, norms
from ..kernels.cpu.emit.launch import launcher
from .images import as_images, channels_last, pitch_of
from .rows import Run, Runs, Sizes, is_vector, rows_of
from .sweeps import ANY
from .types import DTYPES, HALVES
from .weights import as_floats

LAYER, GROUP = 1 << 17, 1 << 16  # floats below which one thread is done before another began


def layer_norm(x: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None,
               bias: Tensor | None = None, eps: float = 1e-5) -> Tensor | None:
    """torch.nn.functional.layer_norm over the last axis."""
    size = normalized_shape if isinstance(normalized_shape, int) else (
        normalized_shape[0] if len(normalized_shape) == 1 else 0)
    given = _vectors(x, size, weight, bias)
    if x.dim() == 0 or size != x.shape[-1] or given is None:
        return None
    run = _layer_runs(x, weight is not None, bias is not None, eps)
    return None if run is None else run(x, *given)


def _vectors(x: Tensor, size: int, *given: Tensor | None) -> list[Tensor | None] | None:
    """Weight and bias as kernels read them, in float32; None where they are torch's."""
    found = [v if v is None or v.dtype != x.dtype or v.dtype not in HALVES else as_floats(v)
             for v in given]
    return found if all(is_vector(v, size) for v in found) else None


def _layer(shape: Sizes, strides: Sizes, threads: int, weight: bool, bias: bool,
           eps: float, dtype: str) -> Run | None:
    rows = rows_of(shape, strides, threads)
    if rows is None:
        return None
    words = norms.sizes(rows.rows, rows.columns, rows.pitch, rows.columns, eps)
    launch = launcher(norms.make, ANY.with_(dtype=dtype), Schedule(), Target.host().row,
                      int(weight), int(bias), sizes=words)
    return Run(launch, threads if rows.rows * rows.columns >= LAYER else 1, rows.made,
               dtype=DTYPES[dtype])


_layer_runs = Runs(_layer, halves=True)


def group_norm(x: Tensor, num_groups: int, weight: Tensor | None = None,
               bias: Tensor | None = None, eps: float = 1e-5,
               activation: str | None = None) -> Tensor | None:
    """torch.nn.functional.group_norm of channels-last images or volumes, or slices of their
    channels.

    An activation may follow, any step of core/activations.py without slopes.
    """
    given = _vectors(x, x.shape[1], weight, bias) if x.dim() in (4, 5) else None
    if given is None:
        return None
    run = _group_runs(x, num_groups, weight is not None, bias is not None, eps, activation)
    return None if run is None else run(x, *given)


def instance_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
                  eps: float = 1e-5, activation: str | None = None) -> Tensor | None:
    """torch.nn.functional.instance_norm without running statistics, as `group_norm`."""
    if x.dim() not in (4, 5) or prod(x.shape[2:]) == 1:  # which torch refuses
        return None
    return group_norm(x, x.shape[1], weight, bias, eps, activation)


def _group(shape: Sizes, strides: Sizes, threads: int, many: int, weight: bool, bias: bool,
           eps: float, activation: str | None, dtype: str) -> Run | None:
    images = as_images(shape, strides)
    pitch = pitch_of(*images)
    if not pitch or many < 1 or shape[1] % many or prod(shape) // many == 1:
        return None
    if activation is not None and parsed(activation)[0].name in SLOPED:
        return None
    n, c, h, w = images[0]
    row = Target.host().row
    words, scratch = groups.sizes(groups.Shape(n, h * w, c, pitch, many), eps, row.lanes)
    code = ANY.with_(epilogue=Epilogue(activation=activation), dtype=dtype)
    launch = launcher(groups.make, code, Schedule(), row, int(weight), int(bias), sizes=words)
    return Run(launch, threads if prod(shape) >= GROUP else 1, channels_last(shape), scratch,
               DTYPES[dtype])


_group_runs = Runs(_group, halves=True)

"""Operations that run between convolutions, a row each: what they are in torch, and who runs them.

A new one is a row here and a function in runtime/ that takes torch's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.nn import functional as F

from ..conv.excitation import averaged
from ..conv.max_pool import pooled
from ..kernels.activations import activated
from ..runtime import norms, pools, resampling, softmax, totals, volumes
from ..runtime.concatenation import concatenated
from ..runtime.shuffling import channel_shuffle
from ..runtime.turning import joined_planes
from .native import Value, filled

REQUIRED: Any = object()


@dataclass(frozen=True)
class Row:
    """An operation of one image.

    Attributes:
        name: What it is called in tables.
        run: Takes the image and the arguments by their names; None says that it is torch's.
        modules: Classes of `torch.nn` whose attributes are the arguments.
        functions: Functions of torch, and names of methods.
        arguments: In torch's order, with their defaults.
        fixed: Arguments that only torch knows, with the value that they must have.
        tensors: Arguments that are tensors of a module, which are looked up in every call.
        turns: Whether, with these arguments, the result may lie otherwise than torch's would.
        activates: Whether it takes the step of an activation that follows, as `activation`.
        learn: As `run`, where a gradient is asked for.
        slices: Whether `run` reads slices of channels, and writes to one that is given as `out`.
        halves: Whether `run` takes images of 16 bits.
        centres: Whether it subtracts a mean of the image, and so may leave little but roundings.
    """

    name: str
    run: Callable[..., Tensor | None]
    modules: tuple[type, ...] = ()
    functions: tuple[Any, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()
    turns: Callable[[dict[str, Any]], bool] = lambda given: False
    activates: bool = False
    learn: Callable[..., Tensor | None] | None = None
    slices: bool = False
    halves: bool = False
    centres: bool = False

    def of_module(self, module: Any) -> dict[str, Any] | None:
        given = {name: getattr(module, name, default) for name, default in self.arguments.items()
                 if name not in self.tensors}
        return self._checked(given)

    def of_call(self, rest: Sequence[Any], options: dict[str, Any]) -> dict[str, Any] | None:
        """Of a call; `rest` are its arguments after the image."""
        given = {**dict(zip(self.arguments, rest)), **options}
        if len(rest) > len(self.arguments) or not set(given) <= set(self.arguments):
            return None
        return self._checked({**self.arguments, **given})

    def _checked(self, given: dict[str, Any]) -> dict[str, Any] | None:
        if any(given[name] is not value for name, value in self.fixed.items()):
            return None
        kept = {name: value for name, value in given.items() if name not in self.fixed}
        return None if any(value is REQUIRED for value in kept.values()) else kept

    def __reduce__(self) -> tuple[Any, ...]:
        return _row_at, (ROWS.index(self),)


def _row_at(place: int) -> Row:
    return ROWS[place]


def _over(kind: str, x: Tensor, dim: Any, keepdim: Any, p: Any = 2) -> Tensor | None:
    """Over axes that are numbers; a length is that of torch's default, the Euclidean one."""
    axes = dim if isinstance(dim, tuple | list) else (dim,)
    plain = axes and all(type(axis) is int for axis in axes) and isinstance(keepdim, bool)
    return totals.total(kind, x, axes, keepdim) if plain and p in (2, "fro") else None


def _vector_norm(x: Tensor, dim: Any, keepdim: Any, **order: Any) -> Tensor | None:
    return _over("norm", x, dim, keepdim, order["ord"])


def _upsample(x: Tensor, size: Any, scale_factor: Any, mode: str,
              align_corners: bool | None, out: Tensor | None = None) -> Tensor | None:
    if x.dim() == 5:
        return volumes.upsample(x, size, scale_factor, mode, align_corners) if out is None else None
    return resampling.upsample(x, size, scale_factor, mode, align_corners, out=out)


def _softmax(x: Tensor, dim: Any) -> Tensor | None:
    return softmax.softmax(x, dim) if isinstance(dim, int) else None


def _instance_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, momentum: float,
                   eps: float, activation: str | None = None) -> Tensor | None:
    return norms.instance_norm(x, weight, bias, eps, activation)


def _learn_instance_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, momentum: float,
                         eps: float, activation: str | None = None) -> Tensor | None:
    """Of one image as a group norm: torch's instance norm misreads channels-last gradients then."""
    if x.dim() not in (4, 5) or len(x) != 1:
        return None
    y = F.group_norm(x, x.shape[1], weight, bias, eps)
    return activated(y, activation)


def _learn_pool(x: Tensor, output_size: Any) -> Tensor | None:
    return averaged(x) if output_size in (1, (1, 1), [1, 1]) else None


def _learn_mean(x: Tensor, dim: Any, keepdim: Any) -> Tensor | None:
    plain = keepdim is True and type(dim) in (tuple, list) and sorted(dim) in ([2, 3], [-2, -1])
    return averaged(x) if plain else None


AFFINE = ("weight", "bias")
ROWS = (
    Row("max pool", pools.max_pool2d, (nn.MaxPool2d,), (F.max_pool2d, torch.max_pool2d),
        {"kernel_size": REQUIRED, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False,
         "return_indices": False}, {"return_indices": False}, learn=pooled, slices=True,
        halves=True),
    Row("average pool", pools.avg_pool2d, (nn.AvgPool2d,), (F.avg_pool2d,),
        {"kernel_size": REQUIRED, "stride": None, "padding": 0, "ceil_mode": False,
         "count_include_pad": True, "divisor_override": None}, slices=True, halves=True),
    Row("average pool", pools.adaptive_avg_pool2d, (nn.AdaptiveAvgPool2d,),
        (F.adaptive_avg_pool2d,), {"output_size": REQUIRED}, learn=_learn_pool,
        slices=True, halves=True),
    Row("max pool", pools.adaptive_max_pool2d, (nn.AdaptiveMaxPool2d,), (F.adaptive_max_pool2d,),
        {"output_size": REQUIRED, "return_indices": False}, {"return_indices": False},
        halves=True),
    Row("max pool", volumes.max_pool3d, (nn.MaxPool3d,), (F.max_pool3d, torch.max_pool3d),
        {"kernel_size": REQUIRED, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False,
         "return_indices": False}, {"return_indices": False}),
    Row("average pool", volumes.avg_pool3d, (nn.AvgPool3d,), (F.avg_pool3d,),
        {"kernel_size": REQUIRED, "stride": None, "padding": 0, "ceil_mode": False,
         "count_include_pad": True, "divisor_override": None}),
    Row("average pool", volumes.adaptive_avg_pool3d, (nn.AdaptiveAvgPool3d,),
        (F.adaptive_avg_pool3d,), {"output_size": REQUIRED}),
    Row("max pool", volumes.adaptive_max_pool3d, (nn.AdaptiveMaxPool3d,), (F.adaptive_max_pool3d,),
        {"output_size": REQUIRED, "return_indices": False}, {"return_indices": False}),
    Row("mean", partial(_over, "mean"), (), (torch.mean, "mean"),
        {"dim": REQUIRED, "keepdim": False, "dtype": None}, {"dtype": None}, learn=_learn_mean),
    Row("sum", partial(_over, "sum"), (), (torch.sum, "sum"),
        {"dim": REQUIRED, "keepdim": False, "dtype": None}, {"dtype": None},
        turns=lambda given: True),
    Row("amax", partial(_over, "amax"), (), (torch.amax, "amax"),
        {"dim": REQUIRED, "keepdim": False}),
    Row("norm", partial(_over, "norm"), (), (torch.norm, "norm"),
        {"p": "fro", "dim": REQUIRED, "keepdim": False, "out": None, "dtype": None},
        {"out": None, "dtype": None}),
    Row("norm", _vector_norm, (), (torch.linalg.vector_norm,),
        {"ord": 2, "dim": REQUIRED, "keepdim": False, "dtype": None}, {"dtype": None}),
    Row("upsample", _upsample, (nn.Upsample,), (F.interpolate,),
        {"size": None, "scale_factor": None, "mode": "nearest", "align_corners": None,
         "recompute_scale_factor": None, "antialias": False},
        {"recompute_scale_factor": None, "antialias": False}, slices=True, halves=True),
    Row("layer norm", norms.layer_norm, (nn.LayerNorm,), (F.layer_norm,),
        {"normalized_shape": REQUIRED, "weight": None, "bias": None, "eps": 1e-5}, tensors=AFFINE,
        halves=True, centres=True),
    Row("group norm", norms.group_norm, (nn.GroupNorm,), (F.group_norm,),
        {"num_groups": REQUIRED, "weight": None, "bias": None, "eps": 1e-5}, tensors=AFFINE,
        activates=True, halves=True, centres=True),
    Row("instance norm", _instance_norm, (nn.InstanceNorm2d, nn.InstanceNorm3d), (F.instance_norm,),
        {"running_mean": None, "running_var": None, "weight": None, "bias": None,
         "use_input_stats": True, "momentum": 0.1, "eps": 1e-5},
        {"running_mean": None, "running_var": None, "use_input_stats": True}, AFFINE,
        lambda given: True, activates=True, learn=_learn_instance_norm, halves=True,
        centres=True),
    Row("softmax", _softmax, (nn.Softmax,), (torch.softmax, "softmax"),
        {"dim": REQUIRED, "dtype": None}, {"dtype": None}, turns=lambda given: given["dim"] != -1),
    Row("softmax", _softmax, (), (F.softmax,), {"dim": REQUIRED, "_stacklevel": 3, "dtype": None},
        {"_stacklevel": 3, "dtype": None}, turns=lambda given: given["dim"] != -1),
    Row("softmax", _softmax, (nn.Softmax2d,), (), {"dim": -3}, turns=lambda given: True),
    Row("channel shuffle", channel_shuffle, (nn.ChannelShuffle,),
        (F.channel_shuffle, torch.channel_shuffle), {"groups": REQUIRED},
        turns=lambda given: True),
)
MODULES = {kind: row for row in ROWS for kind in row.modules}
FUNCTIONS = {function: row for row in ROWS for function in row.functions}
CATS = (torch.cat, torch.concat)


@dataclass(frozen=True)
class Asked:
    """A node that is an operation: its operands in the graph, what runs them, and modules whose
    tensors that reads."""

    name: str
    operands: tuple[fx.Node, ...]
    run: Callable[..., Tensor | None]
    parts: tuple[Any, ...] = ()
    turns: bool = False
    learn: Callable[..., Tensor | None] | None = None


class Run:
    """run(x, *others): an operation with its arguments; `others` are those that are values.

    `learns`: it is the row's function for gradients.
    """

    _learns = False  # of models that were saved before there was any

    def __init__(self, row: Row, arguments: dict[str, Any], module: Any = None,
                 learns: bool = False) -> None:
        self._row, self._arguments, self._module, self._learns = row, arguments, module, learns

    @property
    def slices(self) -> bool:
        return self._row.slices

    @property
    def halves(self) -> bool:
        return self._row.halves

    @property
    def centres(self) -> bool:
        return self._row.centres

    def __call__(self, x: Any, *others: Any, out: Tensor | None = None) -> Tensor | None:
        if not isinstance(x, Tensor):
            return None
        if any(isinstance(value, Tensor) for value in self._plain(others)):
            return None  # a size that is a tensor: its value may be another in the next call
        given = filled(self._arguments, others)
        if self._module is not None:
            given.update({name: getattr(self._module, name) for name in self._row.tensors})
        if out is not None:
            given = {**given, "out": out}
        run = self._row.learn if self._learns else self._row.run
        return None if run is None else run(x, **given)

    def _plain(self, others: Sequence[Any]) -> list[Any]:
        """Those of the values that are no tensors of the operation."""
        used = {self._arguments[name] for name in self._row.tensors
                if isinstance(self._arguments.get(name), Value)}
        return [value for i, value in enumerate(others) if i not in used]


class Cat:
    """cat(*parts) along an axis, if that is the channels', or the last of (N, C, L)."""

    slices = halves = True  # it reads and writes them

    def __init__(self, axis: int) -> None:
        self._axis = axis

    @property
    def joins_channels(self) -> bool:
        """Of images."""
        return self._axis in (1, -3)

    def __call__(self, *parts: Tensor, out: Tensor | None = None) -> Tensor | None:
        if all(x.dim() in (4, 5) and self._axis % x.dim() == 1 for x in parts):
            return concatenated(parts, out)
        if out is None and all(x.dim() == 3 and self._axis in (-1, 2) for x in parts):
            return joined_planes(parts)
        return None


def asked(node: fx.Node, module: Any, activation: str | None = None) -> Asked | None:
    """The operation that a node is, if it is one of ours; with an activation behind it."""
    if node.op == "call_function" and node.target in CATS:
        return _cat(node)
    row = row_of(node, module)
    if row is None or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if module is not None:
        alone = len(node.args) == 1 and not node.kwargs
        given = row.of_module(module) if alone else None
    else:
        given = row.of_call(node.args[1:], node.kwargs)
    if given is None:
        return None
    more: dict[fx.Node, Value] = {}
    numbered = map_arg(given, lambda value: more.setdefault(value, Value(len(more))))
    name = row.name
    if activation is not None:
        name, numbered = f"{name} {activation}", {**numbered, "activation": activation}
    return Asked(name, (node.args[0], *more), Run(row, numbered, module),
                 (module,) if module is not None and row.tensors else (), row.turns(given),
                 Run(row, numbered, module, learns=True) if row.learn else None)


def row_of(node: fx.Node, module: Any) -> Row | None:
    """The row of what a node calls, if there is one; `module` is the one that it calls."""
    if module is not None:
        return MODULES.get(type(module))
    if node.op not in ("call_function", "call_method"):
        return None
    try:
        return FUNCTIONS.get(node.target)
    except TypeError:  # a target that cannot be a key
        return None


def _cat(node: fx.Node) -> Asked | None:
    given = {**dict(zip(("tensors", "dim"), node.args)), **node.kwargs}
    parts = given.get("tensors")
    if given.get("dim") not in (1, -3, -4, 2, -1) or len(given) != 2:
        return None
    nodes = isinstance(parts, tuple | list) and all(isinstance(part, fx.Node) for part in parts)
    if not nodes or not parts:
        return None
    return Asked("cat", tuple(parts), Cat(given["dim"]))

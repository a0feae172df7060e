"""The classes of a graph's values, where PyTorch's own declarations tell them."""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from .effects import TUPLES, name_of
from .shadows import FOREIGN
from .shadows import MODULES as SHADOWED

NUMBERS = {"dim", "numel", "ndimension", "nelement"}
TENSORS = {"T", "mT", "H", "mH", "real", "imag", "data"}  # attributes that are tensors
CASTS = {"float", "double", "half", "bfloat16", "int", "long", "short", "bool", "cpu", "cuda"}
SEVERAL = "return_indices"  # an option of modules that give one tensor without it
MODULES = tuple(kind for kind in SHADOWED if kind is not nn.Identity) + (
    nn.SELU, nn.CELU, nn.GLU, nn.LogSigmoid, nn.Softsign, nn.Softmin, nn.Softmax2d, nn.LogSoftmax,
    nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.Threshold, nn.RReLU, nn.RMSNorm,
    nn.LocalResponseNorm, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool3d, nn.LPPool1d, nn.LPPool2d,
    nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d, nn.Unflatten, nn.Fold, nn.Unfold,
    nn.ChannelShuffle, nn.modules.dropout._DropoutNd, nn.modules.padding._ConstantPadNd,
    nn.modules.padding._ReflectionPadNd, nn.modules.padding._ReplicationPadNd,
    nn.modules.padding._CircularPadNd, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def kind_of(node: fx.Node) -> type | None:
    """The class of a node's value: Tensor, int, torch.Size, tuple, or None for unknown."""
    if "kind" not in node.meta:
        node.meta["kind"] = _kind(node)
    return node.meta["kind"]


def kind_of_result(module: nn.Module | None, args: Any) -> type | None:
    """Of what a module of torch gives."""
    if isinstance(module, nn.Identity):
        return kind_of(args[0]) if args and isinstance(args[0], fx.Node) else None
    return Tensor if isinstance(module, MODULES) and not getattr(module, SEVERAL, False) else None


def _kind(node: fx.Node) -> type | None:
    if node.op in ("placeholder", "get_attr"):
        return Tensor
    if node.op == "call_module":
        return node.meta.get("gives")
    if name_of(node) == "exactly":
        return tuple
    if node.target is operator.getitem:
        return _kind_of_item(node)
    kinds = [kind_of(arg) for arg in node.args if isinstance(arg, fx.Node)]
    if getattr(node.target, "__module__", "") == "_operator":
        return Tensor if Tensor in kinds else None
    if node.op == "call_function" and node.target is not getattr:
        return _kind_of_function(node)
    if kinds[:1] != [Tensor]:  # whatever its attributes are
        return None
    return _kind_of_attribute(node) if node.target is getattr else _kind_of_method(node)


def _kind_of_attribute(node: fx.Node) -> type | None:
    name = name_of(node)
    return Tensor if name in TENSORS else {"shape": torch.Size, "ndim": int}.get(name)


def _kind_of_method(node: fx.Node) -> type | None:
    name, options = name_of(node), len(node.args) + len(node.kwargs) - 1
    if name in NUMBERS:
        return int
    if name == "size":
        return int if options else torch.Size
    if name in CASTS or (name == "type" and options):
        return Tensor
    return _kind_of_function(node)


def _kind_of_function(node: fx.Node) -> type | None:
    name, function = name_of(node), node.target
    if isinstance(function, FOREIGN):
        return Tensor if _declares_one(_schemas_of(function)) else None
    if name in TUPLES:
        return tuple
    if name == "where":  # of a condition alone it gives several
        return Tensor if len(node.args) + len(node.kwargs) > 1 else None
    said = getattr(function, "__annotations__", {}).get("return")
    if said is not None:
        return Tensor if said in (Tensor, "Tensor") else None
    return Tensor if _gives_one(name) else None


def _schemas_of(function: Any) -> list[Any]:
    """Of an operator, by each way to call it."""
    if isinstance(function, torch._ops.OpOverload):
        return [function._schema]
    names = function.overloads() if isinstance(function, torch._ops.OpOverloadPacket) else []
    return [getattr(function, name)._schema for name in names]


@lru_cache(maxsize=4096)
def _gives_one(name: str) -> bool:
    """Whether PyTorch's operator of this name gives one tensor, however it is called."""
    return _declares_one(torch._C._jit_get_schemas_for_operator(f"aten::{name}"))


def _declares_one(schemas: list[Any]) -> bool:
    """Whether all ways that take a tensor give one. Others are TorchScript's, for numbers."""
    taking = [[schema for schema in schemas
               if any(str(argument.type) == kind for argument in schema.arguments)]
              for kind in ("Tensor", "List[Tensor]")]
    return any(taking) and all(
        [str(result.type) for result in schema.returns] == ["Tensor"]
        for schema in taking[0] or taking[1])


def _kind_of_item(node: fx.Node) -> type | None:
    source = node.args[0]
    kind = kind_of(source) if isinstance(source, fx.Node) else None
    if kind is Tensor:
        return Tensor
    is_slice = isinstance(node.args[1], slice)
    if kind is torch.Size:
        return torch.Size if is_slice else int
    if kind is not tuple:
        return None
    return tuple if is_slice else _kind_of_part(source)


def _kind_of_part(source: Any) -> type | None:
    """Of each item of a tuple."""
    if source.target is operator.getitem:  # a slice of one
        return _kind_of_part(source.args[0])
    if name_of(source) != "exactly":
        return Tensor  # what cuts a tensor into several
    inner = source.args[0]
    kind = kind_of(inner) if isinstance(inner, fx.Node) else None
    return {torch.Size: int, Tensor: Tensor, tuple: Tensor}.get(kind)  # type: ignore[arg-type]

"""The classes of a graph's values, where PyTorch's own declarations tell them."""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from .effects import TUPLES, name_of
from .shadows import FOREIGN
from .shadows import MODULES as SHADOWED

NUMBERS = {"dim", "numel", "ndimension", "nelement"}
TENSORS = {"T", "mT", "H", "mH", "real", "imag", "data"}  # attributes that are tensors
CASTS = {"float", "double", "half", "bfloat16", "int", "long", "short", "byte", "char", "bool",
         "cfloat", "cdouble", "cpu", "cuda", "new_tensor"}
SEVERAL = "return_indices"  # an option of modules that give one tensor without it
# modules that give one tensor, unless they have that option
MODULES = tuple(kind for kind in SHADOWED if kind is not nn.Identity) + (
    nn.SELU, nn.CELU, nn.GLU, nn.LogSigmoid, nn.Softsign, nn.Softmin, nn.Softmax2d, nn.LogSoftmax,
    nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.Threshold, nn.RReLU, nn.RMSNorm,
    nn.LocalResponseNorm, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool3d, nn.LPPool1d, nn.LPPool2d,
    nn.LPPool3d, nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d, nn.Unflatten, nn.Fold, nn.Unfold,
    nn.ChannelShuffle, nn.modules.dropout._DropoutNd, nn.modules.padding._ConstantPadNd,
    nn.modules.padding._ReflectionPadNd, nn.modules.padding._ReplicationPadNd,
    nn.modules.padding._CircularPadNd, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
    nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer, nn.GRUCell, nn.RNNCell,
    nn.modules.loss._Loss)
LEADING = (nn.RNNBase, nn.LSTMCell, nn.MultiheadAttention)  # that give a tensor and something else
# functions that PyTorch's operators of their names do not tell
ONE = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d, F.fractional_max_pool2d,
       F.fractional_max_pool3d, F.softsign, F.tanhshrink, torch.tensor, torch.as_tensor)
TRUTHS = ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor", "not_")
PLURAL = {"where": 1, "nonzero": 2}  # give several with one argument, or with two


def kind_of(node: fx.Node) -> type | None:
    """The class of a node's value: Tensor, int, torch.Size, tuple, or None for unknown."""
    if "kind" not in node.meta:
        node.meta["kind"] = _kind(node)
    return node.meta["kind"]


def note_result(node: fx.Node, module: nn.Module | None) -> None:
    """What a call of a module gives, if it is one of torch that does what its class does."""
    node.meta["is_unknown"] = module is None
    node.meta["may_be_none"] = module is None or isinstance(module, nn.MultiheadAttention)
    node.meta["leads"] = isinstance(module, LEADING)
    if isinstance(module, nn.Identity):
        first = node.args[0] if node.args else None
        node.meta["kind"] = kind_of(first) if isinstance(first, fx.Node) else None
    else:
        gives_one = isinstance(module, MODULES) and not module.__dict__.get(SEVERAL, False)
        node.meta["kind"] = Tensor if gives_one else None


def may_be_none(node: fx.Node) -> bool:
    """Whether it is what a part that is called as it is gives, or a piece of that."""
    while node.op != "call_module":
        is_piece = node.target in (operator.getitem, getattr) or name_of(node) == "exactly"
        if not is_piece or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    return bool(node.meta.get("may_be_none"))


def may_be_truth(node: fx.Node) -> bool:
    """Whether it may be True or False, or a type or a device, and not a tensor or a number."""
    if kind_of(node) is not None:
        return False
    while (node.target is operator.getitem or name_of(node) == "exactly") and isinstance(
            node.args[0], fx.Node):
        node = node.args[0]
    home = getattr(node.target, "__module__", "")
    if node.op == "call_module":
        return bool(node.meta["is_unknown"])
    if home in ("math", "builtins", "_operator"):
        return name_of(node) in TRUTHS
    said = getattr(node.target, "__annotations__", {}).get("return")
    if said is not None:
        return said in (bool, "bool")
    results = _results(_schemas_of(node.target)) if isinstance(
        node.target, FOREIGN) else _gives(name_of(node))
    return not results or "other" in results


def _kind(node: fx.Node) -> type | None:
    if node.op in ("placeholder", "get_attr"):
        return Tensor
    if node.op == "call_module":
        return None
    if name_of(node) == "exactly":
        return tuple
    if node.target is operator.getitem:
        return _kind_of_item(node.args[0], node.args[1])
    kinds = [kind_of(arg) for arg in node.args if isinstance(arg, fx.Node)]
    if getattr(node.target, "__module__", "") == "_operator":
        plain = all(arg is not None and not isinstance(arg, str) for arg in node.args)
        return Tensor if Tensor in kinds and plain else None
    if node.op == "call_function" and node.target is not getattr:
        return _kind_of_function(node)
    if kinds[:1] != [Tensor]:  # whatever its attributes are
        return None
    return _kind_of_attribute(node) if node.target is getattr else _kind_of_method(node)


def _kind_of_attribute(node: fx.Node) -> type | None:
    name = name_of(node)
    return Tensor if name in TENSORS else {"shape": torch.Size, "ndim": int}.get(name)


def _kind_of_method(node: fx.Node) -> type | None:
    name, options = name_of(node), (*node.args[1:], *node.kwargs.values())
    is_given = any(option is not None for option in options)
    if name in NUMBERS:
        return int
    if name == "size":
        return int if is_given else torch.Size
    if name in CASTS or (name == "type" and is_given):
        return Tensor
    return _kind_of_function(node)


def _kind_of_function(node: fx.Node) -> type | None:
    name, function = name_of(node), node.target
    if isinstance(function, FOREIGN):
        return Tensor if _results(_schemas_of(function)) == {"one"} else None
    if name in TUPLES:
        return tuple
    if name in PLURAL:
        return None if PLURAL[name] == len(node.args) + len(node.kwargs) else Tensor
    if any(function is one for one in ONE):
        return None if node.kwargs.get(SEVERAL) else Tensor
    said = getattr(function, "__annotations__", {}).get("return")
    if said is not None:
        return Tensor if said in (Tensor, "Tensor") else None
    return Tensor if _gives(name) == {"one"} else None


def _schemas_of(function: Any) -> list[Any]:
    """Of an operator, by each way to call it."""
    if isinstance(function, torch._ops.OpOverload):
        return [function._schema]
    names = function.overloads() if isinstance(function, torch._ops.OpOverloadPacket) else []
    return [getattr(function, name)._schema for name in names]


@lru_cache(maxsize=4096)
def _gives(name: str) -> set[str]:
    """What PyTorch's operator of this name gives."""
    return _results(torch._C._jit_get_schemas_for_operator(f"aten::{name}"))


def _results(schemas: list[Any]) -> set[str]:
    """One tensor, several, or something else, by all ways that take tensors.

    Others are TorchScript's, for numbers, and so are those that ask something of lists.
    """
    found = set()
    for schema in schemas:
        taken = {str(argument.type) for argument in schema.arguments}
        given = [str(result.type) for result in schema.returns]
        if "Tensor" in taken or ("List[Tensor]" in taken and {"Tensor", "List[Tensor]"} & {*given}):
            are_tensors = bool(given) and {*given} <= {"Tensor", "List[Tensor]"}
            found.add("one" if given == ["Tensor"] else "several" if are_tensors else "other")
    return found


def _kind_of_item(source: Any, index: Any) -> type | None:
    kind = kind_of(source) if isinstance(source, fx.Node) else None
    if kind is Tensor:
        return Tensor
    if isinstance(index, slice):
        return kind if kind in (torch.Size, tuple) else None
    if kind is torch.Size:
        return int
    return _kind_of_part(source, index) if isinstance(source, fx.Node) else None


def _kind_of_part(source: fx.Node, index: Any) -> type | None:
    """Of an item of several."""
    if source.op == "call_module":
        return Tensor if source.meta.get("leads") and index == 0 else None
    inner = source.args[0] if source.args else None
    if source.target is operator.getitem:  # a slice of several
        return _kind_of_part(inner, None) if isinstance(inner, fx.Node) else None
    if name_of(source) == "exactly":
        return _kind_of_item(inner, index)
    if isinstance(source.target, FOREIGN):
        results = _results(_schemas_of(source.target))
    else:
        results = {"several"} if kind_of(source) is tuple else _gives(name_of(source))
    is_whole = isinstance(index, int) or index is None
    return Tensor if is_whole and results and results <= {"one", "several"} else None

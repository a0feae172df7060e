"""optimize(model): find conv (+ bn) (+ add) (+ relu) (+ pool), and run each in one call."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ..core.errors import TilewiseError
from .nn import Block, Conv2d
from .patterns import Chain, module_of
from .tuning import tune

BLOCKS = "tilewise_blocks"


def optimize(model: nn.Module, example: Any = None, *, effort: str = "estimate",
             max_error: float | None = None) -> nn.Module:
    """The same model, its convolutions and what follows them run by tilewise.

    Parameters and buffers are shared with the original, and the state_dict is the same. With an
    `example` (a tensor or a tuple of arguments) everything is planned and compiled at once;
    effort="measure" then also times the candidates of every layer.

    >>> fast = optimize(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval())
    >>> fast(torch.randn(1, 3, 16, 16)).shape
    torch.Size([1, 8, 14, 14])
    """
    if effort != "estimate" and example is None:
        raise TilewiseError(f"effort is {effort!r}, needs an example to measure with: "
                            "optimize(model, example, effort=...)")
    twin = _sharing_copy(model)
    graph = _trace(twin)
    if graph is None:
        result = _swap(twin, max_error)
    else:
        result = _rewritten(twin, graph, max_error)
    result.train(model.training)
    if example is not None:
        tune(result, example, effort, max_error)
    return result


def _sharing_copy(model: nn.Module) -> nn.Module:
    """New modules around the same tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


# models that cannot be traced: module by module


def _swap(model: nn.Module, max_error: float | None) -> nn.Module:
    for module in model.modules():
        if type(module) is nn.Conv2d:
            module.__class__ = Conv2d
            module.max_error = max_error
    return model


# models that can: the graph


def _trace(model: nn.Module) -> fx.Graph | None:
    """The graph of the model, or None where tracing would change what it does."""
    try:
        graph = fx.Tracer().trace(model)
    except Exception:  # whatever a model's Python does with a proxy
        return None
    # functions that were traced with today's training flag would keep it for ever
    frozen = any("training" in node.kwargs or node.target in (F.dropout, F.batch_norm)
                 for node in graph.nodes)
    return None if frozen else graph


def _rewritten(model: nn.Module, graph: fx.Graph, max_error: float | None) -> fx.GraphModule:
    traced = fx.GraphModule(model, graph)
    for name, child in model.named_children():  # also those that the graph does not call
        traced._modules[name] = child
    for name, buffer in model.named_buffers(recurse=False):
        traced.register_buffer(name, buffer, name not in model._non_persistent_buffers_set)
    for name, parameter in model.named_parameters(recurse=False):
        traced.register_parameter(name, parameter)
    blocks = nn.ModuleDict()
    traced.add_module(BLOCKS, blocks)
    for node in list(graph.nodes):
        if _is_convolution(traced, node):
            _fuse(traced, node, blocks, max_error)
    _keep_channels_last(graph)
    for node in graph.nodes:
        node.type = None  # an annotation that is a string could not be pickled
    graph.eliminate_dead_code()
    graph.lint()
    traced.recompile()
    return traced


def _is_convolution(model: fx.GraphModule, node: fx.Node) -> bool:
    module = module_of(model, node)
    return (type(module) is nn.Conv2d and module.padding_mode == "zeros"
            and len(node.args) == 1 and not node.kwargs)


def _fuse(model: fx.GraphModule, conv: fx.Node, blocks: nn.ModuleDict,
          max_error: float | None) -> None:
    chain = Chain(model, conv)
    norm = None if chain.norm is None else module_of(model, chain.norm)
    name = str(conv.target).replace(".", "_")
    while name in blocks:  # a convolution that is called more than once
        name += "_again"
    blocks[name] = Block(module_of(model, conv), norm, chain.activation, chain.pool, max_error)
    args = conv.args if chain.residual is None else (*conv.args, chain.residual)
    with model.graph.inserting_after(chain.last):
        fused = model.graph.call_module(f"{BLOCKS}.{name}", args)
    chain.replace_by(fused)


# layout


def _keep_channels_last(graph: fx.Graph) -> None:
    """Channels-last inside, the caller's layout outside."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in inputs:
        users = list(node.users)
        with graph.inserting_after(inputs[-1]):
            entered = graph.call_function(enter, (node,))
        for user in users:
            user.replace_input_with(node, entered)
    for node in graph.nodes:
        if node.op == "call_method" and node.target == "view":
            node.target = "reshape"  # a view across channels is one only in the caller's layout
        if node.op == "output" and inputs:
            with graph.inserting_before(node):
                left = graph.call_function(leave, (node.args[0], inputs[0]))
            node.args = (left,)


def enter(x: Any) -> Any:
    """An image in channels-last; anything else as it is."""
    if not isinstance(x, Tensor) or x.dim() != 4 or not x.is_floating_point():
        return x
    if x.shape[1] == 1 and x.is_contiguous():  # the same memory, named by other strides
        h, w = x.shape[2:]
        return x.as_strided(x.shape, (h * w, 1, w, 1))
    return x.contiguous(memory_format=torch.channels_last)


def leave(result: Any, example: Any) -> Any:
    """Images of a result in the layout of the caller's input."""
    if isinstance(result, tuple | list):
        return type(result)(leave(part, example) for part in result)
    if isinstance(result, dict):
        return {name: leave(part, example) for name, part in result.items()}
    planes = isinstance(example, Tensor) and example.dim() == 4 and example.is_contiguous()
    return result.contiguous() if planes and isinstance(result, Tensor) else result

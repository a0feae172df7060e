"""optimize(model): find conv (+ bn) (+ add) (+ relu) (+ pool), and run each in one call."""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ..core.errors import TilewiseError
from .nn import Block, Conv2d
from .tuning import tune

ADDS = {operator.add, operator.iadd, torch.add, "add", "add_"}
RELUS = {F.relu, torch.relu, torch.relu_, F.relu_, "relu", "relu_"}
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


def _module(model: fx.GraphModule, node: Any) -> Any:
    return model.get_submodule(node.target) if node.op == "call_module" else None


def _is_convolution(model: fx.GraphModule, node: fx.Node) -> bool:
    module = _module(model, node)
    return (type(module) is nn.Conv2d and module.padding_mode == "zeros"
            and not _has_hooks(module) and len(node.args) == 1 and not node.kwargs)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _only_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


class _Chain:
    """What follows a convolution, as far as one call can do it."""

    def __init__(self, model: fx.GraphModule, conv: fx.Node) -> None:
        self.model, self.last = model, conv
        self.norm: nn.BatchNorm2d | None = None
        self.residual: fx.Node | None = None
        self.activation: str | None = None
        self.pool = 1
        for step in (self._norm, self._add, self._relu, self._pool):
            user = _only_user(self.last)
            if user is not None and step(user):
                self.last = user

    def _norm(self, user: fx.Node) -> bool:
        module = _module(self.model, user)
        if type(module) is nn.BatchNorm2d and module.track_running_stats and (
                not _has_hooks(module)):
            self.norm = module
            return True
        return False

    def _add(self, user: fx.Node) -> bool:
        if user.target not in ADDS or user.kwargs or len(user.args) != 2:
            return False
        others = [arg for arg in user.args if arg is not self.last]
        if len(others) != 1 or not isinstance(others[0], fx.Node):
            return False
        self.residual = others[0]
        return True

    def _relu(self, user: fx.Node) -> bool:
        module = _module(self.model, user)
        relu = type(module) is nn.ReLU and not _has_hooks(module)
        if relu or (user.target in RELUS and len(user.args) == 1):
            self.activation = "relu"
            return True
        return False

    def _pool(self, user: fx.Node) -> bool:
        module = _module(self.model, user)
        if isinstance(module, nn.MaxPool2d) and not _has_hooks(module):
            options = (module.kernel_size, module.stride, module.padding, module.dilation,
                       module.return_indices, module.ceil_mode)
            if options in ((2, 2, 0, 1, False, False), ((2, 2), (2, 2), 0, 1, False, False)):
                self.pool = 2
                return True
        if user.target in (F.max_pool2d, torch.max_pool2d) and user.args[1:] in (
                (2,), (2, 2)) and not user.kwargs:
            self.pool = 2
            return True
        return False


def _fuse(model: fx.GraphModule, conv: fx.Node, blocks: nn.ModuleDict,
          max_error: float | None) -> None:
    chain = _Chain(model, conv)
    name = str(conv.target).replace(".", "_")
    module = model.get_submodule(conv.target)
    while name in blocks:
        name += "_again"
    blocks[name] = Block(module, chain.norm, chain.activation, chain.pool, max_error)
    args = conv.args if chain.residual is None else (*conv.args, chain.residual)
    with model.graph.inserting_after(chain.last):
        fused = model.graph.call_module(f"{BLOCKS}.{name}", args)
    chain.last.replace_all_uses_with(fused)
    for node in _between(conv, chain.last):
        model.graph.erase_node(node)


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The chain's nodes, the last first."""
    nodes, node = [first], first
    while node is not last:
        node = next(iter(node.users))
        nodes.append(node)
    return nodes[::-1]


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

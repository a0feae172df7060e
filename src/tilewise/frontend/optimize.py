"""optimize(model): find conv (+ bn) (+ add) (+ relu) (+ pool), and run each in one call.

What cannot be traced as a whole is traced in parts, and convolutions outside of any part are
replaced one by one.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.nn import functional as F

from ..core.errors import TilewiseError
from ..core.progress import Tell, silent
from .layout import enter, inside, leave
from .linear import Linear, is_worth
from .nn import Block, Conv2d
from .patterns import Chain, LinearChain, module_of
from .tuning import BLOCKS, observe, tune
from .variants import fastest, sharing_copy

MEASURING = ("measure", "exhaustive")  # efforts that may read a clock


def optimize(model: nn.Module, example: Any = None, *, effort: str = "estimate",
             max_error: float | None = None, keep_original: bool = True,
             tell: Tell = silent) -> nn.Module:
    """The same model, its convolutions and what follows them run by tilewise.

    Parameters and buffers are shared with the original, and the state_dict is the same. With an
    `example` (a tensor or a tuple of arguments) everything is planned and compiled at once;
    effort="measure" then also times the candidates of every layer, and the whole model beside the
    original, which is what is returned where nothing is faster.

    With keep_original=False batch norms are folded into their convolutions for good, and the
    result holds nothing else of the original: less memory, but it cannot be trained, has another
    state_dict and does not follow changes of the original's weights.

    What takes long is told as it goes: `tell(what, done, total)`, for a bar or a log.

    >>> fast = optimize(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval())
    >>> fast(torch.randn(1, 3, 16, 16)).shape
    torch.Size([1, 8, 14, 14])
    """
    if effort != "estimate" and example is None:
        raise TilewiseError(f"effort is {effort!r}, needs an example to measure with: "
                            "optimize(model, example, effort=...)")
    twin = sharing_copy(model)
    graph = _trace(twin)
    if not keep_original:
        _check_release(model, graph)
    if graph is None:
        _rewrite_parts(twin, max_error, set())
        result = twin
    else:
        result = _rewritten(twin, graph, max_error)
        if not keep_original:
            _release(result)
    result.train(model.training)
    if example is None:
        return result
    if graph is None:
        result = _channels_last_if_it_can(result, example)
    tune(result, example, effort, max_error, tell)
    if effort not in MEASURING or not keep_original:
        return result
    tell("timing the whole model", 0, 1)
    return fastest(model, result, example, max_error)


def _check_release(model: nn.Module, graph: fx.Graph | None) -> None:
    if graph is None:
        raise TilewiseError("keep_original is False, needs a model that torch.fx can trace: others "
                            "may still use the modules that would be released")
    if model.training:
        raise TilewiseError("keep_original is False, needs a model in eval mode: what is folded "
                            "cannot be trained")


def _release(model: fx.GraphModule) -> None:
    """Let go of every module that the graph does not call."""
    for block in model.get_submodule(BLOCKS).children():
        block.own()
    model.delete_all_unused_submodules()
    used = {node.target for node in model.graph.nodes if node.op == "get_attr"}
    for tensors in (model._parameters, model._buffers):
        for name in set(tensors) - used:
            del tensors[name]


# models that cannot be traced: part by part


def _rewrite_parts(module: nn.Module, max_error: float | None, seen: set[nn.Module]) -> None:
    """Trace the largest modules that can be; they stay what they are and get another forward."""
    for child in module.children():
        if child in seen or not any(type(part) is nn.Conv2d for part in child.modules()):
            continue
        seen.add(child)
        graph = None if type(child) is nn.Conv2d else _trace(child)
        if graph is None:
            _rewrite_parts(child, max_error, seen)
        else:
            traced = _rewritten(child, graph, max_error)
            child.add_module(BLOCKS, traced.get_submodule(BLOCKS))
            child.__dict__["forward"] = traced  # no submodule: it has the same ones
            seen.update(child.modules())
        if type(child) is nn.Conv2d:
            child.__class__ = Conv2d
            child.max_error = max_error


def _channels_last_if_it_can(model: nn.Module, example: Any) -> nn.Module:
    """Code that was not traced may ask for views that only the caller's layout has."""
    last = inside(sharing_copy(model))
    try:
        observe(last, example)
    except RuntimeError:
        return model
    return last


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
        elif _is_large_linear(traced, node):
            _fuse_linear(traced, node, blocks, max_error)
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


def _is_large_linear(model: fx.GraphModule, node: fx.Node) -> bool:
    module = module_of(model, node)
    return (type(module) is nn.Linear and is_worth(module) and len(node.args) == 1
            and not node.kwargs)


def _fuse(model: fx.GraphModule, conv: fx.Node, blocks: nn.ModuleDict,
          max_error: float | None) -> None:
    chain = Chain(model, conv)
    norm = None if chain.norm is None else module_of(model, chain.norm)
    block = Block(module_of(model, conv), norm, chain.activation, chain.pool, max_error)
    args = conv.args if chain.residual is None else (*conv.args, chain.residual)
    _put(model, chain, blocks, block, args)


def _fuse_linear(model: fx.GraphModule, node: fx.Node, blocks: nn.ModuleDict,
                 max_error: float | None) -> None:
    chain = LinearChain(model, node)
    block = Linear(module_of(model, node), chain.activation, max_error)
    _put(model, chain, blocks, block, node.args)


def _put(model: fx.GraphModule, chain: Chain, blocks: nn.ModuleDict, block: nn.Module,
         args: tuple[Any, ...]) -> None:
    """A block in the place of a chain, under the name of what the chain begins with."""
    name = str(chain.conv.target).replace(".", "_")
    while name in blocks:  # a module that is called more than once
        name += "_again"
    blocks[name] = block
    with model.graph.inserting_after(chain.last):
        fused = model.graph.call_module(f"{BLOCKS}.{name}", args)
    chain.replace_by(fused)


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

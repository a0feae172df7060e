"""torch.compile(model, backend="tilewise").

The captured graph's convolutions, with what follows them, become calls of tilewise's operators;
the rest goes to Inductor where there is a C++ compiler, and runs as it is where not.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..conv.autocast import type_of
from ..conv.axes import convolve as run
from ..conv.calls import is_by_filter
from ..conv.ops import added, then
from ..conv.options import output_shape
from ..conv.transposed_axes import normed as transpose
from .effects import Effects
from .layout import Drawn, Inside
from .patterns import (
    CONVOLUTION,
    F_BATCH_NORM,
    TRANSPOSED_CONVOLUTION,
    Chain,
    TransposedChain,
    arguments,
    padded_by,
)

AXES = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
TRANSPOSED = {torch.conv_transpose1d: 1, torch.conv_transpose2d: 2,
              torch.conv_transpose3d: 3}
NORM = ("running_mean", "running_var", "weight", "bias", "eps")


def tilewise(model: fx.GraphModule, example_inputs: Sequence[Any], *,
             options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """The backend: registered under the name "tilewise"; `options` are Inductor's."""
    rewrite(model)
    if not has_compiler():
        return model.forward
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(model, example_inputs, config_patches=options)


def has_compiler() -> bool:
    return any(shutil.which(name) for name in ("g++", "c++", "clang++"))


def rewrite(model: fx.GraphModule) -> int:
    """Replace the convolutions of a captured graph; returns how many there were."""
    graph = model.graph
    found = [node for node in graph.nodes
             if node.op == "call_function" and node.target in {*AXES, *TRANSPOSED}]
    effects = Effects(graph, _no_module)
    for node in found:
        (_replace if node.target in AXES else _replace_transposed)(graph, effects, node)
    inside = _Inside(graph, _no_module)
    if found and inside.is_safe():
        inside.run()
    graph.lint()
    model.recompile()
    return len(found)


def _no_module(node: fx.Node) -> None:
    """Dynamo looks into modules; of those that it calls nothing is known."""


def _replace(graph: fx.Graph, effects: Effects, conv: fx.Node) -> None:
    options, axes = arguments(conv, CONVOLUTION), AXES[conv.target]
    chain = Chain(effects, _no_module, conv, axes=axes)
    before, pad = padded_by(options, axes), options["input"]
    if before is not None and not effects.is_written_between(pad, chain.last, [before[0]],
                                                             set(chain.links)):
        options["input"], options["padding"] = before
    norm = {} if chain.norm is None else arguments(chain.norm, F_BATCH_NORM)
    with graph.inserting_after(chain.last):
        fused = graph.call_function(
            convolve, (options["input"], options["weight"], options["bias"], chain.residual,
                       chain.slope),
            {"norm": [norm[name] for name in NORM] if norm else None,
             "tail": (chain.activation, chain.pool, chain.adds_in_place),
             **{name: options[name] for name in ("stride", "padding", "dilation", "groups")}})
    fused.meta = dict(chain.last.meta)
    chain.replace_by(graph, fused)
    if options["input"] is not pad:
        graph.erase_node(pad)


def _replace_transposed(graph: fx.Graph, effects: Effects, conv: fx.Node) -> None:
    options = arguments(conv, TRANSPOSED_CONVOLUTION)
    chain = TransposedChain(effects, _no_module, conv, axes=TRANSPOSED[conv.target])
    norm = {} if chain.norm is None else arguments(chain.norm, F_BATCH_NORM)
    with graph.inserting_after(chain.last):
        fused = graph.call_function(
            transpose, tuple(options.values()),
            {"norm": [norm[name] for name in NORM] if norm else None,
             "activation": chain.activation})
    fused.meta = dict(chain.last.meta)
    chain.replace_by(graph, fused)


class _Inside(Inside):
    """Channels-last between the convolutions of a graph whose inputs are also parameters."""

    def _enter_inputs(self) -> list[fx.Node]:
        return []  # each convolution does it: nothing tells an image from a weight

    def is_block(self, node: fx.Node) -> bool:
        return node.target in (convolve, transpose)

    def drawn(self, call: Drawn, args: Any, kwargs: Any) -> fx.Node:
        return self.graph.call_function(call, ((), *args), kwargs)

    def left(self, images: list[fx.Node]) -> list[fx.Node]:
        return [self.graph.call_function(planes, (image,)) if _is_planes(image) else image
                for image in images]


def _is_planes(node: fx.Node) -> bool:
    """Whether Dynamo took an image for one in planes."""
    value = node.meta.get("example_value")
    return not isinstance(value, Tensor) or value.is_contiguous()


def planes(x: Any) -> Any:
    return x.contiguous() if isinstance(x, Tensor) else x


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
             slope: Tensor | None, *, norm: Any, tail: tuple[str | None, int, bool],
             **options: Any) -> Tensor:
    """A convolution and what follows it, as few calls as that allows."""
    activation, pool, in_place = tail
    shape = output_shape(x, weight, options["stride"], options["padding"], options["dilation"])
    whole = residual is None or (isinstance(residual, Tensor) and residual.dtype == type_of(x)
                                 and tuple(residual.shape) == shape)
    if not whole or not is_by_filter(x, weight, slope):
        y = run(x, weight, bias, norm=norm, **options)
        return then(added(y, residual, in_place), activation, pool, slope)
    return run(x, weight, bias, norm=norm, activation=activation, slope=slope, residual=residual,
               pool=pool, **options)

"""torch.compile(model, backend="tilewise").

The captured graph's convolutions, with what follows them, become calls of tilewise's operators;
the rest goes to Inductor where there is a C++ compiler, and runs as it is where not.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from .ops import conv2d, conv2d_norm, then
from .options import output_shape
from .patterns import CONV2D, F_BATCH_NORM, Chain, arguments, padded_by

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
    found = [node for node in model.graph.nodes
             if node.op == "call_function" and node.target is torch.conv2d]
    for node in found:
        _replace(model, node)
    model.graph.eliminate_dead_code()
    model.graph.lint()
    model.recompile()
    return len(found)


def _replace(model: fx.GraphModule, conv: fx.Node) -> None:
    options, chain = arguments(conv, CONV2D), Chain(model, conv)
    before = padded_by(conv, options)
    if before is not None:
        options["input"], options["padding"] = before
    norm = {} if chain.norm is None else arguments(chain.norm, F_BATCH_NORM)
    with model.graph.inserting_after(chain.last):
        fused = model.graph.call_function(
            convolve, (options["input"], options["weight"], options["bias"], chain.residual),
            {"norm": [norm[name] for name in NORM] if norm else None,
             "tail": (chain.activation, chain.pool),
             **{name: options[name] for name in ("stride", "padding", "dilation", "groups")}})
    fused.meta = dict(chain.last.meta)
    chain.replace_by(fused)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *,
             norm: Any, tail: tuple[str | None, int], **options: Any) -> Tensor:
    """A convolution and what follows it, as few calls as that allows."""
    activation, pool = tail
    x = x if x.dim() != 4 else x.contiguous(memory_format=torch.channels_last)
    shape = output_shape(x, weight, options["stride"], options["padding"], options["dilation"])
    run = conv2d if norm is None else partial(conv2d_norm, norm=norm)
    if residual is not None and tuple(residual.shape) != shape:
        return then(run(x, weight, bias, **options) + residual, activation, pool)
    return run(x, weight, bias, activation=activation, residual=residual, pool=pool, **options)

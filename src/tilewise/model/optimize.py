"""optimize(model): find conv (+ bn) (+ add) (+ relu) (+ pool), and run each in one call.

A model stays what it is, with the same class, modules and tensors; its forward, or that of its
parts, runs as a graph where that is known to be the same.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from ..conv.checks import arguments_of, check_bound, check_module
from ..conv.linear import Linear
from ..core.errors import TilewiseError
from ..core.progress import Tell, silent
from .capture import Capture
from .captured import Learned, all_captured, arm, form_of, prepare
from .contents import Refused
from .native import Native
from .nn import Block
from .rehearsal import cloned, rehearsal, sharing_copy
from .released import Released, Retracer
from .tracer import is_hooked
from .tuning import Layer, tune
from .variants import fastest

MEASURING = ("measure", "exhaustive")  # efforts that may read a clock


def optimize(model: nn.Module, example: Any = None, *, effort: str = "estimate",
             max_error: float | None = None, keep_original: bool = True,
             tell: Tell = silent) -> nn.Module:
    """The same model, its convolutions and what follows them run by tilewise.

    Parameters and buffers are shared with the original, and the state_dict is the same.

    Args:
        model: Any module; it is not changed.
        example: A tensor or a tuple of arguments. With it, everything is planned and compiled at
            once, and the result is compared with the original's. Without it, this happens at the
            first call.
        effort: "estimate" chooses plans by estimates. "measure" times the candidates of every
            layer, and the whole model beside the original, and returns the original if nothing
            is faster. "exhaustive" also searches the schedules. "wisdom_only" uses stored plans
            and leaves the rest to torch. All but the first need an example.
        max_error: Bound on the relative rms error of each layer, instead of the one that
            `torch.set_float32_matmul_precision` stands for.
        keep_original: False folds batch norms into the weights for good and keeps nothing else of
            the original. The result takes less memory; it cannot be trained, has another class
            and state_dict, and does not follow changes of the original.
        tell: A function `(what, done, total)` that is told how far it is, for a bar or a log, and
            what was made of the model. `print` will do.

    Returns:
        A module of the same class, unless keep_original is False. It prints as the original does;
        `explain` shows what runs.

    >>> fast = optimize(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval())
    >>> fast(torch.randn(1, 3, 16, 16)).shape
    torch.Size([1, 8, 14, 14])
    """
    _check(model, example, effort, max_error)
    if keep_original:
        result = sharing_copy(model)
        arm(result, max_error)
    else:
        result = _released(model, example, max_error)
    if example is None or _is_lazy(model):
        return result
    arguments = arguments_of(example)
    layers = tune(result, example, effort, max_error, tell)
    _say(model, layers, tell)
    holder = result if isinstance(result, Released) else next(all_captured(result), None)
    if effort in MEASURING and holder is not None:
        holder.tuned = Learned((layer.plan.problem, layer.plan.target) for layer in layers)
    if not _agrees(model, result, arguments, max_error):
        return _left_alone(model, keep_original)
    prepare(result, arguments)
    if effort not in MEASURING or not keep_original:
        return result
    return fastest(model, result, arguments, max_error, tell)


def _check(model: Any, example: Any, effort: str, max_error: Any) -> None:
    check_module(model)
    check_bound(max_error)
    if isinstance(model, torch.jit.ScriptModule):
        raise TilewiseError("model is a ScriptModule, whose convolutions cannot be replaced: "
                            "optimize the model that was scripted or traced")
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):  # an OptimizedModule
        raise TilewiseError("model was compiled already, which hides its convolutions: "
                            "optimize(model, example) before torch.compile, or "
                            "torch.compile(model, backend=\"tilewise\") instead of both")
    if effort != "estimate" and example is None:
        raise TilewiseError(f"effort is {effort!r}, needs an example to measure with: "
                            "optimize(model, example, effort=...)")
    if example is not None:
        arguments_of(example)


def _say(model: nn.Module, layers: list[Layer], tell: Tell) -> None:
    """What was made of a model, which looks as before when it is printed."""
    if not layers:
        warnings.warn(f"{type(model).__name__}: nothing in it is run by tilewise on this example, "
                      "so it is no faster", stacklevel=3)
    ours = sum(layer.plan.algorithm != "vendor" for layer in layers)
    tell(f"layers: {ours} by generated code, {len(layers) - ours} by torch; explain() shows each",
         1, 1)


def _is_lazy(model: nn.Module) -> bool:
    """Whether the first call is still to make parameters, which is the caller's to do."""
    return any(isinstance(p, nn.parameter.UninitializedTensorMixin)
               for p in (*model.parameters(), *model.buffers()))


# with an example, what was made must also compute the same


def _agrees(model: nn.Module, result: nn.Module, arguments: tuple[Any, ...],
            max_error: float | None) -> bool:
    """Whether both give the same, far beyond what rounding explains; or the original does not."""
    with rehearsal(model) as trial:
        expected = tree_flatten(trial(*cloned(arguments)))[0]
    with rehearsal(model) as trial:
        again = tree_flatten(trial(*cloned(arguments)))[0]
    with rehearsal(result) as trial:
        found = tree_flatten(trial(*cloned(arguments)))[0]
    room = 1e-2 if max_error is None and _is_exact() else 0.3
    return not _same(expected, again, 1e-4) or _same(expected, found, room)


def _is_exact() -> bool:
    return torch.get_float32_matmul_precision() == "highest"


def _same(a: list[Any], b: list[Any], room: float) -> bool:
    return len(a) == len(b) and all(map(_is_near, a, b, [room] * len(a)))


def _is_near(a: Any, b: Any, room: float) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() or a.numel() == 0:
        return True  # which of two nearly equal values is larger may differ
    a, b = a.double(), b.double()
    if not a.isfinite().all():
        return True
    return bool((a - b).norm() <= room * max(float(a.norm()), 1e-3))


def _left_alone(model: nn.Module, keep_original: bool) -> nn.Module:
    text = (f"{type(model).__name__}: on the example the optimised model gives another result than "
            "the original")
    if not keep_original:
        raise TilewiseError(f"{text}: it cannot be released")
    warnings.warn(f"{text}, so it is left as it is", stacklevel=3)
    return sharing_copy(model)


# keep_original=False


def _released(model: nn.Module, example: Any, max_error: float | None) -> nn.Module:
    """A module of blocks that own their weights, and of nothing that the graph does not call."""
    for name, part in model.named_modules():
        if part.training:
            raise TilewiseError(f"keep_original is False, needs a model in eval mode: "
                                f"{name or 'the model'} is in training mode, and what is folded "
                                "cannot be trained")
    arguments = _required(model) if example is None else arguments_of(example)
    try:
        leaves, spec = tree_flatten((arguments, {}))
        capture = Capture(sharing_copy(model), leaves, spec, max_error)
        if capture.opaque:
            raise Refused(f"{type(capture.opaque[0]).__name__} cannot be traced")
        if example is None and capture.asked:
            raise Refused("it asks for axes, types, devices or sizes: give optimize an example")
        return _module(model, capture, form_of(leaves, spec))
    except Refused as reason:
        raise TilewiseError("keep_original is False, needs a model that can be traced as a whole, "
                            f"others may still use the modules that would be released: {reason}"
                            ) from None


def _module(model: nn.Module, capture: Capture, form: Any) -> Released:
    if any(map(is_hooked, model.modules())):
        raise Refused("it has hooks")
    for name, step in capture.steps.items():
        if isinstance(step, Block | Linear):
            step.own()
        elif isinstance(step, Native):
            capture.steps[name] = step.owned()
    capture.forget_weight()
    capture.graph._tracer_cls = Retracer
    tensors = {name: getattr(module, attribute).detach()
               for name, (module, attribute) in capture.tensors.items()}
    graph = fx.GraphModule({**capture.steps, **tensors}, capture.graph, type(model).__name__)
    return Released(graph.eval(), capture, form).eval()


def _required(model: nn.Module) -> tuple[Any, ...]:
    """Tensors for all arguments that have no default."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.KEYWORD_ONLY) and p.default is p.empty
           for p in parameters):
        raise TilewiseError("keep_original is False, needs an example: the arguments of forward "
                            "have no names")
    return tuple(torch.empty(0) for p in parameters
                 if p.default is p.empty and p.kind is not p.VAR_KEYWORD)

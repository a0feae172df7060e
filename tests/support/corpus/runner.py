"""Runs a case on the original and on what tilewise makes of it, and says where they differ."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

import tilewise
from tilewise.core.errors import TilewiseError
from tilewise.kernels.cpu.emit.threads import one_thread
from tilewise.model import dynamo

from .case import LAYOUT, Case, gradients
from .record import Raised, Seen, differences, record


@dataclass(frozen=True)
class Mode:
    """Under which circumstances a script runs."""

    grad: bool = False
    train: bool = False
    layout: torch.memory_format = torch.contiguous_format


# kinds of cases that are about what is computed, and not about Python around it
GRAPHS = ("aliasing", "changes", "flags", "inplace", "layers", "structure", "training")
Make = Callable[[nn.Module, Case], nn.Module]


@dataclass(frozen=True)
class Variant:
    name: str
    make: Make
    mode: Mode = Mode()

    def is_slow(self, case: Case) -> bool:
        """Compiling takes longest, and where no graph differs it tells least."""
        return self.name == "compiled" and case.kind not in GRAPHS

    def admits(self, case: Case) -> bool:
        return {"released": case.released, "compiled": case.compiled}.get(self.name, True)


def optimized(model: nn.Module, case: Case) -> nn.Module:
    return tilewise.optimize(model)


def with_example(model: nn.Module, case: Case) -> nn.Module:
    example = case.example()
    before = record(example)
    try:
        made = tilewise.optimize(model, example)
    except Exception:
        if _runs(model, example):
            raise
        made = tilewise.optimize(model)  # no example for a model of this kind
    found = list(differences(before, record(example)))
    assert not found, f"optimize changed its example: {found}"
    return made


def _runs(model: nn.Module, example: Any) -> bool:
    try:
        copy.deepcopy(model).eval()(*(example if isinstance(example, tuple) else (example,)))
    except Exception:
        return False
    return True


def released(model: nn.Module, case: Case) -> nn.Module:
    return tilewise.optimize(model, keep_original=False)


def compiled(model: nn.Module, case: Case, backend: str = "tilewise") -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(model, backend=backend)


VARIANTS = (
    Variant("plain", optimized),
    Variant("example", with_example),
    Variant("released", released),
    Variant("last", optimized, Mode(layout=torch.channels_last)),
    Variant("grad", optimized, Mode(grad=True)),
    Variant("train", optimized, Mode(grad=True, train=True)),
    Variant("compiled", compiled),
)


def check(case: Case, variant: Variant) -> list[str]:
    """The differences between the original and what is made of it; none is what should be."""
    wanted = reference(case, variant.mode)
    got = run(case, variant.make, variant.mode)
    found = compare(case, variant, wanted, got)
    if found and variant.make is compiled:
        # what Dynamo changes by itself is not ours to answer for
        eager = run(case, partial(compiled, backend="eager"), variant.mode)
        if compare(case, variant, wanted, eager):
            found = compare(case, variant, eager, got)
    return found


@cache
def reference(case: Case, mode: Mode) -> dict[str, Any]:
    """What the original does, after a look whether it does so again."""
    first = run(case, lambda model, case: model, mode)
    if mode == Mode():
        second = run(case, lambda model, case: model, mode)
        unsteady = [line for part in first for line in differences(first[part], second[part])]
        assert not unsteady, f"the case itself does not repeat: {unsteady}"
    return first


def compare(case: Case, variant: Variant, wanted: dict[str, Any],
            got: dict[str, Any]) -> list[str]:
    if variant.make is released:  # folded weights have other names, and no gradients
        if got["refused"] or _says_so(got["seen"]):
            return []
        return list(differences(wanted["seen"], got["seen"], loose=True, at="seen")) + list(
            differences(wanted["random"], got["random"], at="random"))
    if variant.mode.layout == torch.channels_last:  # results may lie as the caller's images do
        wanted, got = (_without_layouts(part) for part in (wanted, got))
    kept = ("seen", "random", "state", *(() if case.edits else ("original",)))
    found = [line for part in kept for line in differences(wanted[part], got[part], at=part)]
    # a backward pass that torch refuses may be one that ours can do
    return found + ([] if wanted["gradients"] is None else list(
        differences(wanted["gradients"], got["gradients"], at="gradients")))


def _without_layouts(seen: Any) -> Any:
    return tree_map(lambda part: replace(part, layouts=()) if isinstance(part, Seen) else part,
                    seen)


def _says_so(seen: Any) -> bool:
    """Whether a released model told that it is none for what is asked."""
    return any(isinstance(part, Raised) and issubclass(part.kind, TilewiseError)
               for part in tree_flatten(seen)[0])


def run(case: Case, make: Make, mode: Mode) -> dict[str, Any]:
    """Everything that can be seen of a script's run."""
    with surroundings(case, mode):
        seed()
        original = case.make()
        original.train(mode.train or original.training)
        seed()
        refused, model = False, None
        try:
            model = make(original, case)
            result = _call(case.script, model, original)
        except Exception as error:
            result, refused = error, isinstance(error, TilewiseError)
        seen, stream = record(result), _random_state()
        grads = _backward(model, result) if mode.grad and not case.grad else None
        return {"seen": seen, "random": stream, "state": _state(model),
                "original": _state(original), "gradients": grads, "refused": refused}


@contextlib.contextmanager
def surroundings(case: Case, mode: Mode) -> Iterator[None]:
    # so small images wait for other threads longer than they are worked on
    with (one_thread(), mock.patch.object(dynamo, "has_compiler", return_value=False),
          warnings.catch_warnings(), torch.set_grad_enabled(mode.grad or case.grad)):
        warnings.simplefilter("ignore")
        LAYOUT[0] = mode.layout
        try:
            yield
        finally:
            LAYOUT[0] = torch.contiguous_format


def seed() -> None:
    torch.default_generator.manual_seed(3)  # of the CPU alone, which is quicker
    random.seed(3)
    np.random.seed(3)


def _call(script: Callable[..., Any], model: nn.Module, original: nn.Module) -> Any:
    wants = len(inspect.signature(script).parameters)
    seed()
    return script(*(model, original)[:wants])


def _random_state() -> list[str]:
    states = (torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state())
    return [hashlib.md5(pickle.dumps(state)).hexdigest() for state in states]


def _state(model: nn.Module | None) -> Any:
    if model is None:
        return None
    try:
        return record(dict(getattr(model, "_orig_mod", model).state_dict()))
    except Exception as error:
        return record(error)


# gradients of whatever the script returned


def _backward(model: nn.Module | None, result: Any) -> Any:
    """Gradients of a sum over all results, or None where the original has none."""
    found = {id(x): x for x in tree_flatten(result)[0]
             if isinstance(x, Tensor) and x.requires_grad and x.dtype.is_floating_point}
    if model is None or not found:
        return None
    try:
        sum(_weighted(x) for x in found.values()).backward()
    except Exception:  # as after a change in place
        return None
    return record(gradients(getattr(model, "_orig_mod", model)))


def _weighted(x: Tensor) -> Tensor:
    """No symmetry, so that no gradient cancels."""
    return (x.double() * torch.arange(x.numel(), dtype=torch.float64).cos().view(x.shape)).sum()

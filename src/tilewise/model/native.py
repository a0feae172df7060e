"""A step between convolutions: a kernel of ours where it can be, else what torch had there."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import _get_qualified_name, map_arg

from ..conv.again import can_repeat
from ..core.watching import watcher


class Method:
    """A method of a tensor as a function."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, x: Any, *args: Any, **options: Any) -> Any:
        return getattr(x, self.name)(*args, **options)


class Value(int):
    """The number of a value: the operands first, then what each call gives."""


class Original:
    """Nodes of a graph as they were: original(*operands) is the result of the last.

    Args:
        nodes: In their order.
        operands: What they read that is none of them.
        module_of: The module that a node calls.
    """

    def __init__(self, nodes: Sequence[fx.Node], operands: Sequence[fx.Node],
                 module_of: Callable[[fx.Node], Any]) -> None:
        number = {node: Value(i) for i, node in enumerate((*operands, *nodes))}
        self._calls = [(module_of(node) if node.op == "call_module" else function_of(node),
                        map_arg(node.args, number.__getitem__),
                        map_arg(node.kwargs, number.__getitem__)) for node in nodes]

    def __call__(self, *operands: Any) -> Any:
        values = list(operands)
        for function, args, options in self._calls:
            values.append(function(*filled(args, values), **filled(options, values)))
        return values[-1]

    def __getstate__(self) -> list[Any]:
        return [(_named(function), *rest) for function, *rest in self._calls]

    def __setstate__(self, state: list[Any]) -> None:
        self._calls = [(_found(function), *rest) for function, *rest in state]


def function_of(node: fx.Node) -> Any:
    """What a node calls that is no module."""
    return Method(node.target) if isinstance(node.target, str) else node.target


def filled(spec: Any, values: Sequence[Any]) -> Any:
    """A structure with values in the place of their numbers."""
    if isinstance(spec, Value):
        return values[spec]
    if isinstance(spec, tuple | list):
        return type(spec)(filled(part, values) for part in spec)
    if isinstance(spec, dict):
        return {key: filled(part, values) for key, part in spec.items()}
    if isinstance(spec, slice):
        return slice(*(filled(part, values) for part in (spec.start, spec.stop, spec.step)))
    return spec


class _Name(str):
    """Of a function, from its package on."""


def _named(function: Any) -> Any:
    """Some of torch's functions are saved by their names only."""
    if isinstance(function, nn.Module | Method):
        return function
    return _Name(_get_qualified_name(function))


def _found(function: Any) -> Any:
    if not isinstance(function, _Name):
        return function
    module, _, name = function.rpartition(".")
    return getattr(importlib.import_module(module), name)


class Native(nn.Module):
    """native(*operands): by `run`, unless it gives None or somebody watches; then the original.

    Args:
        name: What it is called in tables.
        run: Takes the first `count` operands; None says that they are torch's.
        learn: The same where a gradient is asked for, if there is such a function.
        original: What torch had in its place.
        parts: Modules whose tensors it reads.
    """

    is_fresh = True  # its result shares memory with nothing
    _learn: Callable[..., Any] | None = None  # of models that were saved before there was any

    def __init__(self, name: str, run: Callable[..., Any], count: int, original: Original,
                 parts: Sequence[Any] = (), learn: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.name, self._run, self._count, self._learn = name, run, count, learn
        self.original, self.parts = original, tuple(parts)

    @property
    def run(self) -> Callable[..., Any]:
        return self._run

    @property
    def count(self) -> int:
        """Of operands that its kernel reads."""
        return self._count

    @property
    def halves(self) -> bool:
        """Whether it takes images of 16 bits."""
        return getattr(self._run, "halves", False)

    @property
    def centres(self) -> bool:
        """Whether it subtracts a mean of its image."""
        return getattr(self._run, "centres", False)

    def instead(self, original: Any) -> Native:
        """The same with something else where its kernel cannot be."""
        return Native(self.name, self._run, self._count, original, self.parts, self._learn)

    @property
    def slices(self) -> bool:
        """Whether it reads and writes slices of channels as well as whole images."""
        return getattr(self._run, "slices", False)

    def into(self, out: Tensor, *operands: Any) -> Tensor | None:
        """The result in a slice of channels; None where that cannot be."""
        if not can_repeat(*(x for x in operands if isinstance(x, Tensor))):
            return None
        found: Tensor | None = self._run(*operands[:self._count], out=out)
        return found

    def owned(self) -> Native:
        """The same with modules of its own, around the same values."""
        known: dict[int, Any] = {}
        for module in filter(None, self.parts):
            known |= {id(p): nn.Parameter(p.detach(), requires_grad=False)
                      for p in module.parameters()}
            known |= {id(b): b.detach() for b in module.buffers()}
        own = copy.deepcopy(self, known)
        own.modules_read = nn.ModuleList(dict.fromkeys(filter(None, own.parts)))
        return own

    def forward(self, *operands: Any) -> Any:
        if can_repeat(*(x for x in operands if isinstance(x, Tensor))):
            found = self._run(*operands[:self._count])
            if found is not None:
                return found
        elif self._learn is not None:
            found = self._learn(*operands[:self._count])
            if found is not None:
                return found
        if (told := watcher()) is not None:
            told.cannot_repeat("torch computes it")
        return self.original(*operands)

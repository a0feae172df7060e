"""Arguments that users get wrong: what was found, what is needed and what to do."""

from __future__ import annotations

from numbers import Real
from typing import Any

from torch import Tensor, nn

from ..core.errors import TilewiseError

ADVICE = {  # for an example, by what it is
    "list": "pass tuple(example) for several arguments, or (example,) if the model takes a list",
    "dict": "pass its values in order, as a tuple",
    "ndarray": "pass torch.from_numpy(example)",
}


class CannotScript(TilewiseError, AttributeError):
    """Also what is expected where somebody looks for an attribute that is not there."""

    def __init__(self) -> None:
        super().__init__("torch.jit.script cannot read an optimised model: script the original, "
                         "torch.jit.script(original), or trace this one, torch.jit.trace")


def kind_of(value: Any) -> str:
    """What a message calls a value.

    >>> kind_of(3), kind_of(int)
    ('a int', 'the class int')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"a {type(value).__name__}"


def check_module(model: Any) -> None:
    """Complain about what is no model."""
    if not isinstance(model, nn.Module):
        raise TilewiseError(f"model is {kind_of(model)}, needs a torch.nn.Module: "
                            f"{module_advice(model)}")


def module_advice(found: Any) -> str:
    if isinstance(found, type):
        return f"pass an instance, {found.__name__}(...)"
    return "pass the model itself; put a function into the forward of a module"


def check_bound(max_error: Any) -> None:
    """Complain about a bound on errors that is none."""
    if max_error is not None and not (isinstance(max_error, Real) and float(max_error) >= 0):
        raise TilewiseError(f"max_error is {max_error!r}, needs a number such as 1e-5 that is not "
                            "negative, or None for what torch.set_float32_matmul_precision "
                            "stands for")


def arguments_of(example: Any) -> tuple[Any, ...]:
    """The arguments that an example stands for."""
    if isinstance(example, Tensor):
        return (example,)
    if _is_shape(example):
        raise TilewiseError(f"example is {tuple(example)}, which are sizes, needs a tensor: pass "
                            f"torch.randn{tuple(example)}")
    if isinstance(example, tuple):
        return example
    advice = ADVICE.get(type(example).__name__)
    raise TilewiseError(f"example is {kind_of(example)}, needs a tensor, or a tuple of the "
                        "arguments that the model is called with"
                        + (f": {advice}" if advice else ""))


def _is_shape(example: Any) -> bool:
    """Whether it has the sizes of an image instead of its values."""
    return (isinstance(example, tuple | list) and len(example) in (3, 4)
            and all(type(size) is int for size in example))

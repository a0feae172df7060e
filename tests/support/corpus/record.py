"""What a script saw, as plain data, and where two records differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tilewise.core.errors import TilewiseError

TOLERANCE = 1e-4  # of the norm: sums in another order, a norm multiplied into a weight
COARSE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}  # a few roundings to 11 and 8 bits
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclasses.dataclass
class Seen:
    """A tensor as it was."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layouts: tuple[bool, bool]  # contiguous, channels-last
    requires_grad: bool
    values: Tensor


@dataclasses.dataclass
class Raised:
    kind: type[BaseException]
    text: str


def record(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, BaseException):
        return Raised(type(value), str(value))
    if isinstance(value, Mapping):
        return type(value).__name__, {str(key): record(value[key]) for key in value}
    if isinstance(value, list | tuple):
        return type(value).__name__, [record(part) for part in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, record(vars(value))
    if isinstance(value, np.ndarray | np.generic):
        return record(torch.as_tensor(value))
    if value is None or isinstance(value, bool | int | float | complex | str | torch.dtype):
        return value
    return type(value).__name__


def _tensor(x: Tensor) -> Seen:
    last = x.dim() in LAYOUTS and x.is_contiguous(memory_format=LAYOUTS[x.dim()])
    kind = "Tensor" if isinstance(x, nn.Parameter) else type(x).__name__
    values = x.detach().as_subclass(Tensor).clone()
    return Seen(kind, x.dtype, tuple(x.shape), (x.is_contiguous(), last), x.requires_grad, values)


def differences(wanted: Any, got: Any, loose: bool = False, at: str = "") -> Iterator[str]:
    """Every difference in a line; loose: gradients need not be recorded."""
    if isinstance(wanted, Raised) or isinstance(got, Raised):
        yield from _raised(wanted, got, at)
    elif type(wanted) is not type(got):
        yield f"{at}: {_brief(wanted)} became {_brief(got)}"
    elif isinstance(wanted, Seen):
        yield from _tensors(wanted, got, loose, at)
    elif isinstance(wanted, tuple) and wanted[0] == got[0] == "Gradients":
        yield from _gradients(wanted[1], got[1], at)
    elif isinstance(wanted, dict):
        if set(wanted) != set(got):
            yield (f"{at}: lost {sorted(wanted.keys() - got.keys())}, "
                   f"gained {sorted(got.keys() - wanted.keys())}")
        elif list(wanted) != list(got):
            yield f"{at}: keys are in another order"
        for key in wanted.keys() & got.keys():
            yield from differences(wanted[key], got[key], loose, f"{at}.{key}")
    elif isinstance(wanted, list | tuple):
        if len(wanted) != len(got):
            yield f"{at}: {len(wanted)} items became {len(got)}"
        for i, (a, b) in enumerate(zip(wanted, got)):
            yield from differences(a, b, loose, f"{at}[{i}]" if isinstance(wanted, list) else at)
    elif not _same_scalar(wanted, got):
        yield f"{at}: {wanted!r} became {got!r}"


def _raised(wanted: Any, got: Any, at: str) -> Iterator[str]:
    if not isinstance(got, Raised):
        yield f"{at}: {wanted.kind.__name__} ({wanted.text[:80]}) was not raised"
    elif not isinstance(wanted, Raised):
        yield f"{at}: raised {got.kind.__name__}: {got.text[:200]}"
    elif got.kind is not wanted.kind and not issubclass(got.kind, TilewiseError):
        yield f"{at}: {wanted.kind.__name__} became {got.kind.__name__}: {got.text[:200]}"


def _tensors(wanted: Seen, got: Seen, loose: bool, at: str) -> Iterator[str]:
    for name in ("kind", "dtype", "shape", *(() if loose else ("requires_grad",))):
        if getattr(wanted, name) != getattr(got, name):
            yield f"{at}: {name} {getattr(wanted, name)} became {getattr(got, name)}"
            return
    # whoever asks for a view of a contiguous result must get one
    for name, was, now in zip(("contiguous", "channels-last"), wanted.layouts, got.layouts):
        if was and not now:
            yield f"{at}: is no longer {name}"
    error = distance(wanted.values, got.values)
    if error > COARSE.get(wanted.dtype, TOLERANCE):
        yield f"{at}: differs by {error:.1e} of the norm, shape {wanted.shape}"


def _gradients(wanted: dict[str, Any], got: dict[str, Any], at: str) -> Iterator[str]:
    """Relative to the largest, so that rounding errors around zero do not count."""
    if set(wanted) != set(got):
        yield f"{at}: of {sorted(set(wanted) ^ set(got))} on one side only"
    norms = [float(seen.values.norm()) for seen in wanted.values() if isinstance(seen, Seen)]
    floor = 0.1 * max(norms, default=0.0) + 1e-6
    for name in wanted.keys() & got.keys():
        a, b = wanted[name], got[name]
        if type(a) is not type(b):
            yield f"{at}.{name}: {_brief(a)} became {_brief(b)}"
        elif isinstance(a, Seen) and distance(a.values, b.values, floor) > 2 * COARSE.get(
                a.dtype, TOLERANCE):
            yield f"{at}.{name}: differs by more than rounding"


def distance(wanted: Tensor, got: Tensor, floor: float = 1e-3) -> float:
    """Relative to the norm; any difference of integers or of what is not finite is infinite."""
    if wanted.is_meta or got.is_meta:
        return 0.0 if wanted.is_meta == got.is_meta else float("inf")
    if torch.equal(wanted, got):
        return 0.0
    if not wanted.dtype.is_floating_point and not wanted.dtype.is_complex:
        return float("inf")
    wide = torch.complex128 if wanted.dtype.is_complex else torch.float64
    a, b = wanted.to(wide), got.to(wide)
    finite = a.isfinite()
    if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()) or \
            not torch.equal(finite, b.isfinite()):
        return float("inf")
    return float((a - b)[finite].norm() / a[finite].norm().clamp(min=floor))


def _same_scalar(wanted: Any, got: Any) -> bool:
    if isinstance(wanted, float | complex) and wanted == wanted:
        return abs(wanted - got) <= TOLERANCE * max(abs(wanted), 1e-3)
    return wanted == got or (wanted != wanted and got != got)


def _brief(value: Any) -> str:
    return f"a tensor {value.shape}" if isinstance(value, Seen) else repr(value)[:80]

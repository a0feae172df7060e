"""What generated code does not do is left to scipy, where it is installed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..core.errors import InvalidProblem, NoAlgorithm, NotInstalled
from .windows import NotNative

Filter = Callable[..., Any]


def or_scipy(name: str) -> Callable[[Filter], Filter]:
    """A filter whose arguments are those of scipy's filter of this name, which does the rest."""
    def around(native: Filter) -> Filter:
        @functools.wraps(native)
        def called(*args: Any, **options: Any) -> Any:
            try:
                return native(*args, **options)
            except (NotNative, NoAlgorithm) as reason:
                return _by_scipy(name, reason)(*args, **_known_to_scipy(options, reason))

        return called

    return around


def _known_to_scipy(options: dict[str, Any], reason: Exception) -> dict[str, Any]:
    """All but ours: what is not native has no NaN, or must say so."""
    if options.get("nan", "keep") == "omit":
        raise InvalidProblem(f"{reason}; nan='omit' needs an image and a result of float32 or "
                             "float64: image.astype(np.float32)") from None
    return {name: value for name, value in options.items() if name != "nan"}


def _by_scipy(name: str, reason: Exception) -> Filter:
    try:
        from scipy import ndimage
    except ImportError:
        raise NotInstalled(f"{reason}; scipy's {name} does it: pip install scipy") from None
    found: Filter = getattr(ndimage, name)
    return found

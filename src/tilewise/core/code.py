"""A problem as generated code sees it: without what is known only when the code runs."""

from __future__ import annotations

from typing import Any

from .problem import Problem

# of a problem: words of a kernel's frame, never constants of its code
SIZES = frozenset({
    "n", "h", "w", "padding", "padded_h", "padded_w", "conv_h", "conv_w", "out_h", "out_w",
    "result_shape", "flops", "share_inside", "input_bytes", "output_bytes", "image_bytes", "bytes",
    "is_linear", "mirrored", "name"})


class Code:
    """What the weight, the epilogue and the layout fix; a size of the image is an error here."""

    def __init__(self, p: Problem) -> None:
        self._p = p

    def __getattr__(self, name: str) -> Any:
        if name in SIZES:
            raise TypeError(f"code is written without {name}: a kernel finds it in its frame")
        return getattr(self._p, name)

    def __str__(self) -> str:
        return self._p.code

"""Weights with input and output channels swapped and taps reversed, as gradients of inputs want."""

from __future__ import annotations

from typing import Any


def mirror(weight: Any, groups: int) -> Any:
    """As a tensor of its own."""
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(2, 3)


class Mirrored:
    """By strides alone, for kernels that read any: nothing is moved.

    Torch has no negative strides, so this is no tensor.
    """

    def __init__(self, weight: Any, groups: int) -> None:
        self._weight, self._groups = weight, groups
        self.lies_in = weight

    def stride(self) -> tuple[int, ...]:
        k, c, row, column = self._weight.stride()
        return c, k, -row, -column

    def group_stride(self) -> int:
        """From the filters of a group to those of the next."""
        stride: int = self._weight.stride(0) * (self._weight.shape[0] // self._groups)
        return stride

    def data_ptr(self) -> int:
        """Of the last tap, which is the first here."""
        *_, r, s = self._weight.shape
        *_, row, column = self._weight.stride()
        address: int = self._weight.data_ptr()
        return address + self._weight.element_size() * ((r - 1) * row + (s - 1) * column)

    def tensor(self) -> Any:
        return mirror(self._weight, self._groups)


def mirrored(weight: Any, groups: int, by_strides: bool) -> Any:
    """What an algorithm prepares; `by_strides`: it asks for nothing but an address and strides."""
    return Mirrored(weight, groups) if by_strides else mirror(weight, groups)

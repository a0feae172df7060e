"""Addresses that know their memory, for code that checks bounds (`TILEWISE_CHECK=1`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, SupportsInt

# whether kernels check every load and store; chosen when a process starts
CHECKED = os.environ.get("TILEWISE_CHECK", "0") not in ("", "0")


class Place(int):
    """An address, and the memory around it: `bytes` from `start` on."""

    start: int
    bytes: int

    @staticmethod
    def of(address: int, start: int, bytes_: int) -> Place:
        place = Place(address)
        place.start, place.bytes = start, bytes_
        return place

    def __add__(self, offset: int) -> Place:
        """Further on in the same memory."""
        return Place.of(int(self) + int(offset), self.start, self.bytes)

    __radd__ = __add__


def placed(first: SupportsInt, shape: Sequence[int], strides: Sequence[int], item: int) -> Place:
    """That of an array's first element, in the memory between its outermost ones."""
    address = int(first)
    if 0 in shape:
        return Place.of(address, address, 0)
    ways = [(size - 1) * stride for size, stride in zip(shape, strides)]
    start = address + sum(way for way in ways if way < 0)
    return Place.of(address, start, sum(map(abs, ways)) + item)


def _of_tensor(tensor: Any) -> Place:
    """What reads a tensor by other strides says whose memory it reads, as `lies_in`."""
    whole = getattr(tensor, "lies_in", tensor)
    item = whole.element_size()
    memory = placed(whole.data_ptr(), whole.shape, [item * way for way in whole.stride()], item)
    return Place.of(tensor.data_ptr(), memory.start, memory.bytes)


# what launches are given; without checks nothing but torch's own call
address: Callable[[Any], int] = _of_tensor if CHECKED else methodcaller("data_ptr")


def address_or_null(tensor: Any) -> int:
    """Zero for an operand that there is not."""
    return 0 if tensor is None else address(tensor)

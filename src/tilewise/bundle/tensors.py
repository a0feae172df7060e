"""Tensors in files: as data that a manifest holds, and back from mapped memory."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from ..runtime.images import is_dense
from .files import Refused, Writer, address_of, bytes_of

DTYPES = {str(dtype).removeprefix("torch."): dtype
          for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64,
                        torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
                        torch.complex64, torch.complex128)}


def written(tensor: Tensor, file: Writer) -> dict[str, Any]:
    """What a manifest says of a tensor that is put into a file."""
    if not is_dense(tuple(tensor.shape), tensor.stride()):
        tensor = tensor.contiguous()
    return {"shape": list(tensor.shape), "stride": list(tensor.stride()), "dtype": name_of(tensor),
            "offset": file.add(bytes_of(tensor))}


def name_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class Mapped:
    """Tensors in the memory of a file; each keeps the memory alive."""

    def __init__(self, memory: Any) -> None:
        self._memory, self._size = memory, len(memory)
        self._start = address_of(memory) if self._size else 0

    def tensor(self, data: Any) -> Tensor:
        """The tensor that a manifest describes; refused if it is not inside of the file."""
        try:
            return self._tensor(data)
        except (KeyError, TypeError, RuntimeError, OverflowError) as problem:  # torch's are three
            raise Refused(f"the manifest has a tensor that cannot be: {problem!r}") from None

    def _tensor(self, data: Any) -> Tensor:
        shape, stride, offset = _whole(data["shape"]), _whole(data["stride"]), data["offset"]
        dtype = DTYPES.get(data["dtype"])
        if dtype is None or len(shape) != len(stride) or not isinstance(offset, int):
            raise Refused(f"the manifest has a tensor that cannot be: {data}")
        count = math.prod(shape)
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride)) if count else 0
        size = span * dtype.itemsize
        if not count:
            return torch.empty(shape, dtype=dtype)
        if span != count or not 0 <= offset <= self._size - size or offset % dtype.itemsize:
            raise Refused(f"the manifest has a tensor that is not inside of its file: {data}")
        block = _block_type(size).from_address(self._start + offset)
        block.home = self._memory
        return torch.frombuffer(block, dtype=dtype, count=count).as_strided(shape, stride)


def _whole(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(
            type(value) is not int or value < 0 for value in values):
        raise Refused(f"the manifest has sizes that cannot be: {values}")
    return tuple(values)


def _block_type(size: int) -> Any:
    class Block(ctypes.c_char * size):  # type: ignore[misc]  # its size is known here only
        """Bytes with an attribute: who keeps their memory."""

    return Block

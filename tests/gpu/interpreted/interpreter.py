"""Triton's interpreter made honest: products as the hardware makes them, and memory watched.

By itself it multiplies bfloat16 as integers, cuts where it should round, ignores the precision of
a product, and lets reads outside a tensor pass.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

PRECISIONS = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")


class MemoryFault(AssertionError):
    """A program read or wrote what it must not."""


# numbers


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """float32 without its last bits, to the nearest, ties to even; what is not finite stays."""
    whole = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    half = np.uint64((1 << (bits - 1)) - 1) + ((whole >> np.uint64(bits)) & np.uint64(1))
    kept = ((whole + half) >> np.uint64(bits)) << np.uint64(bits)
    return np.where(np.isfinite(x), kept.astype(np.uint32).view(np.float32), x)


def cut(x: np.ndarray, bits: int) -> np.ndarray:
    """float32 without its last bits, as matrix units read it."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> bits << bits).view(np.float32)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    return (rounded(x, 16).view(np.uint32) >> 16).astype(np.uint16)


def parts(x: np.ndarray, bits: int, count: int) -> list[np.ndarray]:
    """x as a sum of shorter numbers."""
    found = []
    for _ in range(count):
        found.append(rounded(x, bits))
        x = x - found[-1]
    return found


def times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b, by torch, which can be told to use one thread; NumPy's wait for each other."""
    return (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()


def product(a: np.ndarray, b: np.ndarray, precision: str) -> np.ndarray:
    """a @ b of float32 as Triton makes it in each precision."""
    if precision == "ieee":
        return times(a, b)
    if precision == "tf32":
        return times(cut(a, 13), cut(b, 13))
    count = 3 if precision == "bf16x6" else 2
    bits = 13 if precision == "tf32x3" else 16
    left, right = parts(a, bits, count), parts(b, bits, count)
    pairs = [(i, j) for i in range(count) for j in range(count) if i + j < count]
    return sum(times(left[i], right[j]) for i, j in sorted(pairs, key=sum, reverse=True))


def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, imprecise: Any) -> Any:
    def wide(handle: Any) -> np.ndarray:
        if handle.dtype.scalar == tl.bfloat16:
            return from_bf16(handle.data)
        return handle.data.astype(np.float32)

    precision = str(input_precision).rpartition(".")[2].lower()
    if a.dtype.scalar != tl.float32:
        if a.data.shape[-1] < 16:
            raise ValueError("the compiler rejects fp16 products over fewer than 16 terms")
        precision = "ieee"  # fp16 and bf16 products are exact in float32
    return TensorHandle(product(wide(a), wide(b), precision) + d.data, d.dtype.scalar)


def cast_impl(self: Any, source: Any, kind: Any) -> Any:
    before, after = source.dtype.scalar, kind.scalar
    if before == tl.bfloat16 and after == tl.float32:
        return TensorHandle(from_bf16(source.data), after)
    if before == tl.float32 and after == tl.bfloat16:
        return TensorHandle(to_bf16(source.data), after)
    assert tl.bfloat16 not in (before, after), f"no honest cast from {before} to {after}"
    return TensorHandle(source.data.astype(interpreter._get_np_dtype(kind)), after)


def generic_reduce(self: Any, input: Any) -> Any:
    """A reduction by slices; by itself it goes element by element, hundreds of times slower."""
    data, = (tensor.handle.data for tensor in input)
    slices = [self.to_tensor(part, input[0].dtype) for part in np.moveaxis(data, self.axis, 0)]
    return [functools.reduce(self.combine_fn.fn, slices)]


READY: set[str] = set()  # modules whose language is the interpreter's


def call_device_function(self: Any, *args: Any, **options: Any) -> Any:
    """Makes the language ready once for a module; by itself it does in every call."""
    if self.fn.__module__ not in READY:
        READY.add(self.fn.__module__)
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **options)


# Triton's types: made anew with every value, which takes most of its time


@functools.cache
def sized(sizes: tuple[int, ...]) -> dict[str, Any]:
    """What a block's type keeps of its shape."""
    return {"shape": tl.tuple(sizes), "numel": validate_block_shape(sizes)}


@functools.cache
def shaped(sizes: tuple[int, ...]) -> dict[str, Any]:
    """What a value keeps of its shape."""
    return {"shape": tl.tuple([tl.constexpr(size) for size in sizes]),
            "numel": tl.constexpr(math.prod(sizes))}


def block_type_init(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty, self.name = element_ty, f"<{sizes}, {element_ty}>"
    self.__dict__.update(sized(sizes))


def tensor_init(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.__dict__.update(shaped(tuple(type.shape.values) if type.is_block() else ()))


def broadcast_impl_value(plain: Any) -> Any:
    """Blocks of one shape as they are."""
    def call(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block() and a.shape.values == b.shape.values:
            return lhs, rhs
        return plain(self, lhs, rhs)

    return call


# memory


NOBODY, MANY = -1, -2


class Watch:
    """Which program read and wrote each element of the tensors of one launch."""

    def __init__(self) -> None:
        self.first: np.ndarray = np.zeros(0, np.int64)
        self.seen: set[int] = set()

    def begin(self, tensors: list[Any]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        spans = sorted(storages.items())
        self.first = np.array([start for start, _ in spans], np.int64)
        self.last = np.array([start + size for start, size in spans], np.int64)
        self.offset = np.concatenate([[0], np.cumsum([size for _, size in spans])])
        self.writer = np.full(self.offset[-1], NOBODY, np.int64)
        self.reader = self.writer.copy()
        self.seen = set()

    def check(self, kind: str, pointers: Any, mask: Any) -> None:
        live = np.broadcast_to(mask.data, pointers.data.shape).ravel().astype(bool)
        places = pointers.data.ravel()[live].astype(np.int64)
        if not places.size:
            return
        width = pointers.get_element_ty().primitive_bitwidth // 8
        tensor = np.searchsorted(self.first, places, side="right") - 1
        outside = (tensor < 0) | (places + width > self.last[tensor])
        if outside.any():
            raise MemoryFault(f"{kind}: {int(outside.sum())} of {places.size} outside all tensors")
        at = places - self.first[tensor] + self.offset[tensor]
        me = self._program()
        getattr(self, kind)(at, me)

    def load(self, at: np.ndarray, me: int) -> None:
        if self._others(self.writer, at, me):
            raise MemoryFault("load: reads what another program writes")
        readers = self.reader[at]
        self.reader[at] = np.where((readers == NOBODY) | (readers == me), me, MANY)

    def store(self, at: np.ndarray, me: int) -> None:
        if np.unique(at).size != at.size:
            raise MemoryFault("store: one program writes a place twice at once")
        for owner, deed in ((self.writer, "writes"), (self.reader, "reads")):
            if self._others(owner, at, me):
                raise MemoryFault(f"store: writes what another program {deed}")
        self.writer[at] = me

    def atomic(self, at: np.ndarray, me: int) -> None:
        """Any number of programs may add to a place; nobody else may touch it."""
        if (self.writer[at] != NOBODY).any() or (self.reader[at] != NOBODY).any():
            raise MemoryFault("atomic: adds to what is also read or written")

    def _others(self, owner: np.ndarray, at: np.ndarray, me: int) -> bool:
        """Whether a program other than this one is named at these places."""
        return bool(((owner[at] != NOBODY) & (owner[at] != me)).any())

    def _program(self) -> int:
        x, y, z = (int(i) for i in interpreter_builder.grid_idx)
        program = (z << 42) + (y << 21) + x
        self.seen.add(program)
        return program


WATCH = Watch()


def _watched(kind: str, name: str, pointer: int, mask: int) -> None:
    plain = getattr(InterpreterBuilder, name)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        WATCH.check(kind, args[pointer], args[mask])
        return plain(self, *args, **options)

    setattr(InterpreterBuilder, name, call)


def _begin(plain: Any) -> Any:
    def init(self: Any, args: Any, options: Any) -> Any:
        placed = plain(self, args, options)
        WATCH.begin([t for t in (*placed[0], *placed[1].values()) if hasattr(t, "data_ptr")])
        return placed

    return init


def _remembered(find: Any) -> Any:
    """By itself it makes a table of all types in every call; pointers cannot be keys."""
    remembered = functools.cache(find)
    return lambda kind: remembered(kind) if type(kind) is tl.dtype else find(kind)


def install() -> None:
    """Once a process, before the first launch."""
    torch.set_num_threads(1)
    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.cast_impl = cast_impl
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    interpreter.ReduceOps.generic_reduce = generic_reduce
    tl.block_type.__init__, tl.tensor.__init__ = block_type_init, tensor_init
    TritonSemantic.broadcast_impl_value = broadcast_impl_value(TritonSemantic.broadcast_impl_value)
    interpreter.InterpretedFunction.__call__ = call_device_function
    # checks for integer overflow double the time, and the problems here are small
    interpreter_builder.options = dataclasses.replace(
        interpreter_builder.options, allowed_dot_input_precisions=PRECISIONS,
        sanitize_overflow=False)
    _watched("load", "create_masked_load", 0, 1)
    _watched("store", "create_masked_store", 0, 2)
    _watched("atomic", "create_atomic_rmw", 1, 3)
    interpreter.GridExecutor._init_args_hst = _begin(interpreter.GridExecutor._init_args_hst)

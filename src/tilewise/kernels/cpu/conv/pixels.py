"""Implicit GEMM with neighbouring pixels in the lanes, for layers with few channels.

A task unpacks its rows into planes of one channel each; weights are broadcast. Images may lie in
planes (NCHW) or channels-last (NHWC): finished tiles are then transposed in registers.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..between.epilogue import activate
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.elements import FLOAT32
from ..emit.microkernel import Walk, multiply
from ..emit.threads import BATCH, BIAS, RESIDUAL, SCRATCH, WEIGHT, X, Y, emit_entry, emit_region
from ..emit.tiling import Partition, ceil_div, emit_copy, emit_zero
from ..emit.transpose import transpose
from .geometry import Sizes


class Geometry(Sizes):
    """Every size of a convolution over pixels."""

    @cached_property
    def channels(self) -> Partition:
        """Output channels of a group in register tiles."""
        return Partition(self.p.group_k, self.s.tile_k)

    @cached_property
    def row_vectors(self) -> int:
        return ceil_div(self.p.conv_w, self.lanes)

    @cached_property
    def strips(self) -> Partition:
        """Vectors of a row in register tiles."""
        return Partition(self.row_vectors, self.s.vectors)

    @cached_property
    def row_blocks(self) -> int:
        return ceil_div(self.p.conv_h, self.s.block_rows)

    @cached_property
    def pitch(self) -> int:
        """A row of a plane; the last vector may read past the image, never past this."""
        return self.row_vectors * self.lanes + self.p.span_w - 1

    @cached_property
    def in_rows(self) -> int:
        height = min(self.s.block_rows, self.p.conv_h)
        return (height - 1) * self.p.stride[0] + self.p.span_h

    @cached_property
    def plane(self) -> int:
        return self.in_rows * self.pitch

    @cached_property
    def scratch_floats(self) -> int:
        """Scratch of one worker."""
        return ceil_div(self.p.group_c * self.plane, 16) * 16

    @cached_property
    def planar(self) -> bool:
        return self.p.layout == "nchw"

    @cached_property
    def in_strides(self) -> tuple[int, int, int]:
        """Floats from one input channel, row and column to the next."""
        p = self.p
        return (p.h * p.w, p.w, 1) if self.planar else (1, p.w * p.c, p.c)

    @cached_property
    def out_strides(self) -> tuple[int, int, int]:
        """Floats from one output channel, row and column to the next."""
        p = self.p
        return (p.conv_h * p.conv_w, p.conv_w, 1) if self.planar else (1, p.conv_w * p.k, p.k)

    @cached_property
    def depth(self) -> int:
        return self.p.group_c * self.p.r * self.p.s

    def walk(self, channels: int) -> Walk:
        """Channels, filter rows, filter columns; the weights of a tile lie side by side."""
        p = self.p
        row = p.s * channels
        return Walk(((p.group_c, p.r * row, self.plane),
                     (p.r, row, p.dilation[0] * self.pitch),
                     (p.s, channels, p.dilation[1])))

    def scratch_bytes(self, threads: int) -> int:
        return FLOAT32.bytes * threads * self.scratch_floats

    def pack_weight(self, weight: Any) -> Any:
        """(K, C, R, S) to [group][tile of K][c][r][s][k of the tile]."""
        bigs = self.channels.bigs * self.channels.big
        w = weight.reshape(self.p.groups, self.p.group_k, self.depth)
        parts = [w[:, :bigs].unflatten(1, (-1, self.channels.big))]
        if bigs < self.p.group_k:
            parts.append(w[:, bigs:].unflatten(1, (-1, self.channels.big - 1)))
        return torch.cat([part.transpose(2, 3).flatten(1) for part in parts], 1).contiguous()

    def tasks(self, batch: Any) -> Any:
        return batch * (self.p.groups * self.row_blocks)


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """The module of a direct convolution over pixels."""
    return _Pixels(Geometry(p, s, isa.lanes), isa).module()


class _Pixels:
    def __init__(self, geometry: Geometry, isa: Isa) -> None:
        self.g, self.p, self.s, self.isa = geometry, geometry.p, geometry.s, isa

    def module(self) -> Module:
        self.m = Module(self.isa)
        ends = [True] if self.g.strips.count == 1 else [True, False]
        self.tiles = {(size, strip, end): self._tile(size, strip, end)
                      for size in self.g.channels.sizes for strip in self.g.strips.sizes
                      for end in ends}
        self.unpack = self._unpack()
        body = self._body()
        emit_entry(self.m, [emit_region(
            self.m, "multiply", lambda f, frame: self.g.tasks(frame.load_index(BATCH)), body)])
        return self.m

    def _tile(self, channels: int, vectors: int, end: bool) -> Function:
        """One register tile; `end`: the last of its row, whose last vector is incomplete."""
        lanes = self.g.lanes
        with self.m.function(f"tile_{channels}x{vectors}{'_end' if end else ''}", weight="pointer",
                             x="pointer", bias="pointer", residual="pointer", y="pointer") as f:
            acc = multiply(f, f.weight, f.x, range(channels), vectors, self.g.walk(channels),
                           self.s.unroll)
            if self.p.epilogue.bias:
                acc = [[value + f.bias.broadcast(k) for value in row]
                       for k, row in enumerate(acc)]
            slopes = [f.bias.broadcast(self.p.k + k) if self.p.epilogue.has_slopes else None
                      for k in range(channels)]
            last = self.p.conv_w - (self.g.row_vectors - 1) * lanes
            for v in range(vectors):
                pixels = last if end and v == vectors - 1 else lanes
                store = self._store_planes if self.g.planar else self._store_pixels
                store(f, [row[v] for row in acc], v * lanes * self.g.out_strides[2], pixels, slopes)
        return f

    def _store_planes(self, f: Function, planes: list[Vector], at: int, pixels: int,
                      slopes: list[Any]) -> None:
        for k, (value, slope) in enumerate(zip(planes, slopes, strict=True)):
            self._put(f, value, at + k * self.g.out_strides[0], pixels, slope)

    def _store_pixels(self, f: Function, planes: list[Vector], at: int, pixels: int,
                      slopes: list[Any]) -> None:
        """Write `pixels` pixels of a tile's channels."""
        count, lanes = len(planes), self.g.lanes
        turned = transpose(f, planes)
        width = len(turned)
        sloped = [None] * width if None in slopes else transpose(f, slopes)  # lie as values do
        if width == count == self.p.k:  # pixels follow each other without a gap
            for i, (value, slope) in enumerate(zip(turned, sloped, strict=True)):
                self._put(f, value, at + i * lanes, min(lanes, pixels * count - i * lanes), slope)
            return
        for pixel in range(pixels):
            first = pixel * width
            piece = turned[first // lanes].slice(first % lanes, width)
            slope = sloped[first // lanes]
            slope = slope and slope.slice(first % lanes, width)
            self._put(f, piece, at + pixel * self.p.k, count, slope)

    def _put(self, f: Function, value: Vector, at: int, count: int, slope: Vector | None) -> None:
        if count <= 0:
            return
        if self.p.epilogue.residual:
            value = value + f.residual.load(at, lanes=value.lanes, count=count)
        f.y.store(activate(f, value, self.p.epilogue, slope), at, count=count)

    def _unpack(self) -> Function:
        """Copy rows into planes, zeros where they leave the image."""
        p, g = self.p, self.g
        width = p.padded_w
        kinds: Any = {"x": "pointer", "to": "pointer", "top": "index", "rows": "index"}
        with self.m.function("unpack", **kinds) as f, f.loop(f.rows) as row:
            y, to = f.top + row.i, f.to + row.i * g.pitch
            with f.either((y >= 0) & (y < p.h)) as (inside, outside):
                with inside:
                    self._unpack_row(f, f.x + y * g.in_strides[1], to)
                with outside, f.loop(p.group_c) as c:
                    emit_zero(f, to + c.i * g.plane, f.index(min(width, g.pitch)))
        return f

    def _unpack_row(self, f: Function, x: Pointer, to: Pointer) -> None:
        p, g = self.p, self.g
        left, right = p.padding[2], p.padding[3]
        shown = min(p.w, g.pitch - left)  # columns past the last filter position are not needed
        with f.loop(p.group_c) as c:
            plane, row = to + c.i * g.plane, x + c.i * g.in_strides[0]
            emit_zero(f, plane, f.index(left))
            self._copy_row(f, plane + left, row, shown)
            room = max(0, min(right, g.pitch - left - shown))
            emit_zero(f, plane + (left + shown), f.index(room))

    def _copy_row(self, f: Function, to: Pointer, row: Pointer, count: int) -> None:
        step = self.g.in_strides[2]
        if step == 1:
            emit_copy(f, to, row, count)
            return
        with f.loop(count) as col:
            (to + col.i).store((row + col.i * step).load(lanes=1))

    def _body(self) -> Function:
        g, p, s = self.g, self.p, self.s
        with self.m.function("body", frame="pointer", task="index", worker="index") as f:
            block, rest = f.task % g.row_blocks, f.task // g.row_blocks
            group, image = rest % p.groups, rest // p.groups
            top = block * s.block_rows
            bottom = (top + s.block_rows).minimum(p.conv_h)
            planes = f.frame.load_pointer(SCRATCH) + f.worker * g.scratch_floats
            channel = group * (p.group_c * g.in_strides[0])
            x = f.frame.load_pointer(X) + image * (p.h * p.w * p.c) + channel
            f.call(self.unpack, x, planes, top * p.stride[0] - p.padding[0],
                   (bottom - top - 1) * p.stride[0] + p.span_h)
            with f.loop(bottom, start=top) as row:
                at = (image * (p.conv_h * p.conv_w * p.k) + row.i * g.out_strides[1]
                      + group * (p.group_k * g.out_strides[0]))
                self._row(f, group, planes + (row.i - top) * (p.stride[0] * g.pitch), at)
        return f

    def _row(self, f: Function, group: Index, planes: Pointer, at: Index) -> None:
        """All tiles of one output row."""
        g, p = self.g, self.p
        weight = f.frame.load_pointer(WEIGHT) + group * (p.group_k * g.depth)
        for size, piece in g.channels.pieces(f, f.index(0), f.index(g.channels.count)):
            channel = g.channels.start(piece)
            for vectors, strip in g.strips.pieces(f, f.index(0), f.index(g.strips.count)):
                pixel = g.strips.start(strip) * g.lanes
                out = at + pixel * g.out_strides[2] + channel * g.out_strides[0]
                self._call(f, (size, vectors), strip, [
                    weight + channel * g.depth, planes + pixel,
                    f.frame.load_pointer(BIAS) + group * p.group_k + channel,
                    f.frame.load_pointer(RESIDUAL) + out, f.frame.load_pointer(Y) + out])

    def _call(self, f: Function, shape: tuple[int, int], strip: Index, args: list[Any]) -> None:
        """The tile that ends the row is one of its own."""
        end, middle = (*shape, True), (*shape, False)
        if self.g.strips.count == 1:
            f.call(self.tiles[end], *args)
            return
        with f.either(strip.equals(self.g.strips.count - 1)) as (yes, no):
            with yes:
                f.call(self.tiles[end], *args)
            with no:
                f.call(self.tiles[middle], *args)

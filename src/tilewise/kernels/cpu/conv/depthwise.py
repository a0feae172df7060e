"""Depthwise convolution: channels in the lanes, every loaded column used by all taps it meets.

Nothing is packed: rows outside the image are left out of the loop over filter rows, and tiles at
the left and right border are compiled with the taps that exist there.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..between.epilogue import finish
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.threads import BATCH, BIAS, RESIDUAL, WEIGHT, X, Y, emit_entry, emit_region
from ..emit.tiling import Partition, ceil_div
from .geometry import Sizes


class Geometry(Sizes):
    """Every size of a depthwise convolution."""

    @cached_property
    def cols(self) -> Partition:
        return Partition(self.p.conv_w, self.s.tile_w)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where the tiles of a row begin."""
        big, bigs = self.cols.big, self.cols.bigs
        return tuple(i * big - max(0, i - bigs) for i in range(self.cols.count + 1))

    @cached_property
    def row_blocks(self) -> int:
        return ceil_div(self.p.conv_h, self.s.block_rows)

    @cached_property
    def c_vectors(self) -> int:
        return ceil_div(self.p.c, self.lanes)

    def inside(self, tile: int) -> bool:
        """Whether no tap of a tile leaves the image sideways."""
        p = self.p
        first = self.starts[tile] * p.stride[1] - p.padding[2]
        last = (self.starts[tile + 1] - 1) * p.stride[1] - p.padding[2] + p.span_w - 1
        return first >= 0 and last < p.w

    def scratch_bytes(self, threads: int) -> int:
        return 0

    def pack_weight(self, weight: Any) -> Any:
        """(C, 1, R, S) to [vector of C][r][s][lane]."""
        p, width = self.p, self.c_vectors * self.lanes
        w = torch.nn.functional.pad(weight.reshape(p.c, p.r * p.s), (0, 0, 0, width - p.c))
        return w.unflatten(0, (-1, self.lanes)).transpose(1, 2).contiguous()

    def tasks(self, batch: Any) -> Any:
        return batch * self.row_blocks


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """The module of a depthwise convolution."""
    return _Depthwise(Geometry(p, s, isa.lanes), isa).module()


class _Depthwise:
    def __init__(self, geometry: Geometry, isa: Isa) -> None:
        self.g, self.p, self.s, self.isa = geometry, geometry.p, geometry.s, isa

    def module(self) -> Module:
        self.m = Module(self.isa)
        self.tiles: dict[tuple[int, int | None], Function] = {}
        body = self._body()
        emit_entry(self.m, [emit_region(
            self.m, "convolve", lambda f, frame: self.g.tasks(frame.load_index(BATCH)), body)])
        return self.m

    def _tile(self, width: int, start: int | None) -> Function:
        """A tile over all channels; `start` is its column where the border matters."""
        key = (width, start)
        if key not in self.tiles:
            name = f"tile_{width}" + ("" if start is None else f"_at_{start}")
            lanes, c = self.g.lanes, self.p.c
            with self.m.function(name, x="pointer", weight="pointer", bias="pointer",
                                 residual="pointer", y="pointer", low="index",
                                 high="index") as f:
                whole = c // lanes * lanes
                with f.loop(whole, step=lanes) as channel:
                    self._channels(f, width, start, channel.i, lanes)
                if c > whole:
                    self._channels(f, width, start, f.index(whole), c - whole)
            self.tiles[key] = f
        return self.tiles[key]

    def _channels(self, f: Function, width: int, start: int | None, channel: Index,
                  count: int) -> None:
        """One vector of channels of a tile."""
        p = self.p
        x, taps = f.x + channel, f.weight + channel * (p.r * p.s)
        zeros = [f.vector(0.0)] * width
        with f.loop(f.high, start=f.low, carry=zeros) as r:
            row = x + r.i * (p.dilation[0] * p.w * p.c)
            r.values = self._filter_row(f, row, taps + r.i * (p.s * self.g.lanes), r.values,
                                        start, count)
        for i, value in enumerate(r.values):
            at = channel + i * p.k
            value = finish(f, value, p, (f.bias, channel), (f.residual, at), count)
            (f.y + at).store(value, count=count)

    def _filter_row(self, f: Function, x: Pointer, taps: Pointer, acc: list[Vector],
                    start: int | None, count: int) -> list[Vector]:
        """Each column is loaded once and meets every tap that covers it."""
        p, acc = self.p, list(acc)
        weights = [taps.load(s * self.g.lanes) for s in range(p.s)]
        meetings: dict[int, list[tuple[int, int]]] = {}
        for i in range(len(acc)):
            for s in range(p.s):
                meetings.setdefault(i * p.stride[1] + s * p.dilation[1], []).append((i, s))
        first = 0 if start is None else start * p.stride[1] - p.padding[2]
        for column, pairs in sorted(meetings.items()):
            if start is not None and not 0 <= first + column < p.w:
                continue
            value = x.load(column * p.c, count=count)
            for i, s in pairs:
                acc[i] = f.fma(value, weights[s], acc[i])
        return acc

    def _body(self) -> Function:
        g, p, s = self.g, self.p, self.s
        with self.m.function("body", frame="pointer", task="index", worker="index") as f:
            block, image = f.task % g.row_blocks, f.task // g.row_blocks
            top = block * s.block_rows
            with f.loop((top + s.block_rows).minimum(p.conv_h), start=top) as row:
                y = row.i * p.stride[0] - p.padding[0]
                low, high = self._filter_rows(y)
                x = f.frame.load_pointer(X) + (image * p.h + y) * (p.w * p.c)
                at = (image * p.conv_h + row.i) * (p.conv_w * p.k)
                self._row(f, x, at, low, high)
        return f

    def _filter_rows(self, y: Index) -> tuple[Index, Index]:
        """The filter rows that meet the image when the first one lies at input row y."""
        d, p = self.p.dilation[0], self.p
        low = ((0 - y).maximum(0) + (d - 1)) // d
        high = ((p.h - y).maximum(0) + (d - 1)) // d
        return low, high.minimum(p.r)

    def _row(self, f: Function, x: Pointer, at: Index, low: Index, high: Index) -> None:
        """The tiles of a row: borders one by one, the inside in a loop."""
        g = self.g
        inside = [tile for tile in range(g.cols.count) if g.inside(tile)]
        for tile in (t for t in range(g.cols.count) if t not in inside):
            start, stop = g.starts[tile], g.starts[tile + 1]
            self._call(f, self._tile(stop - start, start), x, f.index(start), at, low, high)
        if inside:
            for width, piece in g.cols.pieces(f, f.index(inside[0]), f.index(inside[-1] + 1)):
                self._call(f, self._tile(width, None), x, g.cols.start(piece), at, low, high)

    def _call(self, f: Function, tile: Function, x: Pointer, col: Index, at: Index, low: Index,
              high: Index) -> None:
        p, out = self.p, at + col * self.p.k
        f.call(tile, x + (col * p.stride[1] - p.padding[2]) * p.c, f.frame.load_pointer(WEIGHT),
               f.frame.load_pointer(BIAS), f.frame.load_pointer(RESIDUAL) + out,
               f.frame.load_pointer(Y) + out, low, high)

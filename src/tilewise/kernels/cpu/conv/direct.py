"""Implicit GEMM with output channels in the lanes.

A task packs a zero-padded rectangle of the input (or reads the input itself where nothing has
to be padded), then multiplies it with one block of output channels after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ....core.isa import Isa
from ....core.problem import Epilogue, Problem
from ....core.schedule import Schedule
from ..between.epilogue import finish
from ..between.pooling import emit_pool
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.elements import FLOAT32
from ..emit.microkernel import LINE, Walk, multiply
from ..emit.threads import (
    BATCH,
    BIAS,
    RESIDUAL,
    SCRATCH,
    THREADS,
    WEIGHT,
    X,
    Y,
    emit_entry,
    emit_region,
)
from ..emit.tiling import Partition, ceil_div, emit_copy, emit_zero
from .geometry import BlocksOfK

CHUNK = 16  # steps between two times that weights are fetched


class Geometry(BlocksOfK):
    """Every size of a direct convolution."""

    @cached_property
    def rows(self) -> Partition:
        return Partition(self.p.conv_h, self.s.tile_h)

    @cached_property
    def cols(self) -> Partition:
        return Partition(self.p.conv_w, self.s.tile_w)

    @cached_property
    def row_blocks(self) -> int:
        return ceil_div(self.rows.count, self.s.block_rows)

    @cached_property
    def col_blocks(self) -> int:
        return ceil_div(self.cols.count, self.s.block_cols)

    @cached_property
    def slice_c(self) -> int:
        """Input channels one task reduces over."""
        return self.p.group_c // self.s.split

    @cached_property
    def packed(self) -> bool:
        return any(self.p.padding) or self.p.groups > 1 or self.s.split > 1

    @cached_property
    def row_pitch(self) -> int:
        """Floats from one input row to the next, as the micro-kernel sees them."""
        if not self.packed:
            return self.p.w * self.p.c
        width = self.cols.widest(self.s.block_cols)
        return ((width - 1) * self.p.stride[1] + self.p.span_w) * self.slice_c

    @cached_property
    def pack_floats(self) -> int:
        """Scratch of one worker."""
        if not self.packed:
            return 0
        height = self.rows.widest(self.s.block_rows)
        floats = ((height - 1) * self.p.stride[0] + self.p.span_h) * self.row_pitch
        return ceil_div(floats, 16) * 16  # workers do not share a cache line

    @cached_property
    def partial_floats(self) -> int:
        """Scratch of one image whose sums are still to be added up, or pooled."""
        if self.s.split == self.p.epilogue.pool == 1:
            return 0
        return self.p.conv_h * self.p.conv_w * self.p.k * int(self.s.split)

    def walk(self, vectors: int) -> Walk:
        """The reduction, against a panel that is `vectors` wide."""
        down = (self.p.r, self.p.dilation[0] * self.row_pitch)
        width = vectors * self.lanes
        if self.p.dilation[1] == 1:  # neighbouring taps are neighbours in memory
            steps = self.p.s * self.slice_c
            if self.lines_ahead:
                return Walk.packed(width, down, (steps // CHUNK, CHUNK), (CHUNK, 1))
            return Walk.packed(width, down, (steps, 1))
        across = (self.p.s, self.p.dilation[1] * self.slice_c)
        return Walk.packed(width, down, across, (self.slice_c, 1))

    @cached_property
    def task_tiles(self) -> int:
        """Register tiles of a task against one block of output channels."""
        return min(self.rows.count, self.s.block_rows) * min(self.cols.count, self.s.block_cols)

    @cached_property
    def lines_ahead(self) -> int:
        """Cache lines of the next block's weights to fetch in a chunk of steps.

        With few pixels, weights are hardly used before the next are needed; with many, fetching
        them takes longer than waiting for them.
        """
        steps = self.p.s * self.slice_c
        if self.k_blocks == 1 or self.p.dilation[1] > 1 or steps % CHUNK or steps == CHUNK:
            return 0
        needed = CHUNK * self.s.vectors * self.lanes
        return 0 if 2 * needed < LINE * self.task_tiles else ceil_div(
            needed, LINE * self.task_tiles)

    @cached_property
    def tile_fetches(self) -> int:
        """Floats that one tile fetches."""
        return self.depth // CHUNK * self.lines_ahead * LINE

    @cached_property
    def depth(self) -> int:
        """Products in one partial sum."""
        return self.p.r * self.p.s * self.slice_c

    @cached_property
    def panel_floats(self) -> int:
        """Weights of one (group, slice)."""
        return self.depth * self.k_vectors * self.lanes

    def scratch_bytes(self, threads: int) -> int:
        return FLOAT32.bytes * (self.p.n * self.partial_floats + threads * self.pack_floats)

    def pack_weight(self, weight: Any) -> Any:
        """(K, C, R, S) to [group][slice][block of K][r][s][c][lane]."""
        p = self.p
        w = weight.reshape(p.groups, p.group_k, self.s.split, self.slice_c, p.r, p.s)
        w = w.permute(0, 2, 4, 5, 3, 1).reshape(p.groups * self.s.split, self.depth, p.group_k)
        blocks, rest = self.in_blocks(w)
        return torch.cat([blocks.flatten(1), rest.flatten(1)], 1).contiguous()

    def tasks(self, batch: Any) -> Any:
        return (batch * (self.p.groups * self.s.split * self.row_blocks)
                * (self.col_blocks * self.s.k_parts))


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """The module of a direct convolution."""
    return _Direct(Geometry(p, s, isa.lanes), isa).module()


@dataclass(frozen=True)
class _Task:
    """Where one task reads and writes; all values are emitted ones."""

    a: Pointer
    y: Pointer
    residual: Pointer
    bias: Pointer
    weight: Pointer
    rows: tuple[Index, Index]
    cols: tuple[Index, Index]
    top: Index
    left: Index


class _Direct:
    def __init__(self, geometry: Geometry, isa: Isa) -> None:
        self.g, self.p, self.s, self.isa = geometry, geometry.p, geometry.s, isa
        # parts of sums are stored as they are
        self.tail = self.p.with_(epilogue=Epilogue()) if self.s.split > 1 else self.p

    def module(self) -> Module:
        self.m = Module(self.isa)
        self.tiles = self._tiles()
        self.pack = self._pack() if self.g.packed else None
        body = self._body()
        regions = [emit_region(self.m, "multiply",
                               lambda f, frame: self.g.tasks(frame.load_index(BATCH)), body)]
        if self.s.split > 1:
            regions.append(self._reduction())
        if self.p.epilogue.pool > 1:
            regions.append(emit_pool(self.m, self.p, self._result))
        emit_entry(self.m, regions)
        return self.m

    # the register tiles

    def _tiles(self) -> dict[tuple[int, int, bool], Function]:
        return {(height, width, end): self._tile(height, width, end)
                for height in self.g.rows.sizes for width in self.g.cols.sizes
                for end in self.g.ends}

    def _tile(self, height: int, width: int, end: bool) -> Function:
        """One register tile; `end`: the last, incomplete block of output channels."""
        p, g = self.p, self.g
        channels, vectors = g.channels(end), g.vectors(end)
        across, down = p.stride[1] * g.slice_c, p.stride[0] * g.row_pitch
        pixels = [(i, j) for i in range(height) for j in range(width)]
        with self.m.function(f"tile_{height}x{width}{'_end' if end else ''}", a="pointer",
                             b="pointer", bias="pointer", residual="pointer", y="pointer",
                             ahead="pointer") as f:
            acc = multiply(f, f.a, f.b, [i * down + j * across for i, j in pixels], vectors,
                           g.walk(vectors), self.s.unroll,
                           (f.ahead, g.lines_ahead) if g.lines_ahead else None)
            for (i, j), row in zip(pixels, acc, strict=True):
                self._store(f, row, (i * p.conv_w + j) * p.k, channels)
        return f

    def _store(self, f: Function, row: list[Vector], at: int, channels: int) -> None:
        for j, value in enumerate(row):
            k = j * self.g.lanes
            count = min(self.g.lanes, channels - k)
            value = finish(f, value, self.tail, (f.bias, k), (f.residual, at + k), count)
            streaming = self.s.streaming and count == self.g.lanes
            f.y.store(value, at + k, count=count, streaming=streaming)

    # packing

    def _pack(self) -> Function:
        """Copy a rectangle of one slice of channels, zeros where it leaves the image."""
        p, c = self.p, self.g.slice_c
        with self.m.function("pack", x="pointer", to="pointer", top="index", left="index",
                             rows="index", cols="index") as f:
            start = (0 - f.left).maximum(0).minimum(f.cols)
            stop = (p.w - f.left).maximum(start).minimum(f.cols)
            with f.loop(f.rows) as row:
                y, to = f.top + row.i, f.to + row.i * self.g.row_pitch
                with f.either((y >= 0) & (y < p.h)) as (inside, outside):
                    with inside:
                        emit_zero(f, to, start * c)
                        self._copy_pixels(f, to + start * c,
                                          f.x + (y * p.w + f.left + start) * p.c, stop - start)
                        emit_zero(f, to + stop * c, (f.cols - stop) * c)
                    with outside:
                        emit_zero(f, to, f.cols * c)
        return f

    def _copy_pixels(self, f: Function, to: Pointer, source: Pointer, count: Index) -> None:
        c = self.g.slice_c
        if c == self.p.c:
            emit_copy(f, to, source, count * c)
            return
        with f.loop(count) as pixel:
            emit_copy(f, to + pixel.i * c, source + pixel.i * self.p.c, c)

    # one task

    def _body(self) -> Function:
        g, s = self.g, self.s
        with self.m.function("body", frame="pointer", task="index", worker="index") as f:
            part, rest = f.task % s.k_parts, f.task // s.k_parts
            task = self._locate(f, rest)
            first = part * g.k_blocks // s.k_parts
            last = (part + 1) * g.k_blocks // s.k_parts
            whole = g.k_blocks - int(g.has_tail)
            if whole:
                with f.loop(last.minimum(whole), start=first) as block:
                    self._block(f, task, block.i, last, end=False)
            if g.has_tail:
                with f.when(last.equals(g.k_blocks)):
                    self._block(f, task, f.index(whole), last, end=True)
        return f

    def _next_block(self, f: Function, block: Index, last: Index) -> Index:
        """What this worker will probably multiply next: others take the tasks in between."""
        parts = self.s.k_parts
        part = (f.task + f.frame.load_index(THREADS)) % parts
        return (block + 1 < last).select(block + 1, part * self.g.k_blocks // parts)

    def _locate(self, f: Function, index: Index) -> _Task:
        """Decode a task number; pack its input where that is needed."""
        g, p, s = self.g, self.p, self.s
        col_block, index = index % g.col_blocks, index // g.col_blocks
        row_block, index = index % g.row_blocks, index // g.row_blocks
        part, index = index % s.split, index // s.split
        group, image = index % p.groups, index // p.groups
        rows = (row_block * s.block_rows, ((row_block + 1) * s.block_rows).minimum(g.rows.count))
        cols = (col_block * s.block_cols, ((col_block + 1) * s.block_cols).minimum(g.cols.count))
        top, left = g.rows.start(rows[0]), g.cols.start(cols[0])
        channel = group * p.group_c + part * g.slice_c
        x = f.frame.load_pointer(X) + image * (p.h * p.w * p.c) + channel
        in_top, in_left = top * p.stride[0] - p.padding[0], left * p.stride[1] - p.padding[2]
        a = x + (in_top * p.w + in_left) * p.c
        if self.pack:
            batch = f.frame.load_index(BATCH)
            a = f.frame.load_pointer(SCRATCH) + batch * g.partial_floats + f.worker * g.pack_floats
            in_rows = (g.rows.start(rows[1]) - top - 1) * p.stride[0] + p.span_h
            in_cols = (g.cols.start(cols[1]) - left - 1) * p.stride[1] + p.span_w
            f.call(self.pack, x, a, in_top, in_left, in_rows, in_cols)
        at = ((image * p.conv_h + top) * p.conv_w + left) * p.k + group * p.group_k
        return _Task(
            a, self._output(f, part) + at, f.frame.load_pointer(RESIDUAL) + at,
            f.frame.load_pointer(BIAS) + group * p.group_k,
            f.frame.load_pointer(WEIGHT) + (group * s.split + part) * g.panel_floats,
            rows, cols, top, left)

    def _output(self, f: Function, part: Index) -> Pointer:
        if self.s.split == 1:
            return self._result(f)
        one_part = f.frame.load_index(BATCH) * (self.g.partial_floats // self.s.split)
        return f.frame.load_pointer(SCRATCH) + part * one_part

    def _result(self, f: Function) -> Pointer:
        """Where sums go that are not to be added up: to be pooled, in the place of the first."""
        return f.frame.load_pointer(Y if self.p.epilogue.pool == 1 else SCRATCH)

    def _block(self, f: Function, task: _Task, block: Index, last: Index, end: bool) -> None:
        """All tiles of a task against one block of output channels."""
        g, p = self.g, self.p
        channel = block * g.block_k
        weight = task.weight + channel * g.depth
        ahead = weight if not g.lines_ahead else (
            task.weight + self._next_block(f, block, last) * (g.block_k * g.depth))
        for height, row in g.rows.pieces(f, *task.rows):
            down = g.rows.start(row) - task.top
            for width, col in g.cols.pieces(f, *task.cols):
                across = g.cols.start(col) - task.left
                a = task.a + (down * (p.stride[0] * g.row_pitch)
                              + across * (p.stride[1] * g.slice_c))
                at = (down * p.conv_w + across) * p.k + channel
                number = (row - task.rows[0]) * (task.cols[1] - task.cols[0]) + col - task.cols[0]
                f.call(self.tiles[height, width, end], a, weight, task.bias + channel,
                       task.residual + at, task.y + at, ahead + number * g.tile_fetches)

    # the second stage of a split reduction

    def _reduction(self) -> Function:
        """Sum the parts in their order, whatever thread made them; then the epilogue."""
        p, lanes = self.p, self.isa.lanes
        image = p.conv_h * p.conv_w * p.k
        with self.m.function("sum", frame="pointer", task="index", worker="index") as f:
            pointers = [f.frame.load_pointer(i) for i in (SCRATCH, BIAS, RESIDUAL)]
            (parts, bias, residual), y = pointers, self._result(f)
            batch = f.frame.load_index(BATCH)

            def one(k: Index | int, at: Index, count: int | None) -> None:
                total = (parts + at).load(count=count)
                for part in range(1, self.s.split):
                    total = total + (parts + batch * (image * part) + at).load(count=count)
                total = finish(f, total, p, (bias, k), (residual, at), count)
                (y + at).store(total, count=count)

            with f.loop(p.conv_w) as col:
                pixel = (f.task * p.conv_w + col.i) * p.k
                whole = p.k // lanes * lanes
                with f.loop(whole, step=lanes) as k:
                    one(k.i, pixel + k.i, None)
                if p.k > whole:
                    one(whole, pixel + whole, p.k - whole)
        return emit_region(self.m, "reduce",
                           lambda f, frame: frame.load_index(BATCH) * p.conv_h, f)

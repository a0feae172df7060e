"""Implicit GEMM with output channels in the lanes.

A task packs a zero-padded rectangle of the input (or reads the input itself where nothing has
to be padded), then multiplies it with one block of output channels after the other. Dilated
filters leave out the taps that see padding, and read the input itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....core.isa import Isa
from ....core.problem import Epilogue, Problem
from ....core.schedule import Schedule
from ..between.epilogue import finish, is_long
from ..between.pooling import emit_pool
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.elements import FLOAT32
from ..emit.microkernel import LINE, multiply
from ..emit.sizes import InCode
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
from ..emit.tiling import emit_copy, emit_pieces, emit_zero
from .direct_geometry import CHUNK, FREE, SIZES, Geometry
from .direct_taps import each_stretch, seen_by_row

__all__ = ["FREE", "SIZES", "Geometry", "make"]


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
    pieces: list[Index]
    top: Index


class _Direct:
    def __init__(self, geometry: Geometry, isa: Isa) -> None:
        self.g, self.p, self.s, self.isa = geometry, geometry.p, geometry.s, isa
        # parts of sums are stored as they are
        self.tail = self.p.with_(epilogue=Epilogue()) if self.s.split > 1 else self.p
        waits = self.s.split > 1 or self.p.epilogue.pool > 1  # in scratch, for another region
        self.sums = FLOAT32 if waits else geometry.image

    def module(self) -> Module:
        self.m = Module(self.isa)
        self.tiles = self._tiles()
        self.pack = self._pack() if self.g.packed else None
        body = self._body()
        regions = [emit_region(self.m, "multiply", self._tasks, body)]
        if self.s.split > 1:
            regions.append(self._reduction())
        if self.p.epilogue.pool > 1:
            regions.append(emit_pool(self.m, self.p, self._sizes, self._result))
        emit_entry(self.m, regions)
        return self.m

    def _sizes(self, f: Function) -> InCode:
        """The geometry, with what image sizes decide from the frame."""
        return InCode(f, self.g, SIZES)

    def _tasks(self, f: Function, frame: Pointer) -> Index:
        z = self._sizes(f)
        tasks = frame.load_index(BATCH) * (self.p.groups * self.s.split) * z.k_parts
        return tasks * z.row_blocks * z.col_blocks

    # the register tiles

    def _tiles(self) -> dict[tuple[int, bool], Function]:
        return {(width, end): self._tile(width, end)
                for width in self.g.widths for end in self.g.ends}

    def _tile(self, width: int, end: bool) -> Function:
        """One register tile; `end`: the last, incomplete block of output channels."""
        p, g, height = self.p, self.g, self.s.tile_h
        channels, vectors = g.channels(end), g.vectors(end)
        across = p.stride[1] * g.pixel
        taps: Any = {"rows": "index", "cols": "index"} if g.skips else {}
        with self.m.function(f"tile_{height}x{width}{'_end' if end else ''}", frame="pointer",
                             a="pointer", b="pointer", bias="pointer", residual=g.image,
                             y=self.sums, ahead="pointer", **taps) as f:
            z = self._sizes(f)
            pitch = z.row_pitch if height > 1 or p.r > 1 else 0
            ahead = (f.ahead, z.lines_ahead) if g.fetches else None
            rows = [pitch * (i * p.stride[0]) + j * across if i else j * across
                    for i in range(height) for j in range(width)]
            # what is used less may be shorter
            unroll = self.s.unroll if width == self.s.tile_w else min(2, self.s.unroll)
            walk = (g.walk_seen(vectors, pitch, f.rows, f.cols) if g.skips
                    else g.walk(vectors, pitch))
            acc = multiply(f, f.a, f.b, rows, vectors, walk, unroll, ahead)
            for i in range(height):
                down = g.y_rows(z, i) if i else 0
                self._store_row(f, acc[i * width:(i + 1) * width], f.y + down, f.residual + down,
                                channels)
        return f

    def _store_row(self, f: Function, row: list[list[Vector]], y: Pointer, residual: Pointer,
                   channels: int) -> None:
        """A row of pixels; where the epilogue is long, sums wait on the stack for a loop.

        Not in their places: a tile that is moved back shares those with another thread.
        """
        apart = self.g.y_step(self._sizes(f))
        if not is_long(self.tail.epilogue):
            for j, pixel in enumerate(row):
                self._store(f, pixel, y + j * apart, residual + j * apart, channels)
            return
        lanes = self.g.lanes
        vectors = len(row[0])
        waiting = f.words(-(-len(row) * vectors * lanes // 2))
        for i, value in enumerate(value for pixel in row for value in pixel):
            waiting.store(value, i * lanes)
        side = next(n for n in (4, 2, 1) if n == 1 or (len(row) % n == 0 and n * vectors <= 4))
        with f.loop(len(row), step=side) as first:
            for j in range(side):  # so many as hide each other's latency
                at = first.i + j
                sums = [(waiting + at * (vectors * lanes)).load(v * lanes) for v in range(vectors)]
                self._store(f, sums, y + at * apart, residual + at * apart, channels)

    def _store(self, f: Function, row: list[Vector], y: Pointer, residual: Pointer,
               channels: int) -> None:
        for j, value in enumerate(row):
            k = j * self.g.lanes
            count = min(self.g.lanes, channels - k)
            value = finish(f, value, self.tail, (f.bias, k), (residual, k), count)
            streaming = self.s.streaming and count == self.g.lanes
            y.store(value, k, count=count, streaming=streaming)

    # packing

    def _pack(self) -> Function:
        """Copy a rectangle of one slice of channels, zeros where it leaves the image."""
        c = self.g.slice_c
        with self.m.function("pack", frame="pointer", x=self.g.image, to="pointer", top="index",
                             left="index", rows="index", cols="index") as f:
            z = self._sizes(f)
            h, w, pitch, step = z.h, z.w, z.row_pitch, self.g.x_step(z)
            start = (0 - f.left).maximum(0).minimum(f.cols)
            stop = (w - f.left).maximum(start).minimum(f.cols)
            with f.loop(f.rows) as row:
                y, to = f.top + row.i, f.to + row.i * pitch
                with f.either((y >= 0) & (y < h)) as (inside, outside):
                    with inside:
                        emit_zero(f, to, start * c)
                        self._copy_pixels(f, to + start * c,
                                          f.x + (y * w + f.left + start) * step,
                                          stop - start)
                        emit_zero(f, to + stop * c, (f.cols - stop) * c)
                    with outside:
                        emit_zero(f, to, f.cols * c)
        return f

    def _copy_pixels(self, f: Function, to: Pointer, source: Pointer, count: Index) -> None:
        c, step = self.g.slice_c, self.g.x_step(self._sizes(f))
        if c == step:
            emit_copy(f, to, source, count * c)
            return
        with f.loop(count) as pixel:
            emit_copy(f, to + pixel.i * c, source + pixel.i * step, c)

    # one task

    def _body(self) -> Function:
        g = self.g
        with self.m.function("body", frame="pointer", task="index", worker="index") as f:
            parts = self._sizes(f).k_parts
            part, rest = f.task % parts, f.task // parts
            task = self._locate(f, rest)
            first, last = part * g.k_blocks // parts, (part + 1) * g.k_blocks // parts
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
        parts = self._sizes(f).k_parts
        part = (f.task + f.frame.load_index(THREADS)) % parts
        return (block + 1 < last).select(block + 1, part * self.g.k_blocks // parts)

    def _locate(self, f: Function, index: Index) -> _Task:
        """Decode a task number; pack its input where that is needed."""
        g, p, s, z = self.g, self.p, self.s, self._sizes(f)
        col_block, index = index % z.col_blocks, index // z.col_blocks
        row_block, index = index % z.row_blocks, index // z.row_blocks
        part, index = index % s.split, index // s.split
        group, image = index % p.groups, index // p.groups
        rows = (row_block * z.block_rows, ((row_block + 1) * z.block_rows).minimum(z.row_tiles))
        top, bottom = self._row(z, rows[0]), self._row(z, rows[1] - 1) + s.tile_h
        last = col_block.equals(z.col_blocks - 1)
        left = (col_block * z.block_w).minimum((z.conv_w - s.tile_w).maximum(0))
        right = ((col_block + 1) * z.block_w).minimum(z.conv_w)
        channel, step = group * p.group_c + part * g.slice_c, g.x_step(z)
        x = f.frame.load_pointer(X, g.image) + image * (z.h * z.w * step) + channel
        in_top, in_left = top * p.stride[0] - z.top, left * p.stride[1] - z.left
        a = x + (in_top * z.w + in_left) * step
        if self.pack:
            batch = f.frame.load_index(BATCH)
            a = f.frame.load_pointer(SCRATCH) + batch * z.partial_floats + f.worker * z.pack_floats
            in_rows = (bottom - top - 1) * p.stride[0] + p.span_h
            in_cols = (right - left - 1) * p.stride[1] + p.span_w
            f.call(self.pack, f.frame, x, a, in_top, in_left, in_rows, in_cols)
        at = g.y_at(z, image, top, left) + group * p.group_k
        pieces = [last.select(getattr(z, f"pieces_{i}"), z.block_cols if i == 0 else f.index(0))
                  for i in range(len(g.widths))]
        return _Task(
            a, self._output(f, part) + at, f.frame.load_pointer(RESIDUAL, g.image) + at,
            f.frame.load_pointer(BIAS) + group * p.group_k,
            f.frame.load_pointer(WEIGHT) + (group * s.split + part) * g.panel_floats,
            rows, (left, right), pieces, top)

    def _row(self, z: InCode, tile: Index) -> Index:
        """Where a row of tiles begins; the last is moved up to end with the image."""
        return (tile * self.s.tile_h).minimum(z.conv_h - self.s.tile_h)

    def _output(self, f: Function, part: Index) -> Pointer:
        if self.s.split == 1:
            return self._result(f)
        one_part = f.frame.load_index(BATCH) * (self._sizes(f).partial_floats // self.s.split)
        return f.frame.load_pointer(SCRATCH) + part * one_part

    def _result(self, f: Function) -> Pointer:
        """Where sums go that are not to be added up: to be pooled, in the place of the first."""
        if self.p.epilogue.pool == 1:
            return f.frame.load_pointer(Y, self.g.image)
        return f.frame.load_pointer(SCRATCH)

    def _block(self, f: Function, task: _Task, block: Index, last: Index, end: bool) -> None:
        """All tiles of a task against one block of output channels."""
        g, p, z = self.g, self.p, self._sizes(f)
        channel = block * g.block_k
        weight = task.weight + channel * g.depth
        ahead, fetched, across = weight, f.index(0), f.index(0)
        if g.fetches:
            ahead = task.weight + self._next_block(f, block, last) * (g.block_k * g.depth)
            fetched = z.lines_ahead * (g.depth // CHUNK * LINE)  # floats that one tile fetches
            across = sum(task.pieces[1:], task.pieces[0])
        left, right = task.cols
        with f.loop(task.rows[1], start=task.rows[0]) as row:
            down = self._row(z, row.i) - task.top
            a, at = task.a + down * z.row_pitch * p.stride[0], g.y_rows(z, down) + channel
            if g.skips:
                self._seen_tiles(f, task, row.i, a, weight, at, channel, end)
            else:
                before = (row.i - task.rows[0]) * across
                for width, col, number in emit_pieces(f, g.widths, task.pieces, f.index(0),
                                                      right - left):
                    here = at + col * g.y_step(z)
                    f.call(self.tiles[width, end], f.frame, a + col * (p.stride[1] * g.pixel),
                           weight, task.bias + channel, task.residual + here, task.y + here,
                           ahead + (before + number) * fetched)

    def _seen_tiles(self, f: Function, task: _Task, row: Index, a: Pointer, weight: Pointer,
                    at: Index, channel: Index, end: bool) -> None:
        """A row of tiles with the taps that see the image; row and columns are those of outputs."""
        g, p, z = self.g, self.p, self._sizes(f)
        (left, right), (down, across) = task.cols, p.dilation
        rows, panel = seen_by_row(z, row), g.vectors(end) * g.lanes
        with each_stretch(f, z, left, right) as part:
            taps = part.taps
            first = a + (rows.first * down * z.row_pitch + taps.first * (across * g.pixel))
            b = weight + g.tap_floats(panel, rows.first, taps.first)
            for width, col, _ in emit_pieces(f, g.widths, part.pieces, part.start, part.stop):
                here = at + (col - left) * g.y_step(z)
                f.call(self.tiles[width, end], f.frame,
                       first + (col - left) * (p.stride[1] * g.pixel), b, task.bias + channel,
                       task.residual + here, task.y + here, b, rows.count, taps.count)

    # the second stage of a split reduction

    def _reduction(self) -> Function:
        """Sum the parts in their order, whatever thread made them; then the epilogue."""
        p, lanes = self.p, self.isa.lanes
        with self.m.function("sum", frame="pointer", task="index", worker="index") as f:
            z = self._sizes(f)
            parts, bias = f.frame.load_pointer(SCRATCH), f.frame.load_pointer(BIAS)
            residual, y = f.frame.load_pointer(RESIDUAL, self.g.image), self._result(f)
            one_part = f.frame.load_index(BATCH) * (z.partial_floats // self.s.split)

            def one(k: Index | int, at: Index, count: int | None) -> None:
                total = (parts + at).load(count=count)
                for part in range(1, self.s.split):
                    total = total + (parts + one_part * part + at).load(count=count)
                total = finish(f, total, p, (bias, k), (residual, at), count)
                (y + at).store(total, count=count)

            width = z.conv_w
            with f.loop(width) as col:
                pixel = (f.task * width + col.i) * p.k
                whole = p.k // lanes * lanes
                with f.loop(whole, step=lanes) as k:
                    one(k.i, pixel + k.i, None)
                if p.k > whole:
                    one(whole, pixel + whole, p.k - whole)
        return emit_region(
            self.m, "reduce",
            lambda f, frame: frame.load_index(BATCH) * self._sizes(f).conv_h, f)

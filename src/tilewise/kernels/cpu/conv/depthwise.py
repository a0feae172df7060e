"""Depthwise convolution: channels in the lanes, every loaded column used by all taps it meets.

So are small groups of channels, of which whole ones share a vector of outputs: for each channel of
a group, the lanes of all its outputs hold it.

Nothing is packed: rows outside the image are left out of the loop over filter rows, and columns
that may lie outside are skipped by branches, which cost nothing inside the image.
"""

from __future__ import annotations

from typing import Any

from ....core.cached import cached
from ....core.cut import counts, piece_sizes
from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..between.epilogue import finish
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.sizes import InCode
from ..emit.threads import BATCH, BIAS, RESIDUAL, WEIGHT, X, Y, emit_entry, emit_region
from ..emit.tiling import ceil_div, emit_pieces
from .geometry import Sizes

SIZES = ("h", "w", "top", "left", "conv_h", "conv_w", "block_rows", "row_blocks",
         "pieces_0", "pieces_1", "pieces_2", "pieces_3", "x_pixel")
FREE = ("block_rows",)  # a tunable that is a size as well
NARROW = 5  # taps of a row that do not hide how long a column takes to come


class Geometry(Sizes):
    """Every size of a depthwise convolution."""

    # sizes that a kernel finds in its frame

    @cached
    def row_blocks(self) -> int:
        return ceil_div(self.p.conv_h, self.s.block_rows)

    @cached
    def pieces(self) -> tuple[int, ...]:
        """Tiles of each width in a row."""
        if self.far_out:
            return (0,) * (len(self.widths) - 1) + (self.p.conv_w,)
        return counts(self.p.conv_w, self.s.tile_w)

    @cached
    def far_out(self) -> bool:
        """Whether there may be outputs that do not see the image: pixels go one by one."""
        return max(self.p.padding[2:]) >= self.p.span_w

    # what the weight and the schedule fix

    @cached
    def widths(self) -> tuple[int, ...]:
        """Columns of tiles."""
        return piece_sizes(self.s.tile_w)

    @cached
    def k_vectors(self) -> int:
        return ceil_div(self.p.k, self.lanes)

    def inputs(self, outputs: int) -> int:
        """Channels that so many outputs read."""
        return ceil_div(outputs, self.p.group_k) * self.p.group_c

    def meetings(self, width: int) -> list[tuple[int, list[tuple[int, int]]]]:
        """The columns that a tile reads, each with the (pixel, tap) that it meets."""
        found: dict[int, list[tuple[int, int]]] = {}
        for i in range(width):
            for s in range(self.p.s):
                column = i * self.p.stride[1] + s * self.p.dilation[1]
                found.setdefault(column, []).append((i, s))
        return sorted(found.items())

    def may_be_outside(self, width: int, column: int) -> bool:
        """Whether a column may not be in the image; the pixels of wide tiles all reach it."""
        last = (width - 1) * self.p.stride[1]
        return self.p.is_padded and (width == 1 or not self.p.span_w - 1 <= column <= last)

    def scratch_bytes(self, threads: int) -> int:
        return 0

    def pack_weight(self, weight: Any) -> Any:
        """(K, C of a group, R, S) to [vector of K][r][c][s][lane]."""
        import torch

        p, width = self.p, self.k_vectors * self.lanes
        w = weight.reshape(p.k, p.group_c, p.r, p.s).transpose(1, 2).flatten(1)
        w = torch.nn.functional.pad(w, (0, 0, 0, width - p.k))
        return w.unflatten(0, (-1, self.lanes)).transpose(1, 2).contiguous()


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """The module of a depthwise convolution."""
    return _Depthwise(Geometry(p, s, isa.lanes), isa).module()


class _Depthwise:
    def __init__(self, geometry: Geometry, isa: Isa) -> None:
        self.g, self.p, self.s, self.isa = geometry, geometry.p, geometry.s, isa

    def module(self) -> Module:
        self.m = Module(self.isa)
        self.tiles = {width: self._tile(width) for width in self.g.widths}
        body = self._body()
        emit_entry(self.m, [emit_region(self.m, "convolve", self._tasks, body)])
        return self.m

    def _sizes(self, f: Function) -> InCode:
        """The geometry, with what image sizes decide from the frame."""
        return InCode(f, self.g, SIZES)

    def _tasks(self, f: Function, frame: Pointer) -> Index:
        return frame.load_index(BATCH) * self._sizes(f).row_blocks

    def _tile(self, width: int) -> Function:
        """A tile over all channels; its taps begin `left` columns into the image, or before."""
        lanes, k = self.g.lanes, self.p.k
        image = self.g.image
        with self.m.function(f"tile_{width}", frame="pointer", x=image, weight="pointer",
                             bias="pointer", residual=image, y=image, low="index",
                             high="index", left="index") as f:
            w, whole = self._sizes(f).w, k // lanes * lanes
            with f.loop(whole, step=lanes) as channel:
                self._channels(f, width, w, channel.i, lanes)
            if k > whole:
                self._channels(f, width, w, f.index(whole), k - whole)
        return f

    def _channels(self, f: Function, width: int, w: Index, channel: Index, count: int) -> None:
        """One vector of output channels of a tile."""
        p, step = self.p, self.g.x_step(self._sizes(f))
        x = f.x + (channel if p.group_k == 1 else channel // p.group_k * p.group_c)
        row_taps = p.s * p.group_c  # of an output, that a row of the filter has
        taps = f.weight + channel * (p.r * row_taps)
        zeros = [f.vector(0.0)] * width
        with f.loop(f.high, start=f.low, carry=zeros) as r:
            row = x + r.i * w * (step * p.dilation[0])
            r.values = self._filter_row(f, row, taps + r.i * (row_taps * self.g.lanes), r.values, w,
                                        count)
        for i, value in enumerate(r.values):
            at = channel + i * p.k
            value = finish(f, value, p, (f.bias, channel), (f.residual, at), count)
            (f.y + at).store(value, count=count)

    def _filter_row(self, f: Function, x: Pointer, taps: Pointer, acc: list[Vector], w: Index,
                    count: int) -> list[Vector]:
        """Channel by channel of the groups: few weights stay in registers."""
        if self.p.s <= NARROW:  # the next channels of a pixel: no pattern that processors know
            step = self.g.x_step(self._sizes(f))
            for column, _ in self.g.meetings(len(acc)):
                (x + step * column).prefetch(self.g.lanes, level=1)
        for channel in range(self.p.group_c):
            acc = self._filter_channel(f, x, taps + channel * (self.p.s * self.g.lanes), acc, w,
                                       (count, channel))
        return acc

    def _filter_channel(self, f: Function, x: Pointer, taps: Pointer, acc: list[Vector], w: Index,
                        which: tuple[int, int]) -> list[Vector]:
        """Each column is loaded once and meets every tap that covers it.

        Columns outside the image add nothing, not even zero times a weight that may be infinite.
        """
        acc, width = list(acc), len(acc)
        step = self.g.x_step(self._sizes(f))
        weights = [taps.load(s * self.g.lanes) for s in range(self.p.s)]

        def met(column: int, pairs: list[tuple[int, int]]) -> list[Vector]:
            value = self._channels_of(x + step * column, *which)
            return [f.fma(value, weights[s], acc[i]) for i, s in pairs]

        for column, pairs in self.g.meetings(width):
            if self.g.may_be_outside(width, column):
                with f.maybe((f.left + column).within(w), [acc[i] for i, _ in pairs]) as there:
                    there.values = met(column, pairs)
                sums = there.values
            else:
                sums = met(column, pairs)
            for (i, _), value in zip(pairs, sums, strict=True):
                acc[i] = value
        return acc

    def _channels_of(self, x: Pointer, count: int, channel: int) -> Vector:
        """The inputs of so many outputs, of each the one that is this channel of its group."""
        k, c, lanes = self.p.group_k, self.p.group_c, self.g.lanes
        value = x.load(lanes=max(1, self.g.inputs(lanes)), count=self.g.inputs(count))
        return value if k == 1 else value.shuffle(
            value, [i // k * c + channel for i in range(lanes)])

    def _body(self) -> Function:
        p = self.p
        with self.m.function("body", frame="pointer", task="index", worker="index") as f:
            z = self._sizes(f)
            block, image = f.task % z.row_blocks, f.task // z.row_blocks
            top = block * z.block_rows
            with f.loop((top + z.block_rows).minimum(z.conv_h), start=top) as row:
                y = row.i * p.stride[0] - z.top
                low, high = self._filter_rows(y, z.h)
                x = f.frame.load_pointer(X, self.g.image) + (image * z.h + y) * (
                    z.w * self.g.x_step(z))
                at = (image * z.conv_h + row.i) * (z.conv_w * p.k)
                self._row(f, x, at, low, high)
        return f

    def _filter_rows(self, y: Index, h: Index) -> tuple[Index, Index]:
        """The filter rows that meet the image when the first one lies at input row y."""
        d = self.p.dilation[0]
        low = ((0 - y).maximum(0) + (d - 1)) // d
        high = ((h - y).maximum(0) + (d - 1)) // d
        return low, high.minimum(self.p.r)

    def _row(self, f: Function, x: Pointer, at: Index, low: Index, high: Index) -> None:
        """The tiles of a row; the last is moved back to end with it."""
        g, p, z = self.g, self.p, self._sizes(f)
        pieces = [getattr(z, f"pieces_{i}") for i in range(len(g.widths))]
        for width, col, _ in emit_pieces(f, g.widths, pieces, f.index(0), z.conv_w):
            left, out = col * p.stride[1] - z.left, at + col * p.k
            f.call(self.tiles[width], f.frame, x + left * g.x_step(z), f.frame.load_pointer(WEIGHT),
                   f.frame.load_pointer(BIAS), f.frame.load_pointer(RESIDUAL, g.image) + out,
                   f.frame.load_pointer(Y, g.image) + out, low, high, left)

"""Implicit GEMM with neighbouring pixels in the lanes, for layers with few channels.

A task unpacks its rows into planes of one channel each; weights are broadcast. Images may lie in
planes (NCHW) or channels-last (NHWC): finished tiles are then transposed in registers. The last
vector of a row is moved back to end with it; only rows shorter than a vector are stored in part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ....core.cached import cached
from ....core.cut import counts, piece_sizes
from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..between.epilogue import activate
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.elements import FLOAT32
from ..emit.microkernel import Walk, multiply
from ..emit.sizes import InCode
from ..emit.threads import BATCH, BIAS, RESIDUAL, SCRATCH, WEIGHT, X, Y, emit_entry, emit_region
from ..emit.tiling import Partition, ceil_div, emit_pieces, emit_zero
from ..emit.transpose import separate, transpose
from .geometry import Sizes

SHUFFLED = 4  # channels of a pixel that are taken apart in registers
SIZES = ("h", "w", "top", "left", "right", "conv_h", "conv_w", "block_rows", "row_blocks",
         "row_vectors", "pitch", "plane", "scratch_floats", "pieces_0", "pieces_1", "pieces_2",
         "pieces_3")
FREE = ("block_rows",)  # a tunable that is a size as well


class Geometry(Sizes):
    """Every size of a convolution over pixels."""

    # sizes that a kernel finds in its frame

    @property
    def right(self) -> int:
        """Columns of padding right of an image."""
        return self.p.padding[3]

    @cached
    def row_blocks(self) -> int:
        return ceil_div(self.p.conv_h, self.s.block_rows)

    @cached
    def row_vectors(self) -> int:
        return ceil_div(self.p.conv_w, self.lanes)

    @cached
    def pieces(self) -> tuple[int, ...]:
        """Strips of each size in a row."""
        return counts(self.row_vectors, self.s.vectors, self.channels.big)

    @cached
    def pitch(self) -> int:
        """A row of a plane; the vector of a short row reads past the image, never past this."""
        return max(self.p.conv_w, self.lanes) + self.p.span_w - 1

    @cached
    def plane(self) -> int:
        height = min(self.s.block_rows, self.p.conv_h)
        return ((height - 1) * self.p.stride[0] + self.p.span_h) * self.pitch

    @cached
    def scratch_floats(self) -> int:
        """Scratch of one worker."""
        return ceil_div(self.p.group_c * self.plane, 16) * 16

    # what the weight and the schedule fix

    @cached
    def channels(self) -> Partition:
        """Output channels of a group in register tiles."""
        return Partition(self.p.group_k, self.s.tile_k)

    @cached
    def strips(self) -> tuple[int, ...]:
        """Vectors of register tiles."""
        return piece_sizes(self.s.vectors)

    @cached
    def planar(self) -> bool:
        return self.p.layout == "nchw"

    @cached
    def together(self) -> int:
        """Channels that are unpacked together: all, if shuffles take few of them apart."""
        few = not self.planar and self.p.groups == 1 and self.p.c <= SHUFFLED
        return self.p.c if few else 1

    @cached
    def depth(self) -> int:
        return self.p.group_c * self.p.r * self.p.s

    def scratch_bytes(self, threads: int) -> int:
        return FLOAT32.bytes * threads * self.scratch_floats

    def pack_weight(self, weight: Any) -> Any:
        """(K, C, R, S) to [group][tile of K][c][r][s][k of the tile]."""
        import torch

        bigs = self.channels.bigs * self.channels.big
        w = weight.reshape(self.p.groups, self.p.group_k, self.depth)
        parts = [w[:, :bigs].unflatten(1, (-1, self.channels.big))]
        if bigs < self.p.group_k:
            parts.append(w[:, bigs:].unflatten(1, (-1, self.channels.big - 1)))
        return torch.cat([part.transpose(2, 3).flatten(1) for part in parts], 1).contiguous()


def make(p: Problem, s: Schedule, isa: Isa) -> Module:
    """The module of a direct convolution over pixels."""
    return _Pixels(Geometry(p, s, isa.lanes), isa).module()


@dataclass(frozen=True)
class _Place:
    """Where a vector of pixels goes; all values are emitted ones."""

    y: Pointer
    residual: Pointer
    plane: Index  # floats of one output channel
    pixels: Index | int

    def at(self, offset: Index | int) -> _Place:
        return replace(self, y=self.y + offset, residual=self.residual + offset)


class _Pixels:
    def __init__(self, geometry: Geometry, isa: Isa) -> None:
        self.g, self.p, self.s, self.isa = geometry, geometry.p, geometry.s, isa

    def module(self) -> Module:
        self.m = Module(self.isa)
        self.tiles = {(size, strip): self._tile(size, strip)
                      for size in self.g.channels.sizes for strip in self.g.strips}
        self.unpack = self._unpack()
        body = self._body()
        emit_entry(self.m, [emit_region(self.m, "multiply", self._tasks, body)])
        return self.m

    def _sizes(self, f: Function) -> InCode:
        """The geometry, with what image sizes decide from the frame."""
        return InCode(f, self.g, SIZES)

    def _tasks(self, f: Function, frame: Pointer) -> Index:
        return frame.load_index(BATCH) * self.p.groups * self._sizes(f).row_blocks

    # the register tiles

    def _tile(self, channels: int, vectors: int) -> Function:
        """One register tile; `last`: where the last of several vectors lies."""
        lanes, column = self.g.lanes, 1 if self.g.planar else self.p.k
        with self.m.function(f"tile_{channels}x{vectors}", frame="pointer", weight="pointer",
                             x="pointer", bias="pointer", residual="pointer", y="pointer",
                             last="index") as f:
            z = self._sizes(f)
            acc = multiply(f, f.weight, f.x, range(channels), vectors, self._walk(z, channels),
                           self.s.unroll, last=f.last if vectors > 1 else None)
            if self.p.epilogue.bias:
                acc = [[value + f.bias.broadcast(k) for value in row]
                       for k, row in enumerate(acc)]
            slopes = [f.bias.broadcast(self.p.k + k) if self.p.epilogue.has_slopes else None
                      for k in range(channels)]
            pixels = lanes if vectors > 1 else z.conv_w.minimum(lanes)
            place = _Place(f.y, f.residual, z.conv_h * z.conv_w, pixels)
            store = self._store_planes if self.g.planar else self._store_pixels
            for v in range(vectors):
                pixel = f.last if 0 < v == vectors - 1 else v * lanes
                store(f, [row[v] for row in acc], place.at(pixel * column), slopes)
        return f

    def _walk(self, z: InCode, channels: int) -> Walk:
        """Channels, filter rows, filter columns; the weights of a tile lie side by side."""
        p = self.p
        row = p.s * channels
        return Walk(((p.group_c, p.r * row, z.plane),
                     (p.r, row, z.pitch * p.dilation[0]),
                     (p.s, channels, p.dilation[1])))

    def _store_planes(self, f: Function, planes: list[Vector], place: _Place,
                      slopes: list[Any]) -> None:
        for k, value in enumerate(planes):
            self._put(f, value, place.at(place.plane * k if k else 0), place.pixels, slopes[k])

    def _store_pixels(self, f: Function, planes: list[Vector], place: _Place,
                      slopes: list[Any]) -> None:
        """Write the pixels of a tile's channels."""
        count, lanes, pixels = len(planes), self.g.lanes, place.pixels
        turned = transpose(f, planes)
        width = len(turned)
        sloped = [None] * width if None in slopes else transpose(f, slopes)  # lie as values do
        if width == count == self.p.k:  # pixels follow each other without a gap
            for i, value in enumerate(turned):
                self._put(f, value, place.at(i * lanes), pixels * count - i * lanes, sloped[i])
            return
        slope = sloped[0] and sloped[0].slice(0, width)  # of a pixel, and so of each
        if isinstance(pixels, Index):
            self._store_some(f, turned, count, place, slope)
            return
        for pixel in range(pixels):
            first = pixel * width
            piece = turned[first // lanes].slice(first % lanes, width)
            self._put(f, piece, place.at(pixel * self.p.k), count, slope)

    def _store_some(self, f: Function, turned: list[Vector], count: int, place: _Place,
                    slope: Vector | None) -> None:
        """As many pixels of a turned tile as a short row has: a loop reads them from the stack."""
        tile, lanes, width = f.words(-(-len(turned) * self.g.lanes // 2)), self.g.lanes, len(turned)
        for i, value in enumerate(turned):
            tile.store(value, i * lanes)
        with f.loop(place.pixels) as pixel:
            piece = (tile + pixel.i * width).load(lanes=width)
            self._put(f, piece, place.at(pixel.i * self.p.k), count, slope)

    def _put(self, f: Function, value: Vector, place: _Place, count: Index | int,
             slope: Vector | None) -> None:
        if self.p.epilogue.residual:
            value = value + place.residual.load(lanes=value.lanes, count=count)
        place.y.store(activate(f, value, self.p.epilogue, slope), count=count)

    # unpacking

    def _unpack(self) -> Function:
        """Copy rows into planes, zeros where they leave the image."""
        p = self.p
        with self.m.function("unpack", frame="pointer", x="pointer", to="pointer", top="index",
                             rows="index") as f:
            z = self._sizes(f)
            h, w, pitch, plane, left = z.h, z.w, z.pitch, z.plane, z.left
            width = left + w + z.right
            with f.loop(f.rows) as row:
                y, to = f.top + row.i, f.to + row.i * pitch
                with f.either((y >= 0) & (y < h)) as (inside, outside):
                    with inside, f.loop(p.group_c, step=self.g.together) as c:
                        planes = [to + (c.i + i) * plane for i in range(self.g.together)]
                        if p.is_padded:
                            for at in planes:
                                self._clear(f, at, z, width)
                        self._copy_row(f, [at + left for at in planes],
                                       f.x + self._in(z, c.i, y), w)
                    with outside, f.loop(p.group_c) as c:
                        emit_zero(f, to + c.i * plane, width)
        return f

    def _clear(self, f: Function, to: Pointer, z: InCode, width: Index) -> None:
        """Zeros at both ends of a row, as whole vectors: its pixels are written after them."""
        lanes = self.g.lanes
        with f.either(z.left.maximum(z.right) < lanes + 1) as (usual, wide):
            with usual:
                to.store(f.vector(0.0))
                (to + (width - lanes).maximum(0)).store(f.vector(0.0))
            with wide:
                emit_zero(f, to, width)

    def _copy_row(self, f: Function, planes: list[Pointer], row: Pointer, count: Index) -> None:
        """A row of pixels into as many planes as are unpacked together."""
        step, lanes = 1 if self.g.planar else self.p.c, self.g.lanes
        if step != len(planes):
            self._copy_one_by_one(f, planes, row, count, step)
            return
        with f.either(count >= lanes) as (whole, short):
            with whole:  # the last vectors are moved back
                with f.loop(count - lanes, step=lanes) as col:
                    self._copy_vectors(planes, row, col.i)
                self._copy_vectors(planes, row, count - lanes)
            with short:
                self._copy_one_by_one(f, planes, row, count, step)

    def _copy_one_by_one(self, f: Function, planes: list[Pointer], row: Pointer, count: Index,
                         step: int) -> None:
        with f.loop(count) as col:
            for i, to in enumerate(planes):
                (to + col.i).store((row + (col.i * step + i)).load(lanes=1))

    def _copy_vectors(self, planes: list[Pointer], row: Pointer, col: Index) -> None:
        source = row + col * len(planes)
        mixed = [source.load(i * self.g.lanes) for i in range(len(planes))]
        for to, value in zip(planes, separate(mixed), strict=True):
            (to + col).store(value)

    def _in(self, z: InCode, channel: Index, row: Index) -> Index:
        """Floats to the first pixel of an input channel's row."""
        if self.g.planar:
            return (channel * z.h + row) * z.w
        return row * z.w * self.p.c + channel

    def _out(self, z: InCode, channel: Index, row: Index | int, pixel: Index | int) -> Index:
        """Floats to a pixel of an output channel."""
        if self.g.planar:
            return (channel * z.conv_h + row) * z.conv_w + pixel
        return (z.conv_w * row + pixel) * self.p.k + channel

    # one task

    def _body(self) -> Function:
        p = self.p
        with self.m.function("body", frame="pointer", task="index", worker="index") as f:
            z = self._sizes(f)
            block, rest = f.task % z.row_blocks, f.task // z.row_blocks
            group, image = rest % p.groups, rest // p.groups
            top = block * z.block_rows
            bottom = (top + z.block_rows).minimum(z.conv_h)
            planes = f.frame.load_pointer(SCRATCH) + f.worker * z.scratch_floats
            x = f.frame.load_pointer(X) + image * (z.h * z.w * p.c)
            f.call(self.unpack, f.frame, x + self._in(z, group * p.group_c, f.index(0)), planes,
                   top * p.stride[0] - z.top, (bottom - top - 1) * p.stride[0] + p.span_h)
            with f.loop(bottom, start=top) as row:
                at = image * (z.conv_h * z.conv_w * p.k) + self._out(
                    z, group * p.group_k, row.i, 0)
                self._row(f, group, planes + (row.i - top) * z.pitch * p.stride[0], at)
        return f

    def _row(self, f: Function, group: Index, planes: Pointer, at: Index) -> None:
        """All tiles of one output row."""
        g, p, z = self.g, self.p, self._sizes(f)
        weight = f.frame.load_pointer(WEIGHT) + group * (p.group_k * g.depth)
        pieces = [getattr(z, f"pieces_{i}") for i in range(len(g.strips))]
        end = (z.conv_w - g.lanes).maximum(0)  # where the last vector begins
        for size, piece in g.channels.pieces(f, f.index(0), f.index(g.channels.count)):
            channel = g.channels.start(piece)
            for vectors, strip, _ in emit_pieces(f, g.strips, pieces, f.index(0), z.row_vectors):
                last = ((strip + (vectors - 1)) * g.lanes).minimum(end)
                pixel = strip * g.lanes if vectors > 1 else last
                out = at + self._out(z, channel, 0, pixel)
                f.call(self.tiles[size, vectors], f.frame, weight + channel * g.depth,
                       planes + pixel, f.frame.load_pointer(BIAS) + group * p.group_k + channel,
                       f.frame.load_pointer(RESIDUAL) + out, f.frame.load_pointer(Y) + out,
                       last - pixel)

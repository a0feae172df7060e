"""Every size of a direct convolution on the matrix unit, and how its weights lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ....core.cached import cached
from ....core.isa import AMX, MatrixUnit
from ...matrix import PARTS, joins_taps
from ..conv.geometry import BlocksOfK
from ..emit.elements import BF16, FLOAT32
from ..emit.microkernel import LINE
from ..emit.parts import pack_columns
from ..emit.tiling import ceil_div
from .passes import Passes

# what images decide: words of the frame, in this order
SIZES = ("h", "w", "top", "left", "conv_h", "conv_w", "out_h", "out_w", "row_blocks", "pitch",
         "plane", "chunk_floats", "sums_start", "pack_floats", "groups", "lines_ahead", "y_row",
         "y_image", "y_pixel", "x_pixel")
# of these, what the schedule decides where all images are one column
OF_COLUMNS = frozenset({"pitch", "plane", "chunk_floats", "sums_start", "lines_ahead"})


@dataclass(frozen=True)
class Geometry(BlocksOfK):
    """Every size of a direct convolution on the matrix unit, in so many products."""

    products: int
    unit: MatrixUnit = AMX

    @cached
    def parts(self) -> int:
        return PARTS[self.products]

    @cached
    def joins_taps(self) -> bool:
        """Whether a line of a packed row holds all channels of all taps in a row."""
        return joins_taps(self.p, self.unit.depth)

    @cached
    def values(self) -> int:
        """Values of a pixel, or of a row of taps."""
        return self.p.c * self.p.s if self.joins_taps else self.p.c

    @cached
    def chunks(self) -> int:
        """Groups of as many values as a step of the unit sums."""
        return ceil_div(self.values, self.unit.depth)

    @cached
    def joined(self) -> bool:
        """Whether the images of a batch are one column: no output sees more than its own pixel."""
        p = self.p
        return ((p.r, p.s, p.stride, p.epilogue.pool) == (1, 1, (1, 1), 1)
                and not p.is_padded and p.grid is None)

    @cached
    def in_place(self) -> bool:
        """Whether pixels are multiplied where they lie: bfloat16s in whole steps of the unit."""
        return (self.joined and self.image is BF16 and self.p.c % self.unit.depth == 0
                and not self.p.pitch)

    @cached
    def pixel_floats(self) -> int:
        """Floats of memory from a row of A to the next."""
        return self.p.c // 2 if self.in_place else self.unit.line

    @cached
    def taps(self) -> list[tuple[int, int]]:
        """Rows and columns from an output's first input to each of the others."""
        return [(i, j) for i in self.lines for j in self.columns]

    @cached
    def lines(self) -> list[int]:
        """Rows from an output's first input to each row of taps."""
        return [r * self.p.dilation[0] for r in range(self.p.r)]

    @cached
    def columns(self) -> list[int]:
        """Columns from an output's first input to each tap of a row."""
        return [s * self.p.dilation[1] for s in range(1 if self.joins_taps else self.p.s)]

    @cached
    def phases(self) -> list[tuple[int, int]]:
        """Rows and columns modulo the stride, as far as some tap reads them."""
        (down, across) = self.p.stride
        return sorted({(i % down, j % across) for i, j in self.taps})

    @cached
    def below(self) -> int:
        """Rows of a phase that outputs reach beyond their own."""
        return (self.p.span_h - 1) // self.p.stride[0]

    @cached
    def pitch(self) -> int:
        """Pixels in a row of a phase."""
        return 1 if self.joined else self.p.conv_w + self.beside

    @cached
    def beside(self) -> int:
        """Pixels of a phase that outputs reach beyond their own."""
        return 0 if self.joins_taps else (self.p.span_w - 1) // self.p.stride[1]

    @cached
    def rows(self) -> int:
        """Rows of outputs in a whole task."""
        return self.s.block_rows if self.joined else min(self.s.block_rows, self.p.conv_h)

    @cached
    def plane(self) -> int:
        """Floats of one part of a phase; an odd number of lines, so that they do not collide.

        The last multiply of a plane reads rows of what follows it: sums that nobody stores.
        """
        return self.unit.line * ((self.rows + self.below) * self.pitch + self.beside | 1)

    @cached
    def chunk_floats(self) -> int:
        if self.in_place:
            return self.unit.line
        return len(self.phases) * self.parts * self.plane

    @cached
    def group(self) -> int:
        """Pixels of one multiply."""
        return self.s.tile_w

    @cached
    def groups(self) -> int:
        """Multiplies over the pixels of a whole task."""
        return ceil_div(self.rows * self.pitch, self.group)

    @cached
    def once(self) -> bool:
        """Whether a task uses its weights once; code knows it of single pixels alone."""
        return self.joined and self.groups == 1

    @cached
    def passes(self) -> Passes:
        """Over the pixels; weights that are used once need not stay near."""
        chunk = FLOAT32.bytes * self.panel_floats(self.block_k) // self.chunks
        far = self.parts == 1 and len(self.taps) > 1
        panel = self.unit.far if far else self.unit.near
        return Passes(self.chunks, self.chunks if self.once else max(1, panel // chunk))

    @cached
    def wait(self) -> bool:
        """Whether the sums of all groups are kept: for another pass, or to be pooled."""
        return self.passes.count > 1 or self.p.epilogue.pool > 1

    @cached
    def sums_floats(self) -> int:
        """Sums of one block of output channels: of one group, or of all where they wait."""
        return self.group * self.block_k * (self.groups if self.wait else 1)

    @cached
    def fetches(self) -> bool:
        """Whether weights are asked for ahead of need: by code that knows how many lines, or while
        a unit is at work that is apart."""
        return self.unit.fetches and (self.unit.apart or self.joined)

    @cached
    def lines_ahead(self) -> int:
        """Cache lines of the weights that come next, fetched at every tap of every group."""
        if not self.fetches:
            return 0
        return ceil_div(self.parts * self.s.vectors * self.unit.tile // LINE, self.groups)

    @cached
    def row_floats(self) -> int:
        """A row of the input between its padding, where lines are taken from such a row."""
        floats = ((self.p.conv_w - 1) * self.p.stride[1] + self.p.s) * self.p.c
        return ceil_div(floats, LINE) * LINE if self.joins_taps else 0

    @cached
    def sums_start(self) -> int:
        """Where the sums lie behind the packed rows; while those are packed, one yet to be. Pixels
        that are multiplied where they lie are copied if they are fewer than a multiply takes."""
        if self.in_place:
            return self.group * self.pixel_floats
        return self.chunks * self.chunk_floats

    @cached
    def pack_floats(self) -> int:
        """Scratch of one worker."""
        return self.sums_start + max(self.sums_floats, self.row_floats)

    @cached
    def row_blocks(self) -> int:
        return ceil_div(self.p.conv_h, self.s.block_rows)

    def starts(self, plane: Any) -> list[tuple[Any, int]]:
        """Where the taps of a row begin: floats of a chunk of the input, and their numbers."""
        across, phases = self.p.stride[1], sorted({j % self.p.stride[1] for j in self.columns})
        line = self.unit.line
        return [(plane * (self.parts * phases.index(j % across)) + j // across * line, number)
                for number, j in enumerate(self.columns)]

    def rows_of_taps(self, pitch: Any, plane: Any) -> Iterator[tuple[tuple[Any, int],
                                                                    tuple[int, Any, int]]]:
        """Rows of each phase: where the first tap of the first begins; count and steps of both."""
        down, columns, line = self.p.stride[0], len(self.columns), self.unit.line
        phases = len({j % self.p.stride[1] for j in self.columns})
        for number, phase in enumerate(sorted({i % down for i in self.lines})):
            rows = [row for row, i in enumerate(self.lines) if i % down == phase]
            first, then = rows[0], rows[min(1, len(rows) - 1)]
            apart = (self.lines[then] - self.lines[first]) // down
            at = plane * (number * phases * self.parts) + pitch * (self.lines[first] // down * line)
            yield (at, first * columns), (len(rows), pitch * (apart * line),
                                          (then - first) * columns)

    def scratch_bytes(self, threads: int) -> int:
        return FLOAT32.bytes * threads * self.pack_floats

    def panel_floats(self, width: int) -> int:
        """Floats of the weights of `width` output channels."""
        tiles = width // self.unit.columns
        return self.chunks * len(self.taps) * self.parts * tiles * self.unit.tile

    @cached
    def weight_floats(self) -> int:
        """Floats of all panels."""
        return self.panel_floats(self.k_vectors * self.lanes)

    def pack_weight(self, weight: Any) -> Any:
        """(K, C, R, S) to panels of [channels of a step][r][s][part][output channels of a tile]."""
        import torch

        if self.joins_taps:
            weight = weight.permute(0, 3, 1, 2).flatten(1, 2)[..., None]
        k, c = weight.shape[:2]
        w = torch.nn.functional.pad(weight.permute(1, 2, 3, 0).flatten(1),
                                    (0, 0, 0, self.chunks * self.unit.depth - c))
        w = w.reshape(self.chunks, self.unit.depth, len(self.taps), k).transpose(1, 2)
        return torch.cat([pack_columns(panel, self.parts, self.unit).flatten()
                          for panel in self.in_blocks(w.reshape(-1, k))])

    def tasks(self, batch: Any, conv_h: Any, row_blocks: Any) -> Any:
        if self.joined:
            rows = batch * conv_h
            return (rows + (self.s.block_rows - 1)) // self.s.block_rows * self.s.k_parts
        return batch * (row_blocks * self.s.k_parts)

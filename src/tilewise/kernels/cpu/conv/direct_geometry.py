"""Every size of a direct convolution, and how its weights lie."""

from __future__ import annotations

from typing import Any

from ....core.cached import cached
from ....core.cut import counts, piece_sizes
from ....core.taps import skips
from ..emit.elements import FLOAT32
from ..emit.microkernel import LINE, Walk
from ..emit.tiling import ceil_div
from .geometry import BlocksOfK

CHUNK = 16  # steps between two times that weights are fetched
SIZES = ("h", "w", "top", "left", "conv_h", "conv_w", "out_h", "out_w", "row_tiles", "row_blocks",
         "col_blocks", "row_pitch", "pack_floats", "partial_floats", "lines_ahead", "pool_rows",
         "pool_tasks", "pieces_0", "pieces_1", "pieces_2", "pieces_3", "block_rows", "block_cols",
         "block_w", "k_parts", "y_row", "y_image", "y_pixel",
         "x_pixel")
FREE = ("block_rows", "block_cols", "k_parts")  # tunables that are sizes as well


class Geometry(BlocksOfK):
    """Every size of a direct convolution."""

    # sizes that a kernel finds in its frame

    @cached
    def row_tiles(self) -> int:
        return ceil_div(self.p.conv_h, self.s.tile_h)

    @cached
    def row_blocks(self) -> int:
        return ceil_div(self.row_tiles, self.s.block_rows)

    @cached
    def col_blocks(self) -> int:
        return ceil_div(self.p.conv_w, self.block_w)

    @property
    def block_cols(self) -> int:
        return int(self.s.block_cols)

    @cached
    def block_w(self) -> int:
        """Columns of a block that is not the last."""
        return self.s.block_cols * self.s.tile_w

    @property
    def k_parts(self) -> int:
        """Shares of the output channels."""
        return int(self.s.k_parts)

    @cached
    def pieces(self) -> tuple[int, ...]:
        """Register tiles of each width in the last block of columns."""
        start = min((self.col_blocks - 1) * self.block_w, max(0, self.p.conv_w - self.s.tile_w))
        return counts(self.p.conv_w - start, self.s.tile_w, self.s.vectors * self.s.tile_h)

    @cached
    def row_pitch(self) -> int:
        """Floats from one input row to the next, as the micro-kernel sees them."""
        if not self.packed:
            return self.p.w * self.p.c
        width = min(self.p.conv_w, self.block_w)
        return ((width - 1) * self.p.stride[1] + self.p.span_w) * self.slice_c

    @cached
    def pack_floats(self) -> int:
        """Scratch of one worker."""
        if not self.packed:
            return 0
        height = min(self.p.conv_h, self.s.block_rows * self.s.tile_h)
        floats = ((height - 1) * self.p.stride[0] + self.p.span_h) * self.row_pitch
        return ceil_div(floats, 16) * 16  # workers do not share a cache line

    @cached
    def partial_floats(self) -> int:
        """Scratch of one image whose sums are still to be added up, or pooled."""
        if self.s.split == self.p.epilogue.pool == 1:
            return 0
        return self.p.conv_h * self.p.conv_w * self.p.k * int(self.s.split)

    @cached
    def lines_ahead(self) -> int:
        """Cache lines of the next block's weights to fetch in a chunk of steps.

        With few pixels, weights are hardly used before the next are needed; with many, fetching
        them takes longer than waiting for them.
        """
        tiles = min(self.row_tiles, self.s.block_rows) * min(
            ceil_div(self.p.conv_w, self.s.tile_w), self.s.block_cols)
        needed = CHUNK * self.s.vectors * self.lanes
        if not self.fetches or 2 * needed < LINE * tiles:
            return 0
        return ceil_div(needed, LINE * tiles)

    # what the weight and the schedule fix

    @cached
    def widths(self) -> tuple[int, ...]:
        """Columns of register tiles."""
        return piece_sizes(self.s.tile_w)

    @cached
    def slice_c(self) -> int:
        """Input channels one task reduces over."""
        return self.p.group_c // self.s.split

    @cached
    def skips(self) -> bool:
        """Whether taps that see padding are left out; then nothing has to be packed."""
        return skips(self.p)

    @cached
    def packed(self) -> bool:
        p = self.p
        apart = p.groups > 1 or self.s.split > 1 or p.pitch > 0  # pixels, for a task
        widened = self.image is not FLOAT32  # once, not in every product
        return not self.skips and (p.is_padded or apart or widened)

    @cached
    def pixel(self) -> int:
        """Floats from one input pixel to the next, as the micro-kernel sees them."""
        return self.slice_c if self.packed else self.p.c

    @cached
    def fetches(self) -> bool:
        """Whether code asks for the weights of the next block, if there are few pixels."""
        steps = self.p.s * self.slice_c
        return (self.k_blocks > 1 and self.p.dilation[1] == 1 and steps % CHUNK == 0
                and steps > CHUNK and not self.skips)

    @cached
    def depth(self) -> int:
        """Products in one partial sum."""
        return self.p.r * self.p.s * self.slice_c

    @cached
    def panel_floats(self) -> int:
        """Weights of one (group, slice)."""
        return self.depth * self.k_vectors * self.lanes

    def walk(self, vectors: int, row_pitch: Any) -> Walk:
        """The reduction, against a panel that is `vectors` wide."""
        down = (self.p.r, row_pitch * self.p.dilation[0])
        width = vectors * self.lanes
        if self.p.dilation[1] == 1:  # neighbouring taps are neighbours in memory
            steps = self.p.s * self.slice_c
            if self.fetches:
                return Walk.packed(width, down, (steps // CHUNK, CHUNK), (CHUNK, 1))
            return Walk.packed(width, down, (steps, 1))
        across = (self.p.s, self.p.dilation[1] * self.slice_c)
        return Walk.packed(width, down, across, (self.slice_c, 1))

    def walk_seen(self, vectors: int, row_pitch: Any, rows: Any, cols: Any) -> Walk:
        """The same over so many rows and columns of taps, known when the code runs."""
        width, (down, across) = vectors * self.lanes, self.p.dilation
        row, col = self.tap_floats(width, 1, 0), self.tap_floats(width, 0, 1)
        return Walk(((rows, row_pitch * down, row), (cols, across * self.pixel, col),
                     (self.slice_c, 1, width)))

    def tap_floats(self, width: int, row: Any, col: Any) -> Any:
        """Where the weights of a tap begin in a panel of so many output channels."""
        return (row * self.p.s + col) * (self.slice_c * width)

    def scratch_bytes(self, threads: int) -> int:
        return FLOAT32.bytes * (self.p.n * self.partial_floats + threads * self.pack_floats)

    def pack_weight(self, weight: Any) -> Any:
        """(K, C, R, S) to [group][slice][block of K][r][s][c][lane]."""
        import torch

        p = self.p
        w = weight.reshape(p.groups, p.group_k, self.s.split, self.slice_c, p.r, p.s)
        w = w.permute(0, 2, 4, 5, 3, 1).reshape(p.groups * self.s.split, self.depth, p.group_k)
        blocks, rest = self.in_blocks(w)
        return torch.cat([blocks.flatten(1), rest.flatten(1)], 1).contiguous()

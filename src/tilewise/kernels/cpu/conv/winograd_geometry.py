"""Every size of a Winograd convolution, from a problem and a schedule.

V, the transformed input, lies as [position][vector of C][tile][lane], M, the products, as
[position][block of K][tile][lane of the block]: every access is a whole vector.
"""

from __future__ import annotations

from typing import Any

from ....core.cached import cached
from ...winograd_math import Matrix, Transform, matrices
from ..emit.elements import FLOAT32
from ..emit.microkernel import LINE, Walk
from ..emit.tiling import ceil_div
from .geometry import BlocksOfK

SIZES = ("h", "w", "top", "left", "conv_h", "conv_w", "out_h", "out_w", "tile_rows", "tile_cols",
         "tiles", "phases", "phase_cols", "y_row", "y_image", "y_pixel",
         "x_pixel")  # words of the frame
FILTERS = "filters"  # the order whose weights are transformed while they are used
PART = 288 << 10  # bytes of weights that such a worker transforms at a time
APART = 16  # floats between positions, so that they do not meet in the same cache sets


class Geometry(BlocksOfK):
    """Every size of a Winograd convolution."""

    @cached
    def down(self) -> Transform:
        """The transform along columns."""
        return matrices(self.s.tile_h, self.p.r)

    @cached
    def across(self) -> Transform:
        """The transform along rows."""
        return matrices(self.s.tile_w, self.p.s)

    @cached
    def positions(self) -> int:
        return self.down.n * self.across.n

    @cached
    def phase_rows(self) -> int:
        """Phases of a dilated convolution that begin in different rows; none is empty."""
        return min(self.p.dilation[0], self.p.conv_h)

    @cached
    def phase_cols(self) -> int:
        return min(self.p.dilation[1], self.p.conv_w)

    @cached
    def phases(self) -> int:
        """Dense convolutions, interleaved, that make up a dilated one."""
        return self.phase_rows * self.phase_cols

    @cached
    def tile_rows(self) -> int:
        """Of the largest phase."""
        return ceil_div(ceil_div(self.p.conv_h, self.p.dilation[0]), self.s.tile_h)

    @cached
    def tile_cols(self) -> int:
        return ceil_div(ceil_div(self.p.conv_w, self.p.dilation[1]), self.s.tile_w)

    @cached
    def tiles(self) -> int:
        """Tiles of one image, or of one phase of it."""
        return self.tile_rows * self.tile_cols

    @cached
    def c_vectors(self) -> int:
        return ceil_div(self.p.c, self.lanes)

    @cached
    def depth(self) -> int:
        """Input channels, filled up to whole vectors."""
        return self.c_vectors * self.lanes

    @cached
    def block(self) -> int:
        """Tiles that are worked on together."""
        return self.s.rows * self.s.groups

    @cached
    def v_position(self) -> int:
        """Floats from one position of V to the next."""
        return self.depth * self.block + APART

    @cached
    def m_position(self) -> int:
        """Floats from one position of M to the next."""
        one = self.s.order in ("channels", FILTERS)
        blocks_of_k = self.block_k if one else self.k_vectors * self.lanes
        return self.block * blocks_of_k + APART

    def m_at(self, i: Any, j: Any) -> Any:
        """Where the products of a position lie; i and j are numbers or emitted values."""
        return (i * self.across.n + j) * self.m_position

    @cached
    def v_floats(self) -> int:
        return self.positions * self.v_position

    @cached
    def scratch_floats(self) -> int:
        """V, M and a pixel of zeros for what lies outside the image."""
        sums = 0 if self.s.order == FILTERS else self.positions * self.m_position
        return self.v_floats + sums + self.depth

    def scratch_bytes(self, threads: int) -> int:
        if self.s.order == FILTERS:
            return FLOAT32.bytes * (self.scratch_floats + threads * self.own_floats)
        return FLOAT32.bytes * self.scratch_floats * (1 if self.s.order == "shared" else threads)

    # weights that are transformed while they are used: a part of the input channels at a time

    @cached
    def taps(self) -> int:
        return int(self.p.r * self.p.s)

    @cached
    def part_vectors(self) -> int:
        """Vectors of input channels of a part."""
        bytes_ = FLOAT32.bytes * self.positions * self.lanes * self.block_k
        return min(self.c_vectors, max(1, PART // bytes_))

    @cached
    def u_position(self) -> int:
        """Floats from one position of a part's U to the next."""
        return self.part_vectors * self.lanes * self.block_k + APART

    @cached
    def own_floats(self) -> int:
        """M and U of a worker."""
        return self.positions * (self.m_position + self.u_position)

    @cached
    def panel(self) -> int:
        """Floats of the weights of one position and a whole block of output channels."""
        return self.panel_floats(self.block_k)

    def panel_floats(self, width: int) -> int:
        """Floats of the weights of one position and `width` output channels."""
        return int(self.panel_of(width, self.depth))

    def panel_of(self, width: Any, depth: Any) -> Any:
        """The same for any depth; numbers, or values of generated code."""
        return depth * width

    @property
    def c(self) -> int:
        return self.p.c

    @property
    def k(self) -> int:
        return self.p.k

    def walk(self, vectors: int) -> Walk:
        return Walk.packed(vectors * self.lanes, (self.c_vectors, self.block * self.lanes),
                           (self.lanes, 1))

    @cached
    def lines_ahead(self) -> int:
        """Cache lines of the next panel that one group of rows fetches per vector of C."""
        return ceil_div(self.lanes * self.block_k, LINE * self.s.groups)

    @cached
    def weight_floats(self) -> int:
        """U in float32: [block of K][position][c][lane], or the position outermost; or the weights
        themselves, as [block of K][c][tap][lane]."""
        values = self.taps if self.s.order == FILTERS else self.positions
        return values * self.depth * self.k_vectors * self.lanes

    def pack_panels(self, panels: Any) -> Any:
        """Panels [..., c, lane of the block] of float64, as a product reads them."""
        return panels.float()

    def pack_weight(self, weight: Any) -> Any:
        """(K, C, R, S) to U: [block of K][position][panel], or the position outermost."""
        import torch

        p = self.p
        if self.s.order == FILTERS:
            taps = weight.permute(2, 3, 1, 0).reshape(self.taps, p.c, p.k)
            taps = torch.nn.functional.pad(taps, (0, 0, 0, self.depth - p.c))
            blocks, rest = self.in_blocks(taps)
            return torch.cat([blocks.permute(1, 2, 0, 3).flatten(),
                              rest.transpose(0, 1).flatten()]).float()
        down, across = (_tensor(transform.G) for transform in (self.down, self.across))
        u = torch.einsum("ir,kcrs,js->ijck", down, weight.double(), across)
        u = torch.nn.functional.pad(u.reshape(self.positions, p.c, p.k),
                                    (0, 0, 0, self.depth - p.c))
        blocks, rest = map(self.pack_panels, self.in_blocks(u))
        if self.s.order == "channels":
            return torch.cat([blocks.transpose(0, 1).flatten(), rest.flatten()])
        return torch.cat([blocks.flatten(1), rest.flatten(1)], 1).flatten()


def _tensor(matrix: Matrix) -> Any:
    import torch

    return torch.tensor([[float(value) for value in row] for row in matrix], dtype=torch.float64)

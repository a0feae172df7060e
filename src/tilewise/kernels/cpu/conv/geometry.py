"""What the geometries of kernels share: sizes derived from a problem and a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....core.cached import cached
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..between.pooling import rows_a_task
from ..emit.elements import ELEMENTS, Element
from ..emit.tiling import ceil_div


@dataclass(frozen=True)
class Sizes:
    """Every size a generator needs comes from these three."""

    p: Problem
    s: Schedule
    lanes: int

    @property
    def image(self) -> Element:
        """What images hold; weights, biases and scratch are float32."""
        return ELEMENTS[self.p.dtype]

    @property
    def h(self) -> int:
        return self.p.h

    @property
    def w(self) -> int:
        return self.p.w

    @property
    def top(self) -> int:
        """Rows of padding above an image."""
        return self.p.padding[0]

    @property
    def left(self) -> int:
        """Columns of padding left of an image."""
        return self.p.padding[2]

    @property
    def conv_h(self) -> int:
        return self.p.conv_h

    @property
    def conv_w(self) -> int:
        return self.p.conv_w

    @property
    def out_h(self) -> int:
        return self.p.out_h

    @property
    def out_w(self) -> int:
        return self.p.out_w

    @property
    def x_pixel(self) -> int:
        """Floats from a pixel of the input to the next."""
        return self.p.pitch or self.p.c

    def x_step(self, z: Any) -> Any:
        """The same, known to the code unless the input is a slice."""
        return z.x_pixel if self.p.pitch else self.p.c

    @property
    def y_row(self) -> int:
        """Floats from a row of outputs to the next, where they lie on a grid."""
        grid = self.p.grid
        return 0 if grid is None else grid.down * grid.w * (grid.pitch or self.p.k)

    @property
    def y_image(self) -> int:
        """The same of images."""
        grid = self.p.grid
        return 0 if grid is None else grid.h * grid.w * (grid.pitch or self.p.k)

    @property
    def y_pixel(self) -> int:
        """The same of columns."""
        grid = self.p.grid
        return 0 if grid is None else grid.across * (grid.pitch or self.p.k)

    def y_step(self, z: Any) -> Any:
        """Floats from an output to the next of its row, known to the code unless on a grid."""
        return self.p.k if self.p.grid is None else z.y_pixel

    def y_rows(self, z: Any, rows: Any) -> Any:
        """Floats that so many rows of outputs take; z has the sizes, as numbers or emitted."""
        if self.p.grid is not None:
            return z.y_row * rows
        return z.conv_w * (rows * self.p.k) if isinstance(rows, int) else rows * z.conv_w * self.p.k

    def y_at(self, z: Any, image: Any, row: Any, col: Any) -> Any:
        """Where an output begins."""
        if self.p.grid is None:
            return ((image * z.conv_h + row) * z.conv_w + col) * self.p.k
        return image * z.y_image + row * z.y_row + col * z.y_pixel

    @property
    def block_rows(self) -> int:
        """Rows of a task."""
        return int(self.s.block_rows)

    @property
    def pieces(self) -> tuple[int, ...]:
        """Register tiles of each size that cover a row: of up to four sizes."""
        raise NotImplementedError

    @property
    def pieces_0(self) -> int:
        return self.pieces[0]

    @property
    def pieces_1(self) -> int:
        return self._pieces(1)

    @property
    def pieces_2(self) -> int:
        return self._pieces(2)

    @property
    def pieces_3(self) -> int:
        return self._pieces(3)

    def _pieces(self, i: int) -> int:
        return self.pieces[i] if i < len(self.pieces) else 0

    @property
    def pool_rows(self) -> int:
        """Rows of results that a task pools."""
        return rows_a_task(self.p)

    @property
    def pool_tasks(self) -> int:
        return ceil_div(self.out_h, self.pool_rows)


class BlocksOfK(Sizes):
    """Output channels in blocks of `vectors` vectors; the last block may be narrower."""

    @cached
    def k_vectors(self) -> int:
        return ceil_div(self.p.group_k, self.lanes)

    @cached
    def k_blocks(self) -> int:
        return ceil_div(self.k_vectors, self.s.vectors)

    @cached
    def block_k(self) -> int:
        return self.s.vectors * self.lanes

    @cached
    def has_tail(self) -> bool:
        """Whether the last block differs from the others."""
        return self.p.group_k % self.block_k != 0

    @cached
    def ends(self) -> list[bool]:
        """Which kinds of block occur: whole ones, and one at the end that is not."""
        return [False] * (self.k_blocks > self.has_tail) + [True] * self.has_tail

    def channels(self, end: bool) -> int:
        """Output channels of a block."""
        return self.p.group_k - (self.k_blocks - 1) * self.block_k if end else self.block_k

    def vectors(self, end: bool) -> int:
        """Vectors of a block."""
        return ceil_div(self.channels(end), self.lanes)

    def in_blocks(self, w: Any) -> tuple[Any, Any]:
        """Panels [..., depth, K] as whole blocks [..., block, depth, lane] and the rest."""
        import torch  # workers that only compile do without it

        vectors = ceil_div(w.shape[-1], self.lanes)
        w = torch.nn.functional.pad(w, (0, vectors * self.lanes - w.shape[-1]))
        whole = vectors // self.s.vectors * self.block_k
        return w[..., :whole].unflatten(-1, (-1, self.block_k)).transpose(-3, -2), w[..., whole:]

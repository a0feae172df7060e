"""Sums of outer products on the matrix unit, on bfloat16 parts.

Before a block of items at a position is multiplied, its V and M are packed: two neighbouring
items side by side in every lane, which is what the unit wants of one operand; of the other, the
same turned, so that a row is a channel and its pairs of items. Every value is packed once and
then meets all channels of the other side. All else is as in the vector kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....core.cached import cached
from ...matrix import DEPTH, PARTS, SIDE
from ..conv.outer import OuterGeometry, OuterSums
from ..emit import Function, Index, Pointer
from ..emit.amx import MOST, TILE
from ..emit.elements import FLOAT32
from ..emit.microkernel import LINE, Walk
from ..emit.parts import split_pairs
from ..emit.threads import SCRATCH
from ..emit.tiling import ceil_div
from ..emit.transpose import transpose
from ..emit.unit import Side
from ..emit.units import multiply


@dataclass(frozen=True)
class TileGeometry(OuterGeometry):
    """Sizes of the packed panels: a worker has one block of one position."""

    products: int

    @cached
    def step_floats(self) -> int:
        """Floats of 32 items of 16 channels, all parts."""
        return PARTS[self.products] * TILE

    @cached
    def steps(self) -> int:
        """Steps of 32 items in a whole block."""
        return int(self.s.tiles) // DEPTH

    @cached
    def m_packed(self) -> int:
        """Floats of the packed M, [16 rows][step][part]; V follows as [block of C][step][part]."""
        return self.k_padded // SIDE * self.steps * self.step_floats

    @cached
    def packed_start(self) -> int:
        """Where a worker packs, behind the other things it has."""
        return super().worker_floats

    @cached
    def own(self) -> bool:
        """Whether parts, of which there may be fewer than workers, have panels of their own."""
        return bool(self.s.order == "parts")

    def scratch_bytes(self, threads: int) -> int:
        return super().scratch_bytes(int(self.s.parts) if self.own else threads)

    @cached
    def worker_floats(self) -> int:
        packed = self.m_packed + self.c_padded // SIDE * self.steps * self.step_floats
        return self.packed_start + packed


class OuterOnTiles(OuterSums):
    """The same sums; comes before the class that reads items."""

    tiles = True
    g: Any

    def module(self) -> Any:
        self.pack_m, self.pack_v = self._pack("pack_m", 1), self._pack("pack_v", self.s.vectors)
        self.turn = self._turn()
        return super().module()

    def _pack(self, name: str, vectors: int) -> Function:
        """Steps of items [item][vectors] as tiles [step][part][vector] of pairs of items."""
        g, lanes = self.g, self.g.lanes
        with (self.m.function(name, source="pointer", to="pointer", steps="index") as f,
              f.loop(f.steps) as step, f.loop(DEPTH // 2) as pair):
            source = f.source + (step.i * DEPTH + pair.i * 2) * (vectors * lanes)
            to = f.to + (step.i * (vectors * g.step_floats) + pair.i * LINE)
            for j in range(vectors):
                first, second = source.load(j * lanes), source.load((vectors + j) * lanes)
                for part, bits in enumerate(split_pairs(f, first, second,
                                                        PARTS[self.g.products])):
                    to.store(bits, (part * vectors + j) * TILE)
        return f

    def _turn(self) -> Function:
        """Tiles [pair][channel] as [channel][pair], in place."""
        lines = range(0, TILE, LINE)
        with (self.m.function("turn", to="pointer", tiles="index") as f,
              f.loop(f.tiles) as tile):
            to = f.to + tile.i * TILE
            turned = transpose(f, [to.load(at) for at in lines])
            for at, row in zip(lines, turned, strict=True):
                to.store(row, at)
        return f

    def _product(self, first: bool) -> Any:
        """For each number of tiles of rows that occurs: these rows against a block of columns."""
        groups = self.g.k_padded // SIDE
        counts = [MOST] * (groups >= MOST) + [1] * (groups % MOST)
        return {rows: self._some_rows(rows, first) for rows in counts}

    def _some_rows(self, rows: int, first: bool) -> Function:
        g, vectors = self.g, self.s.vectors
        left = Side(tuple(i * g.steps * g.step_floats for i in range(rows)), TILE)
        right = Side(tuple(j * TILE for j in range(vectors)), vectors * TILE)
        out = Side(tuple(i * SIDE * g.width for i in range(rows)), SIDE, FLOAT32.bytes * g.width)
        name = f"product{'_first' if first else ''}{rows}"
        with self.m.function(name, mm="pointer", v="pointer", u="pointer", steps="index") as f:
            walk = Walk(((f.steps, g.step_floats, vectors * g.step_floats),))
            # the sums that follow: the unit would wait for every line of them
            ahead = f.u + rows * SIDE * g.width, ceil_div(rows * SIDE * vectors, g.steps)
            multiply(f, f.mm, f.v, f.u, left, right, out, walk, self.g.products, first, ahead,
                     level=1)
        return f

    def _multiply(self, f: Function, scratch: Pointer, u: Pointer, position: Index, count: Index,
                  first: Any) -> None:
        g, tiles = self.g, self.s.tiles
        self.clear(f, scratch, position, count, (count + (DEPTH - 1)) // DEPTH * DEPTH)
        self.clear_lanes(f, scratch, position, count)
        v, mm = scratch + position * g.v_position, scratch + (position * g.m_position + g.m_start)
        u, packed = u + position * g.u_position, self._packed(f)
        with f.loop(((count + (tiles - 1)) // tiles).maximum(1)) as block:
            items = (count - block.i * tiles).minimum(tiles)
            steps = (items + (DEPTH - 1)) // DEPTH
            self._pack_block(f, packed, mm + block.i * (tiles * g.k_padded),
                             v + block.i * (tiles * g.c_padded), steps)
            with f.either(first & block.i.equals(0)) as (fill, add):
                with fill:
                    self._multiply_block(f, packed, u, steps, self.products[True])
                with add:
                    self._multiply_block(f, packed, u, steps, self.products[False])

    def _packed(self, f: Function) -> Pointer:
        """Where this worker packs, or this part is packed."""
        g = self.g
        return f.frame.load_pointer(SCRATCH) + (
            (f.task if g.own else f.worker) * g.worker_floats
            + (g.part_floats * self.s.parts + g.packed_start))

    def _pack_block(self, f: Function, packed: Pointer, mm: Pointer, v: Pointer,
                    steps: Index) -> None:
        g, tiles = self.g, self.s.tiles
        with f.loop(g.k_padded // SIDE) as k:
            to = packed + k.i * (g.steps * g.step_floats)
            f.call(self.pack_m, mm + k.i * (tiles * g.lanes), to, steps)
            f.call(self.turn, to, steps * PARTS[self.g.products])
        with f.loop(g.c_blocks) as c:
            f.call(self.pack_v, v + c.i * (tiles * g.width), self._block_of_v(packed, c.i), steps)

    def _block_of_v(self, packed: Pointer, c: Index) -> Pointer:
        g = self.g
        return packed + (c * (self.s.vectors * g.steps * g.step_floats) + g.m_packed)

    def _multiply_block(self, f: Function, packed: Pointer, u: Pointer, steps: Index,
                        products: Any) -> None:
        """All rows against all columns, columns outermost."""
        g, groups = self.g, self.g.k_padded // SIDE
        with f.loop(g.c_blocks) as c:
            v, sums = self._block_of_v(packed, c.i), u + c.i * (g.k_padded * g.width)

            def rows(k: Index, count: int, v: Pointer = v, sums: Pointer = sums) -> None:
                f.call(products[count], packed + k * (g.steps * g.step_floats), v,
                       sums + k * (SIDE * g.width), steps)

            if groups >= MOST:
                with f.loop(groups - groups % MOST, step=MOST) as k:
                    rows(k.i, MOST)
            if groups % MOST:
                rows(f.index(groups - 1), 1)

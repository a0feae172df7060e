"""Tiles of images by their numbers: where they lie is known only when the code runs.

A dilated convolution is dh x dw dense ones that are interleaved, its phases. Tiles count them as
images; neighbouring pixels of a tile are dh rows and dw columns apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..emit import Function, Index
from ..emit.sizes import InCode


@dataclass(frozen=True)
class Place:
    """Image or phase of one, row and column of a tile; all values are emitted ones."""

    image: Index
    row: Index
    col: Index


def is_dilated(z: InCode) -> bool:
    return bool(z.p.dilation != (1, 1))


def image_of(z: InCode, tile: Place) -> Index:
    return tile.image // z.phases if is_dilated(z) else tile.image


def first_row(z: InCode, tile: Place) -> Index:
    """The row of a tile's first output."""
    row = tile.row * (z.s.tile_h * z.p.dilation[0])
    return row + tile.image % z.phases // z.phase_cols if is_dilated(z) else row


def first_col(z: InCode, tile: Place) -> Index:
    """The column of a tile's first output."""
    col = tile.col * (z.s.tile_w * z.p.dilation[1])
    return col + tile.image % z.phases % z.phase_cols if is_dilated(z) else col


def outputs_from(first: Index, end: Index, apart: int) -> Index:
    """How many outputs of a phase an axis has from the first of a tile on."""
    return end - first if apart == 1 else ((end - first).maximum(0) + (apart - 1)) // apart


def all_tiles(z: InCode, batch: Index) -> Index:
    tiles = batch * z.tiles
    return tiles * z.phases if is_dilated(z) else tiles


def place_of(z: InCode, tile: Index) -> Place:
    image, rest = tile // z.tiles, tile % z.tiles
    cols = z.tile_cols
    return Place(image, rest // cols, rest % cols)


@contextmanager
def each_tile(f: Function, z: InCode, first: Place, stop: Index,
              start: Index | int = 0) -> Iterator[tuple[Index, Place]]:
    """Emit a loop over tiles start..stop of a block, with their places; `first` is the start's.

    Places are counted on: a division takes longer than a step of a small tile.
    """
    rows, cols = z.tile_rows, z.tile_cols
    with f.loop(stop, start=start, carry=[first.image, first.row, first.col]) as t:
        image, row, col = t.values
        yield t.i, Place(image, row, col)
        ends = (col + 1).equals(cols)
        row, col = ends.select(row + 1, row), ends.select(f.index(0), col + 1)
        ends = row.equals(rows)
        t.values = [ends.select(image + 1, image), ends.select(f.index(0), row), col]

"""Tiles of images by their numbers: where they lie is known only when the code runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..emit import Function, Index
from ..emit.sizes import InCode


@dataclass(frozen=True)
class Place:
    """Image, row and column of a tile; all values are emitted ones."""

    image: Index
    row: Index
    col: Index


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

"""Images of another size: nearest pixels, or means of four weighted by their distance.

Code depends on the kind alone. A table says where pixels come from: an entry for every row of the
result, then one for every column, each with the places of two and their weights.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..emit import ELEMENTS, Element, Function, Index, Module, Pointer, Vector
from ..emit.elements import MOVED
from ..emit.sizes import InCode
from ..emit.threads import BATCH, WEIGHT, X, Y, emit_entry, emit_region
from .channels import Block, each_block

KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}
NEAREST, BILINEAR = range(2)
TABLE = WEIGHT  # there is no weight
ENTRY = struct.Struct("=qqff")

# floats of an image and from a place to the next; rows that are a task's
SIZES = ("x_image", "y_image", "y_row", "y_col", "out_h", "out_w", "channels", "rows", "row_tasks")


class Source(NamedTuple):
    """Where a row or a column comes from: two places, in floats, and the share of each."""

    first: int
    second: int
    share: float = 1.0
    other: float = 0.0


def table(rows: Sequence[Source], columns: Sequence[Source]) -> bytes:
    return b"".join(ENTRY.pack(*source) for source in (*rows, *columns))


class _Entry:
    """A source inside a function."""

    def __init__(self, table: Pointer, line: Index) -> None:
        self._at = table.bytes(line * ENTRY.size)
        self.first = self._at.load_index(0)

    def places(self) -> tuple[Index, Index]:
        return self.first, self._at.load_index(1)

    def shares(self) -> tuple[Vector, Vector]:
        return self._at.bytes(16).broadcast(), self._at.bytes(20).broadcast()


def make(p: Problem, s: Schedule, isa: Isa, kind: int) -> Module:
    """x, images, to y, images of another size, by the table."""
    m = Module(isa)
    with m.function("rows", **KINDS) as f:
        _rows(f, (MOVED if kind == NEAREST else ELEMENTS)[p.dtype], kind)
    emit_entry(m, [emit_region(m, "resample", lambda f, frame: (
        frame.load_index(BATCH) * InCode(f, None, SIZES).row_tasks), f)])
    return m


def _rows(f: Function, element: Element, kind: int) -> None:
    z = InCode(f, None, SIZES)
    out_h, out_w, channels, y_row, y_col = z.out_h, z.out_w, z.channels, z.y_row, z.y_col
    image, first = f.task // z.row_tasks, f.task % z.row_tasks * z.rows
    x = f.frame.load_pointer(X, element) + image * z.x_image
    y = f.frame.load_pointer(Y, element) + image * z.y_image
    table, pixel = f.frame.load_pointer(TABLE), PIXELS[kind]
    with f.loop((first + z.rows).minimum(out_h), start=first) as row:
        down = _Entry(table, row.i)
        with f.loop(out_w) as col:
            pixel(f, x, down, _Entry(table, out_h + col.i), y + (row.i * y_row + col.i * y_col),
                  channels)


def _nearest(f: Function, x: Pointer, down: _Entry, across: _Entry, y: Pointer,
             channels: Index) -> None:
    source = x + (down.first + across.first)
    each_block(f, f.index(0), channels, (f.isa.registers // 4, 1),
               lambda block: block.store(y, block.load(source)))


def _bilinear(f: Function, x: Pointer, down: _Entry, across: _Entry, y: Pointer,
              channels: Index) -> None:
    corners = [x + (i + j) for i in down.places() for j in across.places()]
    shares = [i * j for i in down.shares() for j in across.shares()]

    def mix(block: Block) -> None:
        terms = zip(*(block.load(corner) for corner in corners))
        block.store(y, [_weighted(f, four, shares) for four in terms])

    each_block(f, f.index(0), channels, (f.isa.registers // 8, 1), mix)


def _weighted(f: Function, values: Sequence[Vector], shares: Sequence[Vector]) -> Vector:
    found = values[0] * shares[0]
    for value, share in zip(values[1:], shares[1:]):
        found = f.fma(value, share, found)
    return found


PIXELS = {NEAREST: _nearest, BILINEAR: _bilinear}

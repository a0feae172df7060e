"""The order `squares` of sums of outer products, for few items and large sums.

All items are read first, by all threads. Then a task takes a square of rows and columns: its sums
at all positions stay near a core, and become results at once. So U, which is larger than everything
else, never travels. Squares read the same items again, from the last cache.
"""

from __future__ import annotations

from typing import Any

from ..emit import Function, Index, Pointer
from ..emit.threads import SCRATCH, emit_entry, emit_region
from ..emit.tiling import ceil_div

ITEMS_A_TASK = 4
KINDS: Any = {"frame": "pointer", "task": "index", "worker": "index"}


def emit_squares(outer: Any) -> None:
    """The two regions of an `OuterSums`."""
    g, m = outer.g, outer.m
    with m.function("read", **KINDS) as reading:
        _read(outer, reading)
    with m.function("square", **KINDS) as square:
        _square(outer, square)

    def handfuls(f: Function, frame: Pointer) -> Index:
        return (_blocks(outer, f) * outer.s.tiles + (ITEMS_A_TASK - 1)) // ITEMS_A_TASK

    squares = ceil_div(g.k_padded, g.square_k) * ceil_div(g.c_padded, g.square_c)
    emit_entry(m, [emit_region(m, "items", handfuls, reading),
                   emit_region(m, "squares", lambda f, frame: squares, square)])


def _blocks(outer: Any, f: Function) -> Index:
    """Of items; one also where there is nothing to sum."""
    blocks: Index = ((outer.total(f) + (outer.s.tiles - 1)) // outer.s.tiles).maximum(1)
    return blocks


def _read(outer: Any, f: Function) -> None:
    """Some items; those that fill up the last block are zeros."""
    g, scratch, total = outer.g, f.frame.load_pointer(SCRATCH), outer.total(f)
    start = f.task * ITEMS_A_TASK
    stop = (start + ITEMS_A_TASK).minimum(_blocks(outer, f) * outer.s.tiles)
    there = stop.minimum(total)
    outer.read(f, scratch, f.index(0), start, there)
    with f.loop(g.positions) as position:
        outer.clear(f, scratch, position.i, start.maximum(total), stop)
        outer.clear_lanes(f, scratch, position.i, there, start)


def _square(outer: Any, f: Function) -> None:
    g, panels = outer.g, f.frame.load_pointer(SCRATCH)
    across = ceil_div(g.c_padded, g.square_c)
    k, c = f.task // across * g.square_k, f.task % across * g.square_c
    u = panels + (f.worker * g.worker_floats + g.part_floats)
    with f.loop(g.positions) as position:
        v = panels + position.i * g.v_position
        mm = panels + (position.i * g.m_position + g.m_start)
        to = u + position.i * g.square_position
        _multiply(outer, f, (mm, v, to), k, c, f.index(0), True)
        with f.loop(_blocks(outer, f), start=1) as block:
            _multiply(outer, f, (mm, v, to), k, c, block.i, False)
    outer.finish_square(f, u, k, c)


def _multiply(outer: Any, f: Function, places: tuple[Pointer, Pointer, Pointer], k: Index, c: Index,
              block: Index, first: bool) -> None:
    """A block of items at one position."""
    g, s, (mm, v, u), zero = outer.g, outer.s, places, f.index(0)
    wide = ((g.c_padded - c) // g.width).minimum(g.square_c // g.width)
    high = ((g.k_padded - k) // s.rows).minimum(g.square_k // s.rows)
    with f.loop(wide) as i, f.loop(high) as j:
        row = j.i * s.rows
        f.call(outer.products[first],
               mm + (block * (s.tiles * g.k_padded) + g.m_at(zero, k + row)),
               v + (block * (s.tiles * g.c_padded) + g.v_at(zero, c + i.i * g.width)),
               u + (i.i * (g.square_k * g.width) + row * g.width))

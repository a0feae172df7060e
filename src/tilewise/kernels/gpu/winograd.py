"""Winograd's transforms of images; the products between them are those of grouped 1x1 filters.

A program takes some tiles and some channels and holds all values of each tile in registers. The
matrices arrive as the straight-line code of `winograd_math`, so nothing is multiplied by 0 or 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .epilogue import by_channel, finish, larger

# tuples grow as the compiler goes through a loop that it unrolls
# mypy: disable-error-code="assignment"


@triton.jit
def combined(values, STEPS: tl.constexpr, OUTPUTS: tl.constexpr):
    """A line of values under straight-line code: every step is factor * a + sign * b."""
    for i in tl.static_range(len(STEPS)):
        value = values[STEPS[i][0]]
        if STEPS[i][1] != 1:
            value *= STEPS[i][1]
        if STEPS[i][3] == 1:
            value += values[STEPS[i][2]]
        elif STEPS[i][3] == -1:
            value -= values[STEPS[i][2]]
        values = values + (value,)
    found = ()
    for i in tl.static_range(len(OUTPUTS)):
        found = found + (values[OUTPUTS[i]],)
    return found


@triton.jit
def by_columns(values, STEPS: tl.constexpr, OUTPUTS: tl.constexpr, COUNT: tl.constexpr):
    """Every one of COUNT columns of values becomes a row of the result."""
    found = ()
    for column in tl.static_range(COUNT):
        line = ()
        for i in tl.static_range(column, len(values), COUNT):
            line = line + (values[i],)
        found = found + combined(line, STEPS, OUTPUTS)
    return found


@triton.jit
def transformed(values, STEPS: tl.constexpr, OUTPUTS: tl.constexpr, SIDE: tl.constexpr):
    """A square of SIDE x SIDE values, transformed along both axes."""
    turned = by_columns(values, STEPS, OUTPUTS, SIDE)
    return by_columns(turned, STEPS, OUTPUTS, len(OUTPUTS))


@triton.jit
def tiles_of(N, ROWS: tl.constexpr, COLS: tl.constexpr, BT: tl.constexpr):
    """The tiles of this program: number, image, row, column and whether there is such a tile."""
    tile = tl.program_id(0) * BT + tl.arange(0, BT)
    return (tile, tile // (ROWS * COLS), tile // COLS % ROWS, tile % COLS,
            tile < N * ROWS * COLS)


@triton.jit
def inside(first, live, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """For each of COUNT places from the first on, whether it lies in a row of SIZE."""
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (live & (first + i >= 0) & (first + i < SIZE),)
    return found


@triton.jit
def transform_input(x, v, N, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
                    TOP: tl.constexpr, LEFT: tl.constexpr, ROWS: tl.constexpr,
                    COLS: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr,
                    STEPS: tl.constexpr, OUTPUTS: tl.constexpr, BT: tl.constexpr,
                    BC: tl.constexpr):
    """v as (tile, position, channel) from the squares of x that tiles of the output see."""
    tile, image, row, column, live = tiles_of(N, ROWS, COLS, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    kept = (c < C)[None, :]
    h = row * TILE - TOP
    w = column * TILE - LEFT
    in_rows = inside(h, live, H, SIDE)
    in_columns = inside(w, live, W, SIDE)
    corner = x + (((image * H + h) * W + w) * C)[:, None] + c[None, :]
    values = ()
    for i in tl.static_range(SIDE * SIDE):
        mask = (in_rows[i // SIDE] & in_columns[i % SIDE])[:, None] & kept
        value = tl.load(corner + (i // SIDE * W + i % SIDE) * C, mask=mask, other=0.0)
        values = values + (value.to(tl.float32),)
    values = transformed(values, STEPS, OUTPUTS, SIDE)
    mask = live[:, None] & kept
    first = v + (tile * (SIDE * SIDE * C))[:, None] + c[None, :]
    for i in tl.static_range(SIDE * SIDE):
        tl.store(first + i * C, values[i].to(v.dtype.element_ty), mask=mask)


@triton.jit
def transform_output(m, bias, residual, y, N, OH: tl.constexpr, OW: tl.constexpr,
                     K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
                     TILE: tl.constexpr, SIDE: tl.constexpr, STEPS: tl.constexpr,
                     OUTPUTS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
                     ACT: tl.constexpr, ACT_A: tl.constexpr, ACT_B: tl.constexpr,
                     POOL: tl.constexpr, BT: tl.constexpr,
                     BC: tl.constexpr):
    """y from m, which is (tile, position, channel), with the epilogue; windows lie in one tile."""
    tile, image, row, column, live = tiles_of(N, ROWS, COLS, BT)
    k = tl.program_id(1) * BC + tl.arange(0, BC)
    kept = (k < K)[None, :]
    first = m + (tile * (SIDE * SIDE * K))[:, None] + k[None, :]
    values = ()
    for i in tl.static_range(SIDE * SIDE):
        values = values + (tl.load(first + i * K, mask=live[:, None] & kept, other=0.0),)
    values = transformed(values, STEPS, OUTPUTS, SIDE)
    added, slope = by_channel(bias, k, k < K, K, BIAS, ACT)
    in_rows = inside(row * TILE, live, OH, TILE)
    in_columns = inside(column * TILE, live, OW, TILE)
    corner = (((image * OH + row * TILE) * OW + column * TILE) * K)[:, None] + k[None, :]
    done = ()
    for i in tl.static_range(TILE * TILE):
        mask = (in_rows[i // TILE] & in_columns[i % TILE])[:, None] & kept
        offsets = corner + (i // TILE * OW + i % TILE) * K
        value = finish(values[i], added, slope, residual, offsets, mask, BIAS, RESIDUAL, ACT,
                       ACT_A, ACT_B, False)
        if POOL:
            done = done + (value,)
        else:
            tl.store(y + offsets, value.to(y.dtype.element_ty), mask=mask)
    if POOL:
        store_pooled(y, done, image, row, column, live, k, OH // 2, OW // 2, K, TILE // 2)


@triton.jit
def largest(values, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Of a 2x2 window in lines of WIDTH values."""
    return larger(larger(values[FIRST], values[FIRST + 1]),
                  larger(values[FIRST + WIDTH], values[FIRST + WIDTH + 1]))


@triton.jit
def store_pooled(y, values, image, row, column, live, k, OH: tl.constexpr, OW: tl.constexpr,
                 K: tl.constexpr, TILE: tl.constexpr):
    """The largest of every 2x2 window of tiles with twice TILE values a side."""
    in_rows = inside(row * TILE, live, OH, TILE)
    in_columns = inside(column * TILE, live, OW, TILE)
    corner = y + (((image * OH + row * TILE) * OW + column * TILE) * K)[:, None] + k[None, :]
    for i in tl.static_range(TILE * TILE):
        value = largest(values, i // TILE * 4 * TILE + i % TILE * 2, 2 * TILE)
        mask = (in_rows[i // TILE] & in_columns[i % TILE])[:, None] & (k < K)[None, :]
        tl.store(corner + (i // TILE * OW + i % TILE) * K, value.to(y.dtype.element_ty), mask=mask)

"""Convolution as one matrix product whose operands are gathered while they are multiplied.

Forward and backward data are the same walk: a row is an output pixel, a column an output channel,
and the sum runs over the taps that reach the pixel and over the channels below each of them.
Shapes are constants, the batch is not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .epilogue import by_channel, finish


@triton.jit
def tile_of(tiles_m, tiles_n, SWIZZLE: tl.constexpr):
    """The tile of this program: SWIZZLE rows of tiles share their columns in the cache."""
    pid = tl.program_id(0)
    if SWIZZLE == 1:
        return pid // tiles_n, pid % tiles_n
    band = pid // (SWIZZLE * tiles_n)
    first = band * SWIZZLE
    height = tl.minimum(tiles_m - first, SWIZZLE)
    inside = pid - first * tiles_n
    return first + inside % height, inside // height


@triton.jit
def walk(x, w, image, base_h, base_w, live, columns, columns_live, taps_h, taps_w, r0, s0,
         H: tl.constexpr, W: tl.constexpr, PITCH: tl.constexpr, DEPTH: tl.constexpr,
         S: tl.constexpr, HOP_H: tl.constexpr, HOP_W: tl.constexpr, RSTEP: tl.constexpr,
         SSTEP: tl.constexpr, W_TAP: tl.constexpr, W_DEPTH: tl.constexpr, W_COLUMN: tl.constexpr,
         FLAT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
         BK: tl.constexpr):
    """The sums of a tile: over taps (r0 + i * RSTEP, s0 + j * SSTEP) and DEPTH channels.

    The taps of a row lie at (base_h + i * HOP_H, base_w + j * HOP_W) of its image. FLAT takes
    BK of all taps' channels at a time; else a step stays within one tap.
    """
    acc = tl.zeros((BM, BN), tl.float32)
    lane = tl.arange(0, BK)
    if FLAT:
        total = taps_h * taps_w * DEPTH
        for start in range(0, total, BK):
            q = start + lane
            tap = q // DEPTH
            d = q % DEPTH
            i = tap // taps_w
            j = tap % taps_w
            ih = base_h[:, None] + (i * HOP_H)[None, :]
            iw = base_w[:, None] + (j * HOP_W)[None, :]
            inside = live[:, None] & (q < total)[None, :]
            inside = inside & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
            a = tl.load(x + ((image[:, None] + ih) * W + iw) * PITCH + d[None, :], mask=inside,
                        other=0.0)
            rows = ((r0 + i * RSTEP) * S + s0 + j * SSTEP) * W_TAP + d * W_DEPTH
            b = tl.load(w + rows[:, None] + (columns * W_COLUMN)[None, :],
                        mask=(q < total)[:, None] & columns_live[None, :], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        BLOCKS: tl.constexpr = (DEPTH + BK - 1) // BK
        EVEN: tl.constexpr = DEPTH % BK == 0
        for step in range(taps_h * taps_w * BLOCKS):
            tap = step // BLOCKS
            d = (step % BLOCKS) * BK + lane
            i = tap // taps_w
            j = tap % taps_w
            ih = base_h + i * HOP_H
            iw = base_w + j * HOP_W
            inside = live & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
            seen = inside[:, None]
            kept = columns_live[None, :]
            if not EVEN:
                seen = seen & (d < DEPTH)[None, :]
                kept = kept & (d < DEPTH)[:, None]
            a = tl.load(x + (((image + ih) * W + iw) * PITCH)[:, None] + d[None, :], mask=seen,
                        other=0.0)
            rows = ((r0 + i * RSTEP) * S + s0 + j * SSTEP) * W_TAP + d * W_DEPTH
            b = tl.load(w + rows[:, None] + (columns * W_COLUMN)[None, :], mask=kept, other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def forward(x, w, bias, residual, y, N,
            H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
            S: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, STRIDE_H: tl.constexpr,
            STRIDE_W: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, DIL_H: tl.constexpr,
            DIL_W: tl.constexpr, GROUPS: tl.constexpr, BIAS: tl.constexpr,
            RESIDUAL: tl.constexpr, ACT: tl.constexpr, ACT_A: tl.constexpr,
            ACT_B: tl.constexpr, POOL: tl.constexpr,
            W_GROUP: tl.constexpr, W_TAP: tl.constexpr, W_DEPTH: tl.constexpr,
            W_COLUMN: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWIZZLE: tl.constexpr):
    """y = x * w, then the epilogue; rows are output pixels, in fours where they are pooled."""
    GC: tl.constexpr = C // GROUPS
    GK: tl.constexpr = K // GROUPS
    SIDE: tl.constexpr = 2 if POOL else 1
    VH: tl.constexpr = OH // SIDE
    VW: tl.constexpr = OW // SIDE
    total = N * VH * VW * SIDE * SIDE
    tile_m, tile_n = tile_of(tl.cdiv(total, BM), (GK + BN - 1) // BN, SWIZZLE)
    group = tl.program_id(1)
    m = tile_m * BM + tl.arange(0, BM)
    column = tile_n * BN + tl.arange(0, BN)
    window = m // (SIDE * SIDE)
    oh = (window // VW) % VH * SIDE
    ow = window % VW * SIDE
    if POOL:
        oh += m % 4 // 2
        ow += m % 2
    n = window // (VW * VH)
    live = m < total
    acc = walk(x + group * GC, w + group * W_GROUP, n * H, oh * STRIDE_H - TOP,
               ow * STRIDE_W - LEFT, live, column, column < GK, R, S, 0, 0, H, W, C, GC, S,
               DIL_H, DIL_W, 1, 1, W_TAP, W_DEPTH, W_COLUMN, FLAT, PRECISION, BM, BN, BK)
    k = group * GK + column
    offsets = (((n * OH + oh) * OW + ow) * K)[:, None] + k[None, :]
    mask = live[:, None] & (column < GK)[None, :]
    added, slope = by_channel(bias, k, column < GK, K, BIAS, ACT)
    acc = finish(acc, added, slope, residual, offsets, mask, BIAS, RESIDUAL, ACT, ACT_A, ACT_B,
                 POOL)
    if POOL:
        pooled = tile_m * (BM // 4) + tl.arange(0, BM // 4)
        offsets = (pooled * K)[:, None] + k[None, :]
        mask = (pooled < N * VH * VW)[:, None] & (column < GK)[None, :]
    tl.store(y + offsets, acc.to(y.dtype.element_ty), mask=mask)


@triton.jit
def first_tap(residue, TAPS: tl.constexpr, STEP: tl.constexpr, STRIDE: tl.constexpr,
              DILATION: tl.constexpr):
    """The first tap that reaches pixels of this residue, and how many do, every STEP-th."""
    first = TAPS
    for tap in tl.static_range(STEP):
        first = tl.where(tap * DILATION % STRIDE == residue, tl.minimum(first, tap), first)
    return first, (TAPS - first + STEP - 1) // STEP


@triton.jit
def backward_data(dy, w, dx, N,
                  H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
                  R: tl.constexpr, S: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
                  STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, TOP: tl.constexpr,
                  LEFT: tl.constexpr, DIL_H: tl.constexpr, DIL_W: tl.constexpr,
                  RSTEP: tl.constexpr, SSTEP: tl.constexpr, GROUPS: tl.constexpr,
                  W_GROUP: tl.constexpr, W_TAP: tl.constexpr, W_DEPTH: tl.constexpr,
                  W_COLUMN: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWIZZLE: tl.constexpr):
    """dx from dy: the pixels of one residue modulo the stride are reached by the same taps."""
    GC: tl.constexpr = C // GROUPS
    GK: tl.constexpr = K // GROUPS
    VH: tl.constexpr = (H + STRIDE_H - 1) // STRIDE_H
    VW: tl.constexpr = (W + STRIDE_W - 1) // STRIDE_W
    total = N * VH * VW
    tile_m, tile_n = tile_of(tl.cdiv(total, BM), (GC + BN - 1) // BN, SWIZZLE)
    group = tl.program_id(1) % GROUPS
    phase = tl.program_id(1) // GROUPS
    m = tile_m * BM + tl.arange(0, BM)
    column = tile_n * BN + tl.arange(0, BN)
    h = m // VW % VH * STRIDE_H + phase // STRIDE_W
    v = m % VW * STRIDE_W + phase % STRIDE_W
    n = m // (VW * VH)
    live = (m < total) & (h < H) & (v < W)
    r0, taps_h = first_tap((phase // STRIDE_W + TOP) % STRIDE_H, R, RSTEP, STRIDE_H, DIL_H)
    s0, taps_w = first_tap((phase % STRIDE_W + LEFT) % STRIDE_W, S, SSTEP, STRIDE_W, DIL_W)
    acc = walk(dy + group * GK, w + group * W_GROUP, n * OH,
               (h + TOP - r0 * DIL_H) // STRIDE_H, (v + LEFT - s0 * DIL_W) // STRIDE_W,
               live, column, column < GC, taps_h, taps_w, r0, s0, OH, OW, K, GK, S,
               -(RSTEP * DIL_H // STRIDE_H), -(SSTEP * DIL_W // STRIDE_W), RSTEP, SSTEP,
               W_TAP, W_DEPTH, W_COLUMN, FLAT, PRECISION, BM, BN, BK)
    offsets = (((n * H + h) * W + v) * C)[:, None] + (group * GC + column)[None, :]
    tl.store(dx + offsets, acc.to(dx.dtype.element_ty),
             mask=live[:, None] & (column < GC)[None, :])


@triton.jit
def backward_weight(x, dy, dw, N, steps,
                    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
                    R: tl.constexpr, S: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
                    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, TOP: tl.constexpr,
                    LEFT: tl.constexpr, DIL_H: tl.constexpr, DIL_W: tl.constexpr,
                    GROUPS: tl.constexpr, FLAT: tl.constexpr, ATOMIC: tl.constexpr,
                    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                    BK: tl.constexpr, SWIZZLE: tl.constexpr):
    """One part of dw, as (K, R, S, C): the sum over `steps` blocks of BK output pixels.

    Columns are channels of one tap, or of all taps in a row where FLAT.
    """
    GC: tl.constexpr = C // GROUPS
    GK: tl.constexpr = K // GROUPS
    WIDTH: tl.constexpr = R * S * GC
    BLOCKS: tl.constexpr = (GC + BN - 1) // BN
    TILES_N: tl.constexpr = (WIDTH + BN - 1) // BN if FLAT else R * S * BLOCKS
    tile_m, tile_n = tile_of((GK + BM - 1) // BM, TILES_N, SWIZZLE)
    group = tl.program_id(1) % GROUPS
    part = tl.program_id(1) // GROUPS
    k = tile_m * BM + tl.arange(0, BM)
    if FLAT:
        column = tile_n * BN + tl.arange(0, BN)
        columns_live = column < WIDTH
        tap = column // GC
        c = column % GC
    else:
        tap = tile_n // BLOCKS
        c = tile_n % BLOCKS * BN + tl.arange(0, BN)
        columns_live = c < GC
        column = tap * GC + c
    rise = tap // S * DIL_H - TOP
    reach = tap % S * DIL_W - LEFT
    total = N * OH * OW
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(steps):
        m = (part * steps + step) * BK + tl.arange(0, BK)
        live = m < total
        n = m // (OH * OW)
        h = m // OW % OH * STRIDE_H
        v = m % OW * STRIDE_W
        a = tl.load(dy + (m * K)[:, None] + (group * GK + k)[None, :],
                    mask=live[:, None] & (k < GK)[None, :], other=0.0)
        if FLAT:
            ih = h[:, None] + rise[None, :]
            iw = v[:, None] + reach[None, :]
            inside = live[:, None] & columns_live[None, :]
            inside = inside & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
            b = tl.load(x + ((n[:, None] * H + ih) * W + iw) * C + (group * GC + c)[None, :],
                        mask=inside, other=0.0)
        else:
            ih = h + rise
            iw = v + reach
            inside = live & (ih >= 0) & (ih < H) & (iw >= 0) & (iw < W)
            b = tl.load(x + (((n * H + ih) * W + iw) * C)[:, None] + (group * GC + c)[None, :],
                        mask=inside[:, None] & columns_live[None, :], other=0.0)
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
    offsets = ((group * GK + k) * WIDTH)[:, None] + column[None, :]
    mask = (k < GK)[:, None] & columns_live[None, :]
    if ATOMIC:
        tl.atomic_add(dw + offsets, acc, mask=mask, sem="relaxed")
    else:
        tl.store(dw + part * (K * WIDTH) + offsets, acc.to(dw.dtype.element_ty), mask=mask)


@triton.jit
def add_parts(partial, dw, parts, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of all parts, always in the same order."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for part in range(parts):
        acc += tl.load(partial + part * SIZE + i, mask=i < SIZE, other=0.0)
    tl.store(dw + i, acc.to(dw.dtype.element_ty), mask=i < SIZE)

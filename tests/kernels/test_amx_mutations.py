"""Deliberate faults in what runs on the matrix unit: the harness must notice every one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support import faults
from support.faults import changed, replaced
from support.matrix_unit import needs_amx
from support.mutations import PADDED, POOLED, Mutation, check, next_bias, whole_vectors

from tilewise.kernels import matrix
from tilewise.kernels.cpu.between import epilogue
from tilewise.kernels.cpu.conv import geometry, outer, winograd_weight
from tilewise.kernels.cpu.emit import Function, amx, parts, tiling, unit, units
from tilewise.kernels.cpu.emit.microkernel import LINE
from tilewise.kernels.cpu.matrix import direct as direct_amx
from tilewise.kernels.cpu.matrix import direct_weight as direct_weight_amx
from tilewise.kernels.cpu.matrix import outer as outer_amx
from tilewise.kernels.cpu.matrix import winograd as winograd_amx
from tilewise.kernels.cpu.prepare import direct_matrix as direct_prepare
from tilewise.kernels.cpu.prepare import winograd_amx as winograd_prepare_amx

__all__ = ["check"]  # called by faults
WIDE = "n1c37h33w33k21r3s3p1_f32_forward"  # tiles for several multiplies
STRIDED = "n2c37h9w19k21r3s3u2p1_f32_forward"
BARE = "n2c37h5w7k21r1s1_f32_forward+bias"
ADDED = "n2c37h9w19k21r3s3p1_f32_forward+bias+residual+relu+pool2"
FEW = "n2c3h9w19k21r3s3u1x2p1_f32_forward"  # a row of taps is one of the depth's
LONG = "n1c600h3w5k21r3s3p1_f32_forward"  # the depth takes two passes
MANY = "n1c1100h5w9k21r1s1_f32_forward"  # and five, of two lengths
SPLIT, JOINED = parts.split, direct_prepare._Joined._place
PAIRS, LARGEST = parts.split_pairs, direct_amx._Direct._largest
WEIGHT = "n2c37h17w19k40r3s3p1_f32_backward_weight"  # three tiles of rows, several blocks
ODD = "n3c83h7w7k43r1s1_f32_backward_weight"  # pixels are packed from where they lie
BANDS = {"order": "bands", "tiles": 32, "parts": 2}
PIXELS = {"tiles": 32}


def without_product(products: int, which: int) -> Callable[..., None]:
    pairs = matrix.PAIRS[products]
    return lambda patch: patch.setitem(matrix.PAIRS, products, pairs[:which] + pairs[which + 1:])


def always(module: Any, fresh: bool, name: str = "multiply") -> Callable[..., None]:
    """Every multiply begins with zeros, or none does."""
    multiply = getattr(module, name)
    return replaced(module, name,
                    lambda f, a, b, c, left, right, out, walk, products, _, *others, **options:
                    multiply(f, a, b, c, left, right, out, walk, products, fresh, *others,
                             **options))


def without_next(f: Function, *operands: Any) -> None:
    """All blocks of a column read the first one's rows."""
    amx.multiply_column(f, *operands[:-2], 0, operands[-1])


def clears_nothing(self: Any) -> Function:
    with self.m.function("clear", frame="pointer", to="pointer", count="index") as f:
        pass
    return f


def rows_of_a_swapped(f: Function, a: Any, b: Any, c: Any, left: unit.Side, *others: Any) -> None:
    units.multiply(f, a, b, c, replace(left, tiles=left.tiles[::-1]), *others)


def another_band(self: Any, f: Function, scratch: Any, first: Any, start: Any, stop: Any,
                 band: int = 0) -> None:
    READ(self, f, scratch, first, start, stop, max(0, band - 1))


READ = winograd_weight.Gradient.read
MUTATIONS = {
    "one of three products is left out": Mutation(
        without_product(3, 2), "cpu_direct_bf16x3", PADDED),
    "one of six products is left out": Mutation(
        without_product(6, 4), "cpu_winograd_bf16x6", PADDED),
    "the second part repeats the first": Mutation(
        replaced(direct_amx, "split", lambda f, value, count: SPLIT(f, value, 1) * count),
        "cpu_direct_bf16x3", BARE),
    "tiles of rows are swapped": Mutation(
        replaced(direct_amx, "multiply", rows_of_a_swapped), "cpu_direct_bf16", PADDED),
    "a row of a tile is its neighbour's": Mutation(
        replaced(winograd_amx._OnTiles, "_v_of_tile", lambda self, tile:
                 (tile // 16) * self.g.v_rows + (tile % 16 - tile % 2) * LINE),
        "cpu_winograd_bf16x3", PADDED),
    "pairs of channels are swapped": Mutation(
        replaced(direct_prepare, "split_pairs", lambda f, low, high, parts: PAIRS(
            f, high, low, parts)), "cpu_direct_bf16", BARE),
    "the last block of weights is as wide as the others": Mutation(
        changed(geometry.BlocksOfK, "has_tail", lambda tail: False), "cpu_direct_bf16x3",
        BARE),
    "an odd channel is left out": Mutation(
        changed(direct_prepare.Geometry, "values", lambda values: values - values % 2),
        "cpu_direct_bf16", BARE),
    "a tap reads the next pixel": Mutation(
        changed(direct_amx.Geometry, "starts", lambda starts: [
            (at + LINE * (tap == 1), tap) for at, tap in starts]), "cpu_direct_bf16", STRIDED),
    "two taps read each other's phase": Mutation(
        changed(direct_amx.Geometry, "starts", lambda starts: [
            (starts[1][0], 0), (starts[0][0], 1), *starts[2:]]), "cpu_direct_bf16", STRIDED),
    "a row of taps begins a pixel late": Mutation(
        changed(direct_amx.Geometry, "rows_of_taps", lambda rows: [
            ((at + LINE, tap), loop) for (at, tap), loop in rows]), "cpu_direct_bf16", STRIDED),
    "rows of taps read the first": Mutation(
        changed(direct_amx.Geometry, "rows_of_taps", lambda rows: [
            (start, (count, 0, over)) for start, (count, _, over) in rows]), "cpu_direct_bf16",
        PADDED),
    "pooling takes the first": Mutation(
        replaced(direct_amx, "pool", lambda window: window[0]), "cpu_direct_bf16", POOLED),
    "pooling leaves out the last": Mutation(
        replaced(direct_amx, "pool", lambda window: epilogue.pool(window[:-1])), "cpu_direct_bf16",
        ADDED),
    "sums that wait to be pooled share their place": Mutation(
        changed(direct_amx.Geometry, "wait", lambda wait: False), "cpu_direct_bf16", POOLED),
    "a window's residuals are all the first's": Mutation(
        replaced(direct_amx._Direct, "_largest", lambda self, f, window, k, count: LARGEST(
            self, f, [(c, window[0][1]) for c, _ in window], k, count)), "cpu_direct_bf16", ADDED),
    "padding beside joined taps is not cleared": Mutation(
        replaced(direct_amx, "emit_zero", lambda *_: None), "cpu_direct_bf16", FEW),
    "joined taps are in another order": Mutation(
        replaced(direct_prepare._Joined, "_place", lambda self, value: JOINED(
            self, value % 3 * 3 + value // 3)), "cpu_direct_bf16", FEW),
    "a row of joined taps lies among the packed ones": Mutation(
        changed(direct_amx.Geometry, "sums_start", lambda start: start - 64), "cpu_direct_bf16",
        FEW),
    "padding is not cleared": Mutation(
        replaced(direct_amx._Direct, "_clear", clears_nothing), "cpu_direct_bf16", PADDED),
    "the depth is not filled up": Mutation(
        replaced(winograd_amx._OnTiles, "_fill_up", lambda self, f: None), "cpu_winograd_bf16x3",
        PADDED),
    "sums begin with what was there": Mutation(
        always(direct_amx, fresh=False), "cpu_direct_bf16", PADDED),
    "the second pass forgets the first": Mutation(
        always(winograd_amx, True, "multiply_column"), "cpu_winograd_bf16x3", LONG),
    "all blocks of a column are the first": Mutation(
        replaced(winograd_amx, "multiply_column", without_next), "cpu_winograd_bf16x3", WIDE),
    "the first operands of a block are the last's": Mutation(
        replaced(unit.Unit, "load_first", lambda self, a, b: None), "cpu_winograd_bf16x3", PADDED),
    "the second pass over pixels forgets the first": Mutation(
        always(direct_amx, fresh=True), "cpu_direct_bf16x3", MANY, {"block_rows": 64}),
    "a pass reads the weights of the one before": Mutation(
        changed(tiling.Partition, "start", lambda start: start - 1), "cpu_direct_bf16x3", MANY,
        {"block_rows": 64}),
    "pixels of the next image are left out": Mutation(
        changed(direct_amx.Geometry, "tasks", lambda tasks: tasks - 1), "cpu_direct_bf16", BARE),
    "tails are loaded whole": Mutation(whole_vectors("load"), "cpu_direct_bf16", BARE),
    "tails are stored whole": Mutation(whole_vectors("store"), "cpu_direct_bf16", BARE),
    "the last columns count as a whole block": Mutation(
        changed(geometry.BlocksOfK, "has_tail", lambda _: False), "cpu_direct_bf16", PADDED),
    "scratch is too small": Mutation(
        changed(direct_amx.Geometry, "pack_floats", lambda floats: floats - 16), "cpu_direct_bf16",
        PADDED),
    "the bias is the neighbour's": Mutation(
        replaced(direct_amx, "finish", next_bias), "cpu_direct_bf16", PADDED),
    "channels of a prepared pair are swapped": Mutation(
        replaced(winograd_prepare_amx, "split_pairs",
                 lambda f, low, high, count: PAIRS(f, high, low, count)),
        "cpu_winograd_bf16x3", PADDED),
    "a product of a weight's gradient is left out": Mutation(
        without_product(6, 3), "cpu_direct_weight_bf16x6", WEIGHT, {"tiles": 64}),
    "an item stands for its neighbour": Mutation(
        replaced(outer_amx, "split_pairs", lambda f, low, high, count: PAIRS(f, low, low, count)),
        "cpu_direct_weight_bf16", WEIGHT, PIXELS),
    "the second part of items repeats the first": Mutation(
        replaced(outer_amx, "split_pairs",
                 lambda f, low, high, count: PAIRS(f, low, high, 1) * count),
        "cpu_winograd_weight_bf16x3", WEIGHT, BANDS),
    "tiles are not turned": Mutation(
        replaced(outer_amx, "transpose", lambda f, rows: rows), "cpu_direct_weight_bf16", WEIGHT,
        PIXELS),
    "items that do not exist are not cleared": Mutation(
        replaced(outer.OuterSums, "clear", lambda *_: None), "cpu_direct_weight_bf16", WEIGHT,
        PIXELS),
    "the next block of items forgets the sums": Mutation(
        always(outer_amx, fresh=True), "cpu_winograd_weight_bf16x3", WEIGHT, BANDS),
    "sums of items begin with what was there": Mutation(
        always(outer_amx, fresh=False), "cpu_direct_weight_bf16", WEIGHT, PIXELS),
    "the last tile of rows is left out": Mutation(
        changed(outer.OuterGeometry, "k_padded", lambda rows: rows - rows % 32),
        "cpu_direct_weight_bf16", WEIGHT, PIXELS),
    "a band reads its neighbour's rows": Mutation(
        replaced(winograd_weight.Gradient, "read", another_band), "cpu_winograd_weight_bf16x3",
        WEIGHT, BANDS),
    "workers pack over each other's end": Mutation(
        changed(outer_amx.TileGeometry, "worker_floats", lambda floats: floats - 16),
        "cpu_winograd_weight_bf16x3", WEIGHT, BANDS),
    "tiles are not configured for items": Mutation(
        replaced(outer_amx.OuterOnTiles, "tiles", False), "cpu_direct_weight_bf16", WEIGHT, PIXELS),
    "a pixel stands for its neighbour": Mutation(
        replaced(direct_weight_amx, "split_pairs",
                 lambda f, low, high, count: PAIRS(f, low, low, count)),
        "cpu_direct_weight_bf16", ODD, PIXELS),
    "channels of a pixel are loaded whole": Mutation(
        replaced(direct_weight_amx, "_some", lambda f, at, lanes: at.load()),
        "cpu_direct_weight_bf16", ODD, PIXELS),
    "packed pixels are not turned": Mutation(
        replaced(outer_amx, "transpose", lambda f, rows: rows), "cpu_direct_weight_bf16", ODD,
        PIXELS),
    "the next pixels forget the sums": Mutation(
        always(outer_amx, fresh=True), "cpu_direct_weight_bf16", ODD, PIXELS),
    "panels of pixels are too small": Mutation(
        changed(outer_amx.TileGeometry, "worker_floats", lambda floats: floats - 16),
        "cpu_direct_weight_bf16", ODD, PIXELS),
    "tiles are not configured": Mutation(
        replaced(amx.Tiles, "configure", staticmethod(lambda f: None)), "cpu_direct_bf16", PADDED),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_amx_mutations")


@needs_amx
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])

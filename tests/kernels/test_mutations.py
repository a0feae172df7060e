"""Deliberate faults in the generators: the harness must notice every one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import faults, harness
from support.faults import changed, replaced
from support.gradients import check_fused_mask, check_pack, check_prepared
from support.mutations import PADDED, POOLED, Mutation, check, next_bias, whole_vectors

from tilewise.bench import judged
from tilewise.bench.guarded import UNTOUCHED, Mismatch, launch_guarded
from tilewise.core import Algorithm, Problem, Schedule, Target
from tilewise.kernels.cpu import emit
from tilewise.kernels.cpu.between import masks, pooling
from tilewise.kernels.cpu.between.epilogue import activate, finish
from tilewise.kernels.cpu.conv import (
    depthwise,
    depthwise_weight,
    direct,
    direct_weight,
    geometry,
    outer,
    pixels,
    winograd_filters,
    winograd_geometry,
    winograd_output,
    winograd_weight,
)
from tilewise.kernels.cpu.conv.transforms import transform
from tilewise.kernels.cpu.conv.windows import Windows
from tilewise.kernels.cpu.emit import Index, Pointer, threads, tiling
from tilewise.kernels.cpu.emit.microkernel import Walk, multiply
from tilewise.kernels.cpu.emit.threads import Y
from tilewise.kernels.cpu.emit.tiling import emit_copy
from tilewise.kernels.cpu.prepare import winograd as winograd_prepare
from tilewise.kernels.cpu.prepare.mirrored import mirror

__all__ = ["check"]  # called by faults

BARE = "n2c5h9w34k21r3s3_f32_forward"
ONE_SIDE = "n2c5h9w19k21r3s3p1x0-1_f32_forward"
DILATED = "n1c5h11w19k21r3s3p2d2_f32_forward"
DEPTHWISE = "n2c21h9w19k21r3s3p1g21_f32_forward+bias"
MASKED = "n2c5h9w19k21r3s3p1_f32_forward+bias+relu+pool2+mask"
DATA = "n2c5h9w19k21r3s3p1_f32_backward_data"
FEW_TILES = "n1c210h6w7k37r3s3p1_f32_forward+bias"
FILTERS = {"order": "filters", "tile_h": 2, "tile_w": 2, "k_parts": 1}
WEIGHT = "n2c5h9w19k21r3s3p1_f32_backward_weight"
SQUARES = {"order": "squares", "parts": 1, "tiles": 7, "blocks": 16}
DEPTHWISE_WEIGHT = "n2c21h9w19k21r3s3p1g21_f32_backward_weight"
GROUPS_WEIGHT = "n2c40h9w19k40r3s3p1g20_f32_backward_weight"  # several groups share a vector
WIDE_GROUPS = "n2c42h9w19k42r3s3p1g2_f32_backward_weight"  # a group has more than one
GRADIENTS = depthwise_weight._Gradient._gradients


def without_sums(*args: Any, sums: Any, **options: Any) -> Any:
    return multiply(*args, **options)


def check_own_scratch(algorithm: Algorithm, p: Problem, t: Target, s: Schedule) -> None:
    """The last worker, alone, leaves the scratch of the others as it is.

    Two threads that share theirs spoil a result only if they meet in it.
    """
    o = harness.operands(p, "floats", seed=0)
    prepared = algorithm.prepare(p, t, s, o.weight)
    given = {"x": harness.laid_out(o.x, p), "weight": prepared.flatten(), "bias": o.bias,
             "residual": harness.laid_out(o.residual, p)}
    made = {"y": p.n * p.k * p.out_h * p.out_w, "scratch": algorithm.workspace(p, t, s) // 4}
    with harness.last_worker_alone():
        found = launch_guarded(algorithm.build(p, t, s), given, made, p.n, t.threads, "end")
    *others, last = (found["scratch"].view(torch.int32) == UNTOUCHED).chunk(t.threads)
    if last.all():
        raise Mismatch("the last worker used no scratch of its own")
    if not all(other.all() for other in others):
        raise Mismatch("the last worker used another's scratch")


def check_masks(algorithm: Algorithm, p: Problem, t: Target, s: Schedule) -> None:
    """Of a pass of its own, and fused."""
    check_pack(p, t, 0)
    check_fused_mask(p, t, s, 0)


def check_weight(algorithm: Algorithm, p: Problem, t: Target, s: Schedule) -> None:
    s = Schedule(**{name: s[name] for name in ("tile_h", "tile_w", "order", "vectors")})
    check_prepared(Problem(1, p.c, p.r, p.s, p.k, p.r, p.s), t, s, "contiguous", 0)


def skewed_walk(walk: Walk) -> Walk:
    """A float too far in every turn of the outermost loop."""
    (count, a_step, b_step), *inner = walk.loops
    return Walk(((count, a_step + 1, b_step), *inner))


def activation_first(f: Any, value: Any, p: Any, *operands: Any) -> Any:
    later = p.with_(epilogue=replace(p.epilogue, activation=None))
    return finish(f, activate(f, value, p.epilogue), later, *operands)


def short_copy(f: Any, to: Pointer, source: Pointer, count: Any) -> None:
    emit_copy(f, to, source, count - 1)


def later_gradients(self: Any, *args: Any) -> Any:
    """Of each filter those of the next."""
    first, *others = GRADIENTS(self, *args)
    return [*others, first]


def long_copy(f: Any, to: Pointer, source: Pointer, count: Any) -> None:
    emit_copy(f, to, source, count + 1)


def seven_bits(value: emit.Vector) -> emit.Vector:
    """A vector rounded towards zero to bfloat16, which small integers survive."""
    return value.words().masked(-65536).floats()


def same_worker(patch: pytest.MonkeyPatch) -> None:
    """All threads take themselves for the first."""
    count = Pointer.fetch_add
    patch.setattr(Pointer, "fetch_add", lambda self, i: count(self, i) * int(i != threads.WORKER))


def without_parts(owner: Any) -> Callable[..., None]:
    """Only the first of the partial sums reaches the result."""
    finish = owner.finish

    def patched(self: Any) -> Any:
        kept, self.s = self.s, self.s.with_(parts=1)
        try:
            return finish(self)
        finally:
            self.s = kept

    return replaced(owner, "finish", patched)


def shifted_windows(*sizes: Any) -> Windows:
    """Those of the input, which has padding, a pixel too far to the left."""
    *others, (top, left), element = sizes
    return Windows(*others, (top, left + (left > 0)), element)


def last_of_equals(f: Any, values: list[Any], *operands: Any) -> list[Any]:
    return masks_passes(f, values[::-1], *operands)[::-1]


def another_flag(f: Any, values: list[Any], *operands: Any) -> list[Any]:
    first, second, *others = masks_passes(f, values, *operands)
    return [second, first, *others]


def everywhere(name: str, value: Any) -> Callable[..., None]:
    """A function of `masks` replaced there and where it was imported to."""
    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(masks, name, value)
        patch.setattr(winograd_output, name, value)
    return apply


masks_passes, masks_place = masks.passes, masks.place
TASKS = direct._Direct._tasks


def one_row_more(rows: tuple[Index, Index]) -> tuple[Index, Index]:
    return rows[0], rows[1] + 1


def one_row_early(rows: tuple[Index, Index]) -> tuple[Index, Index]:
    return (rows[0] - 1).maximum(0), rows[1]


MUTATIONS = {
    "rows of a packed input overlap": Mutation(
        changed(direct.Geometry, "row_pitch", lambda pitch: pitch - 1), "cpu_direct", ONE_SIDE),
    "rows of the input are too far apart": Mutation(
        changed(direct.Geometry, "row_pitch", lambda pitch: pitch + 1), "cpu_direct", BARE),
    "the last piece of an axis is not moved back": Mutation(
        replaced(direct, "emit_pieces", lambda f, sizes, counts, first, last:
                 tiling.emit_pieces(f, sizes, counts, first, last + 99)), "cpu_direct",
        "n2c5h9w13k21r3s3p1_f32_forward", {"tile_h": 1, "tile_w": 14, "vectors": 1}),
    "the last row of tiles is not moved up": Mutation(
        replaced(direct._Direct, "_row", lambda self, z, tile: tile * self.s.tile_h), "cpu_direct",
        PADDED, {"tile_h": 2, "tile_w": 7, "vectors": 1}),
    "a piece too few": Mutation(
        changed(direct.Geometry, "pieces", lambda pieces: (
            *(n - (i == pieces.index(max(pieces))) for i, n in enumerate(pieces)),)),
        "cpu_direct", PADDED, {"tile_h": 1, "tile_w": 4, "vectors": 1}),
    "a dilated walk goes astray": Mutation(
        changed(direct.Geometry, "walk_seen", skewed_walk), "cpu_direct", DILATED),
    "the last channels count as a whole block": Mutation(
        changed(geometry.BlocksOfK, "has_tail", lambda _: False), "cpu_direct", PADDED),
    "padding is not packed": Mutation(
        changed(direct.Geometry, "packed", lambda _: False), "cpu_direct", PADDED),
    "a copy stops early": Mutation(
        replaced(direct, "emit_copy", short_copy), "cpu_direct", PADDED),
    "a copy goes on": Mutation(
        replaced(direct, "emit_copy", long_copy), "cpu_direct", PADDED),
    "the activation comes before the residual": Mutation(
        replaced(direct, "finish", activation_first), "cpu_direct", PADDED),
    "the bias is the neighbour's": Mutation(
        replaced(direct, "finish", next_bias), "cpu_direct", PADDED),
    "scratch is too small": Mutation(
        changed(direct.Geometry, "pack_floats", lambda floats: floats - 16), "cpu_direct", PADDED),
    "threads share their scratch": Mutation(same_worker, "cpu_direct", PADDED,
                                            judge=check_own_scratch),
    "the last task is left out": Mutation(
        replaced(direct._Direct, "_tasks", lambda self, f, frame: TASKS(self, f, frame) - 1),
        "cpu_direct", PADDED),
    "inputs lose their low bits": Mutation(
        changed(Pointer, "broadcast", seven_bits), "cpu_direct", BARE),
    "tails are loaded as whole vectors": Mutation(whole_vectors("load"), "cpu_pointwise",
                                                  "n1c5h3w3k21r1s1_f32_forward+bias"),
    "tails are stored as whole vectors": Mutation(whole_vectors("store"), "cpu_pointwise",
                                                  "n1c5h3w3k21r1s1_f32_forward"),
    "lanes are transposed wrongly": Mutation(
        changed(pixels, "transpose", lambda turned: turned[::-1]), "cpu_pixels", BARE),
    "planes overlap": Mutation(
        changed(pixels.Geometry, "plane", lambda floats: floats - 1), "cpu_pixels", BARE),
    "a filter row below the image": Mutation(
        changed(depthwise._Depthwise, "_filter_rows", one_row_more), "cpu_depthwise", DEPTHWISE),
    "a filter row above the image": Mutation(
        changed(depthwise._Depthwise, "_filter_rows", one_row_early), "cpu_depthwise", DEPTHWISE),
    "borders count as inside": Mutation(
        changed(depthwise.Geometry, "may_be_outside", lambda maybe: False), "cpu_depthwise",
        DEPTHWISE),
    "channels of another group": Mutation(
        changed(depthwise._Depthwise, "_channels_of", lambda value: value.shuffle(
            value, [lane ^ 4 for lane in range(value.lanes)])), "cpu_depthwise",
        "n1c20h5w9k20r3s3p1g5_f32_forward"),
    "outputs that do not see the image count as those that do": Mutation(
        changed(depthwise.Geometry, "far_out", lambda far: False), "cpu_depthwise",
        "n1c21h3w9k21r3s3p0x5g21_f32_forward"),
    "a direct convolution's pooling takes the first": Mutation(
        replaced(pooling, "pool", lambda window: window[0]), "cpu_direct", POOLED),
    "what is to be pooled lies where rows are packed": Mutation(
        changed(direct.Geometry, "partial_floats", lambda floats: 0), "cpu_direct", POOLED),
    "parts are summed into the result that is still to be pooled": Mutation(
        replaced(direct._Direct, "_result", lambda self, f: f.frame.load_pointer(Y)),
        "cpu_direct", POOLED.replace("c5", "c8"), {"split": 4}),
    "pooling takes the first": Mutation(
        replaced(winograd_output, "pool", lambda window: window[0]), "cpu_winograd", POOLED),
    "positions overlap": Mutation(
        changed(winograd_geometry.Geometry, "v_position",
                lambda floats: floats - winograd_geometry.APART - 1), "cpu_winograd", PADDED),
    "no room for zeros": Mutation(
        changed(winograd_geometry.Geometry, "scratch_bytes", lambda size: size - 64),
        "cpu_winograd", PADDED),
    "sums of filters do not begin at zero": Mutation(
        replaced(winograd_filters, "emit_zero", lambda *_: None), "cpu_winograd", FEW_TILES,
        FILTERS),
    "positions of filters overlap": Mutation(
        changed(winograd_geometry.Geometry, "u_position",
                lambda floats: floats - winograd_geometry.APART - 1), "cpu_winograd", FEW_TILES,
        FILTERS),
    "parts of filters are not added": Mutation(
        replaced(winograd_filters, "multiply", without_sums), "cpu_winograd", FEW_TILES, FILTERS),
    "filters have too little scratch": Mutation(
        changed(winograd_geometry.Geometry, "scratch_bytes", lambda size: size - (1 << 16)),
        "cpu_winograd", FEW_TILES, FILTERS),
    "tiles that stick out are written as a whole": Mutation(
        replaced(winograd_output.Output, "_cut_off", winograd_output.Output._inside),
        "cpu_winograd", PADDED, {"tile_h": 4, "tile_w": 4}),
    "tiles are counted in shorter rows": Mutation(
        changed(winograd_geometry.Geometry, "tile_cols", lambda cols: cols - 1), "cpu_winograd",
        PADDED),
    "taps are not reversed": Mutation(
        replaced(judged, "mirror", lambda weight, groups: mirror(weight, groups).flip(2, 3)),
        "cpu_direct", DATA),
    "channels are not swapped": Mutation(
        replaced(judged, "mirror", lambda weight, groups: weight.flip(2, 3)), "cpu_direct",
        "n2c12h9w9k12r3s3p1g3_f32_backward_data"),
    "windows are shifted": Mutation(
        replaced(winograd_weight, "Windows", shifted_windows), "cpu_winograd_weight", WEIGHT),
    "what no tile was read into stays": Mutation(
        replaced(outer.OuterSums, "clear", lambda *_: None), "cpu_winograd_weight", WEIGHT,
        {"tiles": 7}),
    "what no pixel was read into stays": Mutation(
        replaced(outer.OuterSums, "clear", lambda *_: None), "cpu_direct_weight", WEIGHT,
        {"tiles": 7}),
    "what no tile of a square was read into stays": Mutation(
        replaced(outer.OuterSums, "clear", lambda *_: None), "cpu_winograd_weight", WEIGHT,
        SQUARES),
    "a square begins a vector late": Mutation(
        changed(outer.OuterGeometry, "square_position", lambda floats: floats - 16),
        "cpu_winograd_weight", WEIGHT, SQUARES),
    "squares of workers overlap": Mutation(
        changed(outer.OuterGeometry, "worker_floats", lambda floats: 0), "cpu_winograd_weight",
        WEIGHT, SQUARES),
    "a part of the tiles is left out": Mutation(
        without_parts(winograd_weight.Gradient), "cpu_winograd_weight", WEIGHT, {"parts": 2}),
    "a part of the pixels is left out": Mutation(
        without_parts(direct_weight.Gradient), "cpu_direct_weight", WEIGHT, {"parts": 2}),
    "parts have too little scratch": Mutation(
        changed(outer.OuterGeometry, "part_floats", lambda floats: floats - 16),
        "cpu_winograd_weight", WEIGHT),
    "an unrolled row stops early": Mutation(
        replaced(direct_weight, "emit_copy", short_copy), "cpu_direct_weight", WEIGHT),
    "a tap sees a column too many": Mutation(
        changed(depthwise_weight.Geometry, "columns", lambda ends: (ends[0], ends[1] + 1)),
        "cpu_depthwise_weight", DEPTHWISE_WEIGHT),
    "a tap misses its first column": Mutation(
        changed(depthwise_weight.Geometry, "columns", lambda ends: (ends[0] + 1, ends[1])),
        "cpu_depthwise_weight", DEPTHWISE_WEIGHT),
    "a tap sees a row too many": Mutation(
        changed(depthwise_weight.Geometry, "lines", lambda ends: (ends[0], ends[1] + 1)),
        "cpu_depthwise_weight", GROUPS_WEIGHT),
    "channels meet the gradients of the next filter": Mutation(
        replaced(depthwise_weight._Gradient, "_gradients", later_gradients),
        "cpu_depthwise_weight", GROUPS_WEIGHT),
    "gradients are spread over the wrong filters": Mutation(
        replaced(depthwise_weight._Gradient, "_gradients", later_gradients),
        "cpu_depthwise_weight", WIDE_GROUPS),
    "a group begins a channel late": Mutation(
        changed(depthwise_weight.Geometry, "group_places", lambda size: size + 1),
        "cpu_depthwise_weight", WIDE_GROUPS),
    "the last filters of a group are left out": Mutation(
        changed(depthwise_weight.Geometry, "rows", lambda rows: rows[:1]),
        "cpu_depthwise_weight", WIDE_GROUPS, {"rows": 4}),
    "sums of a part are a float short": Mutation(
        changed(depthwise_weight.Geometry, "part_floats", lambda floats: floats - 16),
        "cpu_depthwise_weight", WIDE_GROUPS),
    "a gradient goes to the last of equals": Mutation(
        everywhere("passes", last_of_equals), "cpu_winograd", MASKED, judge=check_masks),
    "flags are exchanged": Mutation(
        everywhere("passes", another_flag), "cpu_winograd", MASKED, judge=check_masks),
    "flags of the next pixel": Mutation(
        everywhere("place", lambda mask, k, channels, pixel=0: masks_place(
            mask, k, channels, pixel + 1)), "cpu_winograd", MASKED, judge=check_masks),
    "a filter too many is gathered": Mutation(
        replaced(Pointer, "gather_at", lambda source, offsets, gather=Pointer.gather_at: gather(
            source, [*offsets[:-1], offsets[-1] + 4096])), "cpu_winograd", PADDED,
        judge=check_weight),
    "taps of a weight are transposed": Mutation(
        replaced(winograd_prepare, "transform", lambda f, down, across, load, *others:
                 transform(f, down, across, lambda i, j: load(j, i), *others)), "cpu_winograd",
        PADDED, judge=check_weight),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_mutations")


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])


def test_what_no_test_notices_is_told() -> None:
    faults.assert_noticed(["passed", "SIGSEGV"])
    for said in (["passed", "passed"], ["noticed: a lot", "noticed: a lot"], ["passed", "Error()"]):
        with pytest.raises(AssertionError):
            faults.assert_noticed(said)

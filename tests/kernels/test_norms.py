"""Norms, softmax and channel shuffle between unmapped pages, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from support import faults
from torch import Tensor
from torch.nn import functional as F

from tilewise.bench.guarded import Mismatch, launch_guarded
from tilewise.core.isa import ISA
from tilewise.core.problem import Epilogue, Problem
from tilewise.core.schedule import Schedule
from tilewise.core.target import Target
from tilewise.kernels.cpu.between import (
    along,
    groups,
    norms,
    pointwise,
    shuffle,
    softmax,
    softmax_across,
    totals,
)
from tilewise.kernels.cpu.between.pointwise import Chain
from tilewise.kernels.cpu.emit import F32, F64, Vector
from tilewise.kernels.cpu.emit.launch import launch_of, launcher
from tilewise.kernels.cpu.emit.requests import Request

HOST = Target.host(threads=2)
ROWS = [name for name, row in ISA.items() if row.lanes <= HOST.lanes
        and HOST.row.machines == row.machines and not row.matrix]
ANY = Problem(1, 1, 1, 1, 1, 1, 1)
NAN = float("nan")
HALVES = {torch.bfloat16: "bf16", torch.float16: "f16"}
STORED = {torch.bfloat16: 2.0 ** -8, torch.float16: 2.0 ** -11}  # half a unit in the last place
WIDENING = [name for name in ROWS if ISA[name].widens]


def draw(*shape: int, offset: float = 0.0) -> Tensor:
    made = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=made) + offset


def apart(x: Tensor, pitch: int) -> Tensor:
    """Rows of a matrix a pitch apart, NaN between them."""
    whole = torch.full((len(x), pitch), NAN, dtype=x.dtype)
    whole[:, :x.shape[1]] = x
    return whole.flatten()[:(len(x) - 1) * pitch + x.shape[1]]


def near(found: Tensor, expected: Tensor, error: float, what: str) -> None:
    """But for one rounding, where values are stored in 16 bits."""
    stored = STORED.get(found.dtype, 0.0) * expected.abs()
    worst = ((found.double() - expected).abs() - stored).max().item()
    if not worst <= error:
        raise Mismatch(f"{what}: {worst} from float64, {error} allowed")


def both(kernel: Any, given: dict[str, Tensor | None], made: dict[str, int]) -> list[Tensor]:
    """What it makes at the start and at the end of a page, on one thread and on two."""
    x = given["x"]
    assert x is not None
    return [launch_guarded(kernel, given, made, 1, threads, side, x.dtype)["y"]
            for threads, side in ((1, "start"), (2, "end"))]


def normalised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    """In two passes, in float64."""
    x = x.double()
    away = x - x.mean(dims, keepdim=True)
    return away / (away.square().mean(dims, keepdim=True) + eps).sqrt()


# layer norm


def check_layer(row: str, shape: tuple[int, int], gap: int = 0, offset: float = 0.0,
                has: tuple[bool, bool] = (True, True),
                dtype: torch.dtype = torch.float32) -> None:
    rows, columns = shape
    x = draw(rows, columns, offset=offset).to(dtype)
    weight, bias = (draw(columns + i)[:columns] if one else None for i, one in enumerate(has))
    expected = normalised(x, (1,), 1e-5)
    expected = expected if weight is None else expected * weight.double()
    expected = expected if bias is None else expected + bias.double()
    words = norms.sizes(rows, columns, columns + gap, columns, 1e-5)
    p = ANY.with_(dtype=HALVES.get(dtype, "f32"))
    kernel = launcher(norms.make, p, Schedule(), ISA[row], *map(int, has), sizes=words)
    for y in both(kernel, {"x": apart(x, columns + gap), "weight": weight, "bias": bias},
                  {"y": x.numel()}):
        near(y.view(shape), expected, 4e-6, f"layer norm of {shape} on {row}")


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (9, 3), (5, 16), (37, 96), (6, 33), (3, 515),
                                   (2, 4096 + 70), (300, 31)])
def test_layer_norm(row: str, shape: tuple[int, int]) -> None:
    check_layer(row, shape)


@pytest.mark.parametrize("has", [(False, False), (True, False), (False, True)])
def test_layer_norm_without_a_weight_or_a_bias(has: tuple[bool, bool]) -> None:
    check_layer(ROWS[0], (7, 50), has=has)


@pytest.mark.parametrize("row", ROWS)
def test_layer_norm_of_rows_apart_and_of_large_means(row: str) -> None:
    check_layer(row, (7, 50), gap=3)
    check_layer(row, (9, 100), offset=1e4)
    check_layer(row, (3, 9000), offset=1e4)


# group norm


def check_groups(row: str, shape: tuple[int, int, int], many: int, gap: int = 0,
                 offset: float = 0.0, has: tuple[bool, bool] = (True, True),
                 activation: str | None = None,
                 act: Callable[[Tensor], Tensor] = lambda x: x,
                 dtype: torch.dtype = torch.float32) -> None:
    images, pixels, channels = shape
    x = draw(images * pixels, channels, offset=offset).to(dtype)
    weight, bias = (draw(channels + i)[:channels] if one else None for i, one in enumerate(has))
    parts = x.view(images, pixels, many, channels // many)
    expected = normalised(parts, (1, 3), 1e-5).reshape(images * pixels, channels)
    expected = expected if weight is None else expected * weight.double()
    expected = expected if bias is None else expected + bias.double()
    words, scratch = groups.sizes(groups.Shape(images, pixels, channels, channels + gap, many),
                                  1e-5, ISA[row].lanes)
    p = ANY.with_(epilogue=Epilogue(activation=activation), dtype=HALVES.get(dtype, "f32"))
    kernel = launcher(groups.make, p, Schedule(), ISA[row], *map(int, has), sizes=words)
    found = both(kernel, {"x": apart(x, channels + gap), "weight": weight, "bias": bias},
                 {"y": x.numel(), "scratch": scratch})
    for y in found:
        near(y.view(x.shape), act(expected), 4e-6, f"{many} groups of {shape} on {row}")
    if not torch.equal(*found):
        raise Mismatch("other bits on other threads")


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("shape", "many"), [
    ((1, 2, 1), 1), ((2, 9, 3), 3), ((2, 30, 21), 3), ((1, 64, 32), 8), ((3, 17, 40), 40),
    ((1, 1, 6), 2), ((2, 1700, 33), 11), ((1, 7, 300), 2), ((1, 25, 70), 1)])
def test_group_norm(row: str, shape: tuple[int, int, int], many: int) -> None:
    check_groups(row, shape, many)


@pytest.mark.parametrize("has", [(False, False), (True, False), (False, True)])
def test_group_norm_without_a_weight_or_a_bias(has: tuple[bool, bool]) -> None:
    check_groups(ROWS[0], (2, 30, 21), 3, has=has)


@pytest.mark.parametrize("row", ROWS)
def test_group_norm_of_slices_and_of_large_means(row: str) -> None:
    check_groups(row, (2, 30, 21), 7, gap=5)
    check_groups(row, (1, 3000, 12), 3, offset=1e4)


@pytest.mark.parametrize("row", ROWS)
def test_group_norm_with_activations(row: str) -> None:
    check_groups(row, (2, 30, 21), 3, activation="silu", act=F.silu)
    check_groups(row, (2, 30, 21), 21, activation="leaky_relu:0.2",
                 act=lambda x: F.leaky_relu(x, 0.2))


# in 16 bits


@pytest.mark.parametrize("row", WIDENING)
@pytest.mark.parametrize("dtype", HALVES)
def test_norms_of_16_bits(row: str, dtype: torch.dtype) -> None:
    for shape in ((1, 1), (9, 3), (37, 96), (6, 33), (3, 515)):
        check_layer(row, shape, dtype=dtype)
    check_layer(row, (7, 50), gap=3, offset=30.0, dtype=dtype)
    for extent, many in (((1, 2, 1), 1), ((2, 30, 21), 3), ((1, 64, 32), 8), ((3, 17, 40), 40)):
        check_groups(row, extent, many, dtype=dtype)
    check_groups(row, (2, 30, 21), 7, gap=5, dtype=dtype)
    check_groups(row, (2, 1700, 33), 11, offset=30.0, activation="silu", act=F.silu, dtype=dtype)


@pytest.mark.parametrize("row", WIDENING)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("columns", [1, 15, 16, 39, 70])
def test_a_batch_norm_of_16_bits(row: str, dtype: torch.dtype, columns: int) -> None:
    """Scale and shift are float32: of a mean of 100, 16 bits would leave little."""
    x, scale, shift = (draw(7, columns).to(dtype), draw(columns) + 3, draw(columns) + 100)
    chain = Chain(("image", "norm", "norm"), (("fma", 0, 1, 2), ("relu", 3)), HALVES[dtype])
    batch, words = pointwise.sizes(chain, 1, 7, columns, [columns, 0, 0], columns)
    kernel = launch_of(Request(pointwise.make, chain, Schedule(), ISA[row], (), True), words)
    assert batch == 1
    expected = F.relu(x.double() * scale.double() + shift.double())
    for y in both(kernel, {"x": x.flatten(), "weight": scale, "bias": shift}, {"y": x.numel()}):
        near(y.view(x.shape), expected, 4e-5, f"batch norm of {columns} on {row}")


# softmax


def check_softmax(row: str, shape: tuple[int, int], gap: int = 0) -> None:
    rows, columns = shape
    x = draw(rows, columns) * 20
    words = softmax.sizes(rows, columns, columns + gap, columns)
    kernel = launcher(softmax.make, ANY, Schedule(), ISA[row], sizes=words)
    expected = x.double().softmax(1)
    for y in both(kernel, {"x": apart(x, columns + gap)}, {"y": x.numel()}):
        near(y.view(shape) / expected.clamp(min=1e-30), expected / expected.clamp(min=1e-30), 1e-5,
             f"softmax of {shape} on {row}")


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 2), (9, 3), (5, 16), (37, 96), (6, 33), (3, 515),
                                   (2, 4096 + 70), (300, 31)])
def test_softmax(row: str, shape: tuple[int, int]) -> None:
    check_softmax(row, shape)
    check_softmax(row, shape, gap=2)


def check_across(row: str, shape: tuple[int, int, int, int]) -> None:
    n, beside, planes, pixels = shape
    x = draw(*shape) * 20
    words = softmax_across.sizes(n * beside, beside, planes, pixels, ISA[row].lanes)
    kernel = launcher(softmax_across.make, ANY, Schedule(), ISA[row], sizes=words)
    expected = x.double().transpose(1, 2).softmax(1)
    for y in both(kernel, {"x": x.flatten()}, {"y": x.numel()}):
        near(y.view(expected.shape) / expected.clamp(min=1e-30),
             expected / expected.clamp(min=1e-30), 1e-5, f"softmax across {shape} on {row}")


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 32), (2, 4, 16, 33), (1, 3, 5, 70), (3, 1, 7, 500),
                                   (1, 2, 3, 5000)])
def test_softmax_across_planes(row: str, shape: tuple[int, int, int, int]) -> None:
    check_across(row, shape)


@pytest.mark.parametrize("row", ROWS)
def test_a_task_of_softmax_across_writes_its_own_pixels(row: str) -> None:
    planes, pixels = 16, 1029
    *words, parts, _ = softmax_across.sizes(1, 1, planes, pixels, ISA[row].lanes)
    kernel = launcher(softmax_across.make, ANY, Schedule(), ISA[row], sizes=[*words, parts, 1])
    x = draw(planes, pixels)
    for y in both(kernel, {"x": x.flatten()}, {"y": x.numel()}):
        own = y.view(planes, pixels)[:, :pixels // parts]
        near(own, x.double().softmax(0)[:, :pixels // parts], 1e-6, f"one task on {row}")
        assert y.view(planes, pixels)[:, pixels // parts:].isnan().all()
    assert parts > 1


def test_tasks_of_softmax_across_share_no_pixels() -> None:
    """Powers wait in the result: a vector of another task would be divided twice."""
    for pixels in range(32, 1100):
        for lanes in (1, 4, 8, 16):
            *_, parts, _ = softmax_across.sizes(1, 1, 16, pixels, lanes)
            least = min((i + 1) * pixels // parts - i * pixels // parts for i in range(parts))
            assert least >= softmax_across.TOGETHER * lanes


# totals


REFERENCES: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    totals.SUM: lambda x: x.sum(1) / 7, totals.LARGEST: lambda x: x.amax(1),
    totals.LENGTH: lambda x: x.norm(dim=1)}


def check_totals(row: str, shape: tuple[int, int], kind: int, gap: int = 0) -> None:
    rows, columns = shape
    x = draw(rows, columns) - 3  # so that a zero would be the largest
    words = totals.sizes(rows, columns, columns + gap, 7.0)
    kernel = launcher(totals.make, ANY, Schedule(), ISA[row], kind, sizes=words)
    for y in both(kernel, {"x": apart(x, columns + gap)}, {"y": rows}):
        expected = REFERENCES[kind](x.double())
        near(y / expected, expected / expected, 1e-6, f"total {kind} of {shape} on {row}")


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kind", REFERENCES)
def test_totals(row: str, kind: int) -> None:
    for shape in ((1, 1), (5, 2), (9, 16), (37, 96), (6, 33), (3, 515), (2, 4096 + 70), (300, 31)):
        check_totals(row, shape, kind)
        check_totals(row, shape, kind, gap=2)


# channel shuffle


def check_shuffle(row: str, rows: int, many: int, members: int, gap: int = 0) -> None:
    x = torch.arange(float(rows * many * members)).view(rows, many * members)
    words = shuffle.sizes(rows, many * members, many, many * members + gap, many * members)
    kernel = launcher(shuffle.make, ANY, Schedule(), ISA[row], many, sizes=words)
    expected = x.view(rows, many, members).transpose(1, 2).flatten()
    for y in both(kernel, {"x": apart(x, many * members + gap)}, {"y": x.numel()}):
        if not torch.equal(y, expected):
            raise Mismatch(f"{many} groups of {members} on {row} are not shuffled")


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("many", [1, 2, 3, 4, 5, 8])
def test_channel_shuffle(row: str, many: int) -> None:
    for members in (1, 2, 5, 16, 24, 58):
        check_shuffle(row, 9, many, members)
        check_shuffle(row, 700 // members, many, members, gap=1)


# faults


class Mutation(NamedTuple):
    apply: faults.Patch
    look: Callable[[], None]


def check(mutation: Mutation) -> None:
    with faults.patched(mutation.apply):
        mutation.look()


def look_at_layers() -> None:
    check_layer(ROWS[0], (9, 100), offset=1e4)
    check_layer(ROWS[0], (2, 4096 + 70))
    check_layer(ROWS[0], (300, 31))


def look_at_groups() -> None:
    check_groups(ROWS[0], (2, 1700, 33), 11)
    check_groups(ROWS[0], (1, 3000, 12), 3, offset=1e4)


def look_at_softmax() -> None:
    check_softmax(ROWS[0], (6, 33))


def look_at_totals() -> None:
    check_totals(ROWS[0], (6, 33), totals.LARGEST)
    check_totals(ROWS[0], (300, 31), totals.LENGTH)
    check_totals(ROWS[0], (300, 31), totals.SUM)


def look_at_shuffles() -> None:
    check_shuffle(ROWS[0], 9, 3, 24)


def no_mask(self: along.Columns, value: Vector, other: Vector) -> Vector:
    return value


def whole_vectors(self: along.Columns, rows: Any) -> list[Vector]:
    return [row.load(self.first) for row in rows]


def moments(f: Any, common: Any, x: Any, mean: Any) -> Any:
    """Without what the rounded mean is away from the mean."""
    apart, squares = original_moments(f, common, x, mean)
    return [value - value for value in apart], squares


original_moments, original_tell, original_put = norms._moments, groups._tell, groups.put


def tell(k: Any, tables: Any, mean: Vector, rest: Vector, factor: Vector, given: Any) -> None:
    original_tell(k, tables, mean, rest - rest, factor, given)


def put(at: along.Columns, places: Any, values: Any) -> None:
    original_put(at, places, tuple(value.to(F32).to(F64) for value in values))


MUTATIONS = {
    "columns beyond a row are added": Mutation(
        faults.replaced(along.Columns, "only", no_mask), look_at_layers),
    "columns beyond a row are read": Mutation(
        faults.replaced(along.Columns, "load", whole_vectors), look_at_shuffles),
    "a mean is rounded": Mutation(faults.replaced(norms, "_moments", moments), look_at_layers),
    "lanes are not joined": Mutation(
        faults.replaced(along, "across", lambda value, join: value), look_at_layers),
    "small numbers lose a task": Mutation(
        faults.replaced(norms, "ceil_div", lambda a, b: a // b or 1), look_at_layers),
    "a group's mean is rounded": Mutation(
        faults.replaced(groups, "_tell", tell), look_at_groups),
    "sums in float32": Mutation(faults.replaced(groups, "put", put), look_at_groups),
    "only the first part": Mutation(
        faults.replaced(groups, "add_parts", lambda *_: None), look_at_groups),
    "the smallest is taken away": Mutation(
        faults.replaced(softmax, "largest", lambda a, b: a.minimum(b)), look_at_softmax),
    "softmax across from the smallest": Mutation(
        faults.replaced(softmax_across, "largest", lambda a, b: a.minimum(b)),
        lambda: check_across(ROWS[0], (2, 3, 5, 70))),
    "a total begins with the smallest": Mutation(
        faults.replaced(totals, "largest", lambda a, b: a.minimum(b)), look_at_totals),
    "totals lose a task": Mutation(
        faults.replaced(totals, "ceil_div", lambda a, b: a // b or 1), look_at_totals),
    "a length is not the root": Mutation(
        faults.replaced(totals, "_finished", lambda f, kind, value: value), look_at_totals),
    "not interleaved": Mutation(
        faults.replaced(shuffle, "interleave", lambda vectors: vectors), look_at_shuffles),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_norms")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])

"""Stride-1 convolution in the Winograd domain: fewer multiplications than there are products."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..core.algorithm import EPS32, accumulation_error, certain_error, storing_error
from ..core.cost import seconds, tile_cycles
from ..core.problem import Problem
from ..core.schedule import Schedule, Space
from ..core.target import Target
from ..kernels.winograd_math import Matrix, amplification, error_growth, matrices
from .common import CpuAlgorithm, cpu_f32_forward, fits, streams

MOST_TAPS = 7
SIZES = (1, 2, 3, 4, 5, 6)  # outputs of a tile along one axis
ROWS = tuple(range(1, 15))
GROUPS = tuple(range(1, 129))
ORDERS = ("channels", "positions", "shared")
FILTERS = "filters"  # and that whose weights are transformed while they are used
LATE = 5  # roundings of such weights, which others have but one of
SAFE = 2.3  # with the power below, fitted: admits F(4x4, 3x3), measured at 2.2 of torch's error
FAR = 9.0  # bytes a cycle that a core gets from the last cache
NEAR = 40.0  # and from the second
OTHERS = 2.5  # and from where another core has just written them
FEW = 64  # tiles, at most, for weights to be transformed while they are used
MET = 3  # sizes of tiles that are compared in full


class CpuWinograd(CpuAlgorithm):
    """Any F(m, r) along both axes; fused by block of tiles, or shared by all threads."""

    name = "cpu_winograd"
    version = 7
    fuses = CpuAlgorithm.fuses | {"pool2", "mask"}
    exact_on_integers = False
    spreads = True
    by_strides = True

    def kernel(self) -> Any:
        from ..kernels.cpu.conv import winograd

        return winograd

    def reject(self, p: Problem, t: Target) -> list[str]:
        return (cpu_f32_forward(p, t, grid=True, pitch=True, halves=True) + stride_one(p)
                + undivided(p))

    def error(self, p: Problem, t: Target, s: Any) -> float:
        grown = growth(s.tile_h, p.r) * growth(s.tile_w, p.s)
        late = LATE * EPS32 if s.order == FILTERS else 0.0
        return grown * (accumulation_error(p.c) + late) + storing_error(p.dtype)

    def certain(self, p: Problem, t: Target, s: Any) -> float:
        return certain_in_domain(p, s, p.c, self.products, p.dtype)

    def space(self, p: Problem, t: Target) -> Space:
        def legal(s: Any) -> bool:
            return fits(t, s.rows, s.vectors) and is_legal(p, t, s)

        return Space(legal, tile_h=SIZES, tile_w=SIZES, order=(*ORDERS, FILTERS), rows=ROWS,
                     vectors=(1, 2, 3, 4), groups=GROUPS, unroll=(1, 2, 4), k_parts=(1, 2, 4),
                     streaming=(False, True))

    def default(self, p: Problem, t: Target) -> Schedule:
        return _default(p, t)

    def shared_by(self, p: Problem, t: Target, s: Schedule) -> Schedule:
        return shared(p, t, s, _likely, self.cost)

    def prepare(self, p: Problem, t: Target, s: Schedule, weight: Any) -> Any:
        from ..kernels.cpu.prepare import winograd as winograd_prepare

        return winograd_prepare.prepare(*self.weight_of(p, s), t, weight)

    def prepared_floats(self, p: Problem, t: Target, s: Schedule) -> int:
        from ..kernels.cpu.prepare import winograd as winograd_prepare

        return winograd_prepare.prepared_floats(*self.weight_of(p, s), t)

    def prepare_into(self, p: Problem, t: Target, s: Schedule, weight: Any, whole: Any) -> None:
        from ..kernels.cpu.prepare import winograd as winograd_prepare

        winograd_prepare.prepare_into(*self.weight_of(p, s), t, weight, whole)

    def requests(self, p: Problem, t: Target, s: Schedule) -> list[Any]:
        from ..kernels.cpu.prepare import winograd as prepare

        weight = self.weight_of(p, s)
        return [self.request(p, t, s),
                prepare.request_of(prepare.maker(*weight, t.row), *weight, t.row)]

    def weight_of(self, p: Problem, s: Any) -> tuple[Problem, Schedule]:
        return weight_of(p, s)

    def cost(self, p: Problem, t: Target, s: Any) -> float:
        return Work(p, t, s).seconds()


def weight_of(p: Problem, s: Any) -> tuple[Problem, Schedule]:
    """What a weight in the Winograd domain depends on."""
    weight = p.weight if p.dtype == "f32" else p.weight.with_(dtype="f32")  # one kernel for all
    return weight, Schedule(tile_h=s.tile_h, tile_w=s.tile_w, order=s.order, vectors=s.vectors)


def is_legal(p: Problem, t: Target, s: Any) -> bool:
    """All that is asked of a schedule, but that its tile fits."""
    return ((s.vectors - 1) * t.lanes < p.k
            and s.tile_h in _axis_sizes(p.r, p.epilogue.pool)
            and s.tile_w in _axis_sizes(p.s, p.epilogue.pool) and s.tile_h * s.tile_w > 1
            and (s.order == "shared" or s.k_parts == 1)
            and s.k_parts <= math.ceil(p.k / (t.lanes * s.vectors))
            and (not s.streaming or p.k % t.lanes == 0))


def dense(p: Problem) -> list[str]:
    """What those ask for that know no phases."""
    return [f"dilation is {p.dilation}, needs 1"] if p.dilation != (1, 1) else []


def undivided(p: Problem) -> list[str]:
    """What phases ask for: neighbouring outputs, which a window has, lie in different ones."""
    if p.dilation == (1, 1) or (p.epilogue.pool == 1 and not p.epilogue.mask):
        return []
    return [f"dilation is {p.dilation} with a pool or a mask, needs 1"]


def stride_one(p: Problem) -> list[str]:
    """What Winograd's products ask for, in every direction."""
    reasons = []
    if p.stride != (1, 1):
        reasons.append(f"stride is {p.stride}, needs 1")
    if p.groups > 1:
        reasons.append(f"groups is {p.groups}, needs 1")
    if not 2 <= max(p.r, p.s) <= MOST_TAPS:
        reasons.append(f"filter is {p.r}x{p.s}, needs at least 2 and at most {MOST_TAPS} taps "
                       "along an axis")
    return reasons


class Work:
    """Cycles of the steps of a schedule."""

    split = 0.0  # cycles to split what a vector of an input transform stores
    moves_sums = False  # whether M travels with V where they do not fit near a core

    def __init__(self, p: Problem, t: Target, s: Any) -> None:
        self.p, self.t, self.s = p, t, s
        self.n_h, self.n_w = s.tile_h + p.r - 1, s.tile_w + p.s - 1
        self.positions = self.n_h * self.n_w
        self.tiles = tiles_of(p, s.tile_h, s.tile_w)
        self.c_vectors, self.k_vectors = math.ceil(p.c / t.lanes), math.ceil(p.k / t.lanes)
        self.block = s.rows * s.groups
        self.blocks = max(1, math.ceil(self.tiles / self.block))

    def seconds(self) -> float:
        kinds = {"shared": self.shared, FILTERS: self.filters}
        return kinds.get(self.s.order, self.fused)()

    @property
    def v_bytes(self) -> float:
        """Of V of one tile at one position; weights are as deep."""
        return 4.0 * self.c_vectors * self.t.lanes

    def tile(self) -> float:
        """Cycles to multiply a tile of rows and vectors."""
        return tile_cycles(self.t, self.s.rows, self.s.vectors, self.c_vectors * self.t.lanes)

    def transforms(self) -> float:
        """Input and output transforms of all tiles."""
        p, s, n = self.p, self.s, self.positions
        (in_h, out_h), (in_w, out_w) = operations(s.tile_h, p.r), operations(s.tile_w, p.s)
        into = (self.n_w * in_h + self.n_h * in_w) / 2 + (1.5 + self.split) * n
        back = (self.n_w * out_h + s.tile_h * out_w) / 2 + 0.5 * n + 2 * s.tile_h * s.tile_w
        return 1.5 * self.tiles * (self.c_vectors * into + self.k_vectors * back + 30)

    def products(self) -> float:
        """All multiplications, with the rows that fill up the last group of every block."""
        s = self.s
        last = self.tiles - (self.blocks - 1) * self.block
        groups = (self.blocks - 1) * s.groups + math.ceil(last / s.rows)
        return groups * self.positions * self.tile() * self.k_vectors / s.vectors

    @property
    def weight_bytes(self) -> float:
        return self.v_bytes * self.positions * self.k_vectors * self.t.lanes

    @property
    def far(self) -> float:
        """Bytes a cycle that a core gets from the last cache."""
        return FAR

    def fused(self) -> float:
        """Weights pass for every block; V and M stay in a core's caches if they fit."""
        s, t = self.s, self.t
        k_live = s.vectors if s.order == "channels" else self.k_vectors
        live = self.block * self.positions * (self.v_bytes + 4.0 * t.lanes * k_live)
        speed = NEAR if self.weight_bytes + live < t.l2 else self.far
        weights = self.blocks * self.weight_bytes / speed
        spilled = max(0.0, live - 0.75 * t.l2) / live
        passes = self.k_vectors / s.vectors if s.order == "channels" else 2.0
        moved = self.v_bytes
        if self.moves_sums and s.order == "positions":
            moved += 4.0 * t.lanes * self.k_vectors
        far = spilled * self.tiles * self.positions * moved * passes / self.far
        cycles = self.transforms() + max(self.products(), weights) + 0.25 * weights + far
        return seconds(t, cycles, self.p.image_bytes, self.blocks, weights=self.weight_bytes)

    def shared(self) -> float:
        """Weights pass once a chunk; V and M travel through the last cache."""
        t = self.t
        weights = self.blocks * self.weight_bytes / self.far
        moved = 2.0 * self.tiles * self.positions * (self.v_bytes
                                                     + 4.0 * t.lanes * self.k_vectors)
        cycles = self.transforms() + max(self.products(), weights) + moved / self.far
        tasks = self.positions * self.s.k_parts
        return seconds(t, cycles, self.p.image_bytes, tasks, 3 * self.blocks,
                       self.weight_bytes)

    def filters(self) -> float:
        """Weights as they are pass once a chunk; every thread reads V, which all have made."""
        p, t, s = self.p, self.t, self.s
        moved = t.threads * self.tiles * self.positions * self.v_bytes
        (down, _), (across, _) = operations(s.tile_h, p.r), operations(s.tile_w, p.s)
        late = 0.5 * (p.s * down + self.n_h * across) + 1.5 * self.positions
        late *= self.blocks * self.c_vectors * t.lanes * self.k_vectors
        cycles = self.transforms() + self.products() + late + moved / OTHERS
        weights = 4.0 * p.r * p.s * self.c_vectors * self.k_vectors * t.lanes ** 2
        tasks = math.ceil(self.k_vectors / s.vectors)
        return seconds(t, cycles, p.image_bytes, tasks, 2 * self.blocks, weights)


def certain_in_domain(p: Problem, s: Any, terms: int, products: int, dtype: str = "f32") -> float:
    """As `certain`: sums of so many terms, and transforms that add up a tile on both sides."""
    sides = s.tile_h + p.r + s.tile_w + p.s
    grown = amplification(matrices(s.tile_h, p.r)) * amplification(matrices(s.tile_w, p.s))
    return float(grown) * certain_error(terms + 4 * sides, products) + storing_error(dtype)


@lru_cache(maxsize=64)
def growth(m: int, taps: int) -> float:
    return error_growth(matrices(m, taps), matrices(1, 1))


@lru_cache(maxsize=64)
def operations(m: int, taps: int) -> tuple[float, float]:
    """About the operations of one input and of one output transform along an axis."""
    def shared(matrix: Matrix) -> float:  # mirrored points share a quarter; counting takes longer
        return 0.75 * sum(sum(map(bool, row)) - 1 for row in matrix)

    return shared(matrices(m, taps).BT), shared(matrices(m, taps).AT)


@lru_cache(maxsize=4096)
def _default(p: Problem, t: Target) -> Schedule:
    return chosen(p, t, _likely, lambda t, s: Work(p, t, s).seconds())


def chosen(p: Problem, t: Target, likely: Callable[..., list[Schedule]],
           cost: Callable[[Target, Schedule], float]) -> Schedule:
    """The cheapest of a few by the cost model; the tile, and so the bits, for any threads."""
    common = t.on_two

    def outline(size: tuple[int, int]) -> float:
        """By schedules that differ most."""
        first, *_, last_but_one, last = likely(p, common, *size, (2,))
        return min(cost(common, s) for s in (first, last_but_one, last))

    sizes = sorted(tile_sizes(p), key=outline)[:MET]
    best = min((s for size in sizes for s in likely(p, common, *size, (2,))),
               key=lambda s: cost(common, s))
    return min(alike(best, likely(p, t, best.tile_h, best.tile_w, (1, 2, 3, 4))),
               key=lambda s: cost(t, s))


def shared(p: Problem, t: Target, s: Any, likely: Callable[..., list[Schedule]],
           cost: Callable[..., float]) -> Schedule:
    """A schedule for two threads as others share it: what decides the bits stays."""
    if t.threads == 2:
        return s
    return min((s, *alike(s, likely(p, t, s.tile_h, s.tile_w, (1, 2, 3, 4)))),
               key=lambda s: cost(p, t, s))


def alike(best: Any, schedules: list[Any]) -> list[Any]:
    """Those of the same bits, tiles being equal: weights are transformed early or late."""
    return [s for s in schedules if (s.order == FILTERS) == (best.order == FILTERS)]


def tiles_of(p: Problem, tile_h: int, tile_w: int) -> int:
    """Tiles of all images; each phase of a dilated convolution has as many as the largest."""
    def along(outputs: int, apart: int, tile: int) -> int:
        return min(apart, outputs) * math.ceil(math.ceil(outputs / apart) / tile)

    return (p.n * along(p.conv_h, p.dilation[0], tile_h)
            * along(p.conv_w, p.dilation[1], tile_w))


def tile_sizes(p: Problem) -> list[tuple[int, int]]:
    """Tiles whose error stays near that of a direct sum; the smallest where none does."""
    heights, widths = (_axis_sizes(taps, p.epilogue.pool) for taps in (p.r, p.s))
    sizes = [(h, w) for h in heights for w in widths if h * w > 1]
    grown = {(h, w): growth(h, p.r) * growth(w, p.s) for h, w in sizes}
    # fitted to few layers: refuses F(1x4, 7x7), measured at 2.1 to 2.6 of torch's error
    safe = [size for size in sizes if grown[size] <= SAFE * (p.r * p.s) ** 0.375]
    return safe or [min(sizes, key=lambda size: grown[size])]


def _axis_sizes(taps: int, pool: int) -> list[int]:
    """Outputs of a tile along an axis; one stands for no transform along it."""
    return [m for m in SIZES if m % pool == 0 and (taps > 1 or m == pool)]


def _likely(p: Problem, t: Target, tile_h: int, tile_w: int,
            widths: tuple[int, ...]) -> list[Schedule]:
    tiles = tiles_of(p, tile_h, tile_w)
    streaming = p.k % t.lanes == 0 and streams(p, t)
    few = ((FILTERS, FEW),) if tiles <= FEW else ()
    found = []
    for vectors in sorted({min(width, math.ceil(p.k / t.lanes)) for width in widths}):
        rows = max(r for r in ROWS if fits(t, r, vectors))
        for order, wanted in (("channels", 28), ("channels", 56), ("positions", 28),
                              ("positions", 56), ("positions", 112), ("shared", 200),
                              ("shared", 400), *few):
            rows_, groups = _even(max(1, tiles), wanted, rows)
            parts = k_parts(p, t, vectors) if order == "shared" else 1
            found.append(Schedule(tile_h=tile_h, tile_w=tile_w, order=order, rows=rows_,
                                  vectors=vectors, groups=groups, unroll=4, k_parts=parts,
                                  streaming=streaming))
    return found


def _even(tiles: int, wanted: int, most_rows: int) -> tuple[int, int]:
    """Rows and groups of a block near `wanted` tiles, so that blocks come out full."""
    blocks = max(1, round(tiles / wanted))
    block = math.ceil(tiles / blocks)
    groups = min(math.ceil(block / most_rows), GROUPS[-1])
    return min(math.ceil(block / groups), most_rows), groups


def k_parts(p: Problem, t: Target, vectors: int) -> int:
    """Slices of the output channels, of a block that all threads share."""
    blocks = math.ceil(p.k / (t.lanes * vectors))
    return max(k for k in (1, 2, 4) if k == 1 or (k <= blocks and k <= t.threads))

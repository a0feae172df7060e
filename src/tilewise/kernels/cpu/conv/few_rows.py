"""A few rows times a large matrix: the matrix is read once, and reading it is all that takes time.

A worker reads several rows of the matrix side by side: memory gives more to several streams than to
one. Weights may be kept in fewer bits than float32 has: a chunk of them is two vectors of upper
halves, and one of the bytes below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....core.cached import cached
from ....core.isa import Isa
from ....core.problem import Problem
from ....core.schedule import Schedule
from ..between.epilogue import finish
from ..emit import Function, Index, Module, Pointer, Vector
from ..emit.elements import FLOAT32
from ..emit.microkernel import LINE
from ..emit.threads import BATCH, BIAS, RESIDUAL, WEIGHT, X, Y, emit_entry, emit_region
from ..emit.tiling import ceil_div
from .geometry import Sizes

VECTORS = 4  # of values in a chunk
TEMPORARIES = 5  # registers for weights and what they are made from
MOST = 4  # rows of the input that share the weights in registers
WORTH = 1 << 19  # bytes of weights that are worth a task
AHEAD = 512  # floats of a stream that are asked for before they are used
UPPER, BYTE = -1 << 16, 0xFF00  # the upper half of a float, and the byte below it
QUIET = 0x7FC0_0000  # NaN


@dataclass(frozen=True)
class Geometry(Sizes):
    """Every size of a product of few rows, with weights of so many stored bits."""

    bits: int

    @cached
    def packed(self) -> bool:
        return self.bits < 32

    @cached
    def chunk(self) -> int:
        """Values of a chunk."""
        return VECTORS * self.lanes

    @cached
    def chunk_floats(self) -> int:
        """Floats that the memory of a chunk would hold."""
        return self.chunk * self.bits // 32

    @cached
    def row_floats(self) -> int:
        """From one row of the matrix to the next."""
        return ceil_div(self.p.c, self.chunk) * self.chunk_floats if self.packed else self.p.c

    @cached
    def places(self) -> int:
        """Rows of a stream."""
        return ceil_div(self.p.k, self.s.streams)

    @cached
    def together(self) -> int:
        """Places of a task."""
        return min(self.places, ceil_div(WORTH, FLOAT32.bytes * self.s.streams * self.row_floats))

    @cached
    def tasks(self) -> int:
        return ceil_div(self.places, self.together)

    def scratch_bytes(self, threads: int) -> int:
        return 0

    def pack_weight(self, weight: Any) -> Any:
        """(K, C, 1, 1) to rows of chunks."""
        import torch

        if not self.packed:
            return weight.contiguous()
        values = torch.nn.functional.pad(weight.flatten(1), (0, -self.p.c % self.chunk))
        kept = rounded(values.contiguous(), 32 - self.bits).reshape(
            self.p.k, -1, VECTORS, self.lanes)
        # two values share a word of upper halves, and four one of bytes
        words = [kept[:, :, v] >> 16 & ~UPPER | kept[:, :, v + 1] & UPPER for v in (0, 2)]
        if self.bits == 24:
            first, *others = (kept[:, :, v] & BYTE for v in range(VECTORS))
            words.append(first >> 8 | others[0] | others[1] << 8 | others[2] << 16)
        return torch.stack(words, dim=2).flatten(1)


def rounded(values: Any, dropped: int) -> Any:
    """The bits of floats, rounded to nearest even so that the last `dropped` are zero."""
    import torch

    bits = values.view(torch.int32)
    even = (1 << (dropped - 1)) - 1 + (bits >> dropped & 1)
    return torch.where(values.isnan(), QUIET, bits + even) & -1 << dropped


def make(p: Problem, s: Schedule, isa: Isa, bits: int) -> Module:
    """The module of a product of few rows."""
    return _Rows(Geometry(p, s, isa.lanes, bits), isa).module()


class _Rows:
    def __init__(self, geometry: Geometry, isa: Isa) -> None:
        self.g, self.p, self.s, self.isa = geometry, geometry.p, geometry.s, isa
        room = isa.registers - TEMPORARIES
        self.group = max(1, min(MOST, room // (self.s.streams + 1)))

    def module(self) -> Module:
        self.m = Module(self.isa)
        self.products = {rows: self._product(rows) for rows in range(1, self.group + 1)}
        body = self._body()
        emit_entry(self.m, [emit_region(self.m, "multiply", lambda f, frame: self.g.tasks, body)])
        return self.m

    def _body(self) -> Function:
        """Some places of all streams, for all rows of the input."""
        g = self.g
        with self.m.function("body", frame="pointer", task="index", worker="index") as f:
            batch = f.frame.load_index(BATCH)
            whole = batch // self.group * self.group
            first = f.task * g.together
            with f.loop((first + g.together).minimum(g.places), start=first) as place:
                with f.loop(whole, step=self.group) as row:
                    self._call(f, self.group, row.i, place.i)
                for rest in range(1, self.group):
                    with f.when((batch - whole).equals(rest)):
                        self._call(f, rest, whole, place.i)
        return f

    def _call(self, f: Function, rows: int, row: Index, place: Index) -> None:
        image = self.g.image
        x, y = (f.frame.load_pointer(word, image) for word in (X, Y))
        weight, bias = (f.frame.load_pointer(word) for word in (WEIGHT, BIAS))
        residual = f.frame.load_pointer(RESIDUAL, image)
        f.call(self.products[rows], x + row * self.p.c, weight, bias, residual + row * self.p.k,
               y + row * self.p.k, place)

    def _product(self, rows: int) -> Function:
        """So many rows of the input times one row of the matrix from each stream."""
        g, p, streams = self.g, self.p, range(self.s.streams)
        kinds: Any = {"x": g.image, "weight": "pointer", "bias": "pointer",
                      "residual": g.image, "y": g.image, "place": "index"}
        with self.m.function(f"product{rows}", **kinds) as f:
            # past the last row, some stream repeats it
            places = [(f.place + s * g.places).minimum(p.k - 1) for s in streams]
            weights = [f.weight + place * g.row_floats for place in places]
            whole, rest = p.c // g.chunk, p.c % g.chunk
            with f.loop(whole, carry=[f.vector(0.0)] * (rows * len(streams))) as chunk:
                chunk.values = self._chunk(f, rows, f.x + chunk.i * g.chunk, [
                    w + chunk.i * g.chunk_floats for w in weights], g.chunk, chunk.values)
            sums = chunk.values
            if rest:
                sums = self._chunk(f, rows, f.x + whole * g.chunk, [
                    w + whole * g.chunk_floats for w in weights], rest, sums)
            for s in streams:
                with f.when(f.place + s * g.places < p.k):
                    for row in range(rows):
                        self._finish(f, sums[s * rows + row], places[s] + row * p.k, places[s])
        return f

    def _chunk(self, f: Function, rows: int, x: Pointer, weights: list[Pointer], count: int,
               sums: list[Vector]) -> list[Vector]:
        """The sums with one chunk more of each stream, of which `count` values exist."""
        lanes, p = self.g.lanes, self.p
        counts = [min(lanes, count - start) for start in range(0, count, lanes)]
        inputs = [[(x + row * p.c).load(v * lanes, count=n) for row in range(rows)]
                  for v, n in enumerate(counts)]
        found = []
        for s, weight in enumerate(weights):
            for line in range(0, self.g.chunk_floats, LINE):
                weight.prefetch(AHEAD + line, level=1)
            mine = sums[s * rows:(s + 1) * rows]
            for value, x_rows in zip(self._values(f, weight, counts), inputs, strict=True):
                mine = [f.fma(value, x_row, total) for x_row, total in zip(x_rows, mine,
                                                                           strict=True)]
            found += mine
        return found

    def _values(self, f: Function, weight: Pointer, counts: list[int]) -> list[Vector]:
        """A chunk of weights as floats."""
        lanes = self.g.lanes
        if not self.g.packed:
            return [weight.load(v * lanes, count=count) for v, count in enumerate(counts)]
        words = [weight.load(v * lanes).words() for v in range(self.g.chunk_floats // lanes)]
        found = []
        for v in range(len(counts)):
            half = words[v // 2]
            value = half.masked(UPPER) if v % 2 else half.shifted(16)
            if self.g.bits == 24:
                value = value.joined(words[2].shifted(8 - 8 * v).masked(BYTE))
            found.append(value.floats())
        return found

    def _finish(self, f: Function, total: Vector, at: Index, place: Index) -> None:
        """The sum of all lanes, in every lane, of which one is stored."""
        lanes = self.g.lanes
        step = lanes // 2
        while step:
            total = total + total.shuffle(total, [lane ^ step for lane in range(lanes)])
            step //= 2
        value = finish(f, total, self.p, (f.bias, place), (f.residual, at), 1)
        f.y.store(value, at, count=1)

"""Winograd convolution whose weights are transformed while they are used.

Weights in the Winograd domain are up to four times as large as they are, and a model of one image
reads them all from memory in every call. Here they come as they are. All threads transform the
tiles of a chunk; then a task takes a block of output channels through the rest, some input
channels at a time: their weights are transformed, and multiplied with all tiles of the chunk.
"""

from __future__ import annotations

from itertools import chain

from ..emit import Function, Index, Vector
from ..emit.microkernel import LINE, Walk, multiply
from ..emit.threads import WEIGHT, emit_entry, emit_region
from ..emit.tiling import ceil_div, emit_zero
from .transforms import transform
from .winograd import TASK_OF, Winograd
from .winograd_tiles import each_tile, place_of


class Filters(Winograd):
    """The generator of the order `filters`."""

    def _products(self) -> None:
        g = self.g
        self.rest = g.c_vectors % g.part_vectors  # vectors of input channels of the last part
        counts = sorted({g.part_vectors, self.rest} - {0})
        kinds = [(end, count) for end in g.ends for count in counts]
        self.weights = {kind: self._transformed(*kind) for kind in kinds}
        self.parts = {kind: self._added(*kind) for kind in kinds}

    def _name(self, name: str, end: bool, count: int) -> str:
        return f"{name}{'_end' if end else ''}_{count}"

    def _transformed(self, end: bool, count: int) -> Function:
        """Weights of a part of the input channels to U."""
        g, s = self.g, self.p.s
        vectors = g.vectors(end)
        width = vectors * g.lanes
        name = self._name("weights", end, count)
        with (self.m.function(name, w="pointer", u="pointer") as f,
              f.loop(count * g.lanes) as c, f.loop(vectors) as vector):
            w = f.w + (c.i * (g.taps * width) + vector.i * g.lanes)
            u = f.u + (c.i * width + vector.i * g.lanes)

            def load(i: int, j: int) -> Vector:
                return w.load((i * s + j) * width)

            def store(i: int, j: int, value: Vector) -> None:
                u.store(value, (i * g.across.n + j) * g.u_position)

            transform(f, g.down.G, g.across.G, load, store)
        return f

    def _added(self, end: bool, count: int) -> Function:
        """A group of tiles times a part of one panel, added to M; what comes next is fetched."""
        g = self.g
        vectors, rows = g.vectors(end), [i * g.lanes for i in range(self.s.rows)]
        walk = Walk.packed(vectors * g.lanes, (count, g.block * g.lanes), (g.lanes, 1))
        with self.m.function(self._name("product", end, count), v="pointer", u="pointer",
                             m="pointer", ahead="pointer") as f:
            places = [i * g.lanes for i in range(len(rows) * vectors)]
            acc = multiply(f, f.v, f.u, rows, vectors, walk, self.s.unroll,
                           (f.ahead, self._lines(end)),
                           sums=[f.m.load(place) for place in places])
            for place, value in zip(places, chain(*acc), strict=True):
                f.m.store(value, place)
        return f

    def _lines(self, end: bool) -> int:
        """Cache lines of the next part that a group of tiles fetches per vector of C."""
        g = self.g
        floats = g.part_vectors * g.lanes * g.taps * g.vectors(end) * g.lanes
        return int(ceil_div(floats, LINE * g.positions * self.s.groups * g.part_vectors))

    def _regions(self) -> None:
        with self.m.function("transform", **TASK_OF) as f1:
            self._on_handful(f1, self._transform_tiles)
        with self.m.function("block", **TASK_OF) as f2:
            self._each_block_of_k(f2, f2.task, f2.task + 1,
                                  lambda block, end: self._block(f2, block, end))
        emit_entry(self.m, [
            emit_region(self.m, "transforms", self._handfuls, f1),
            emit_region(self.m, "blocks", lambda f, frame: self.g.k_blocks, f2)],
            chunks=self._chunks)

    def _block(self, f: Function, block: Index, end: bool) -> None:
        """A block of output channels of all tiles of the chunk."""
        g, z = self.g, self._sizes(f)
        scratch, first, count = self._chunk(f)
        m = scratch + (f.worker * g.own_floats + g.scratch_floats)
        width, groups = g.vectors(end) * g.lanes, self._groups(count)
        weight = f.frame.load_pointer(WEIGHT) + block * (g.depth * g.taps * g.block_k)
        emit_zero(f, m, f.index(g.positions * g.m_position))

        def one_part(part: Index, vectors: int) -> None:
            kind, at = (end, vectors), part * g.part_vectors
            source = weight + at * (g.lanes * g.taps * width)
            u = m + g.positions * g.m_position
            f.call(self.weights[kind], source, u)
            ahead = source + vectors * g.lanes * g.taps * width
            share = vectors * self._lines(end) * LINE
            with f.loop(g.positions) as position, f.loop(groups) as group:
                v = scratch + position.i * g.v_position + at * (g.block * g.lanes)
                f.call(self.parts[kind], v + group.i * (self.s.rows * g.lanes),
                       u + position.i * g.u_position,
                       m + (position.i * g.m_position + group.i * (self.s.rows * width)),
                       ahead + (position.i * groups + group.i) * share)

        whole = g.c_vectors // g.part_vectors
        with f.loop(whole) as part:
            one_part(part.i, g.part_vectors)
        if self.rest:
            one_part(f.index(whole), self.rest)
        with each_tile(f, z, place_of(z, first), count, 0) as (t, tile):
            self.output.emit(f, z, tile, m + t * width, block * g.block_k, end)

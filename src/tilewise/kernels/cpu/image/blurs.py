"""Two bells, down and then across, of bytes: `guarded` where both lines are known to be bells.

Pairs of pixels that share a weight are added first. Where every pair is twice the pixel in the
middle, as in flat or evenly rising parts of a photo, the sum is an integer but for rounding: these
would nearly all be unsure. Their results are known, so pairs are compared beside the sums.
"""

from __future__ import annotations

from typing import Any

from ....core.filter import Filter
from ....core.isa import Isa
from ....core.schedule import Schedule
from ..emit import Function, Module, Pointer, Vector
from ..emit.values import Bits, Words
from . import bells
from .guarded import HEAD, Fused, Geometry

__all__ = ["Geometry", "make"]


def make(p: Filter, s: Schedule, isa: Isa) -> Module:
    """The module of two bells."""
    return _Blur(Geometry(p, s, isa.lanes), isa).module()


class _Blur(Fused):
    def sums_of(self, part: int, f: Function, x: Pointer, weight: Pointer, rows: int,
                vectors: int) -> list[Any]:
        """Sums, the middle first and then from the outside in, and what differs between pairs."""
        g, (r, s) = self.g, self.g.windows[part]
        pairs, step = r * s // 2, bells.step_of(self, part)
        weights = weight.bytes(8 * HEAD).of(self.packed)
        places = [row * g.pitch + v * g.lanes * g.bytes for row in range(rows)
                  for v in range(vectors)]
        middle = [self._at(x.bytes(place + pairs * step)) for place in places]
        twice = [value + value for value in middle]
        by = weights.broadcast(pairs, g.lanes)
        state: list[Any] = [one for value in middle
                            for one in (value * by, value.words().same(0))]
        with f.loop(pairs, carry=[x, x.bytes(2 * pairs * step), weights, *state]) as pair:
            a, b, at, *state = pair.values
            by = at.broadcast(0, g.lanes)
            for i, place in enumerate(places):
                both = self._at(a.bytes(place)) + self._at(b.bytes(place))
                state[2 * i] = f.fma(both, by, state[2 * i])
                state[2 * i + 1] = state[2 * i + 1].joined(both.words().unlike(twice[i].words()))
            pair.values = [a.bytes(step), b.bytes(-step), at + 1, *state]
        found = pair.values[3:]
        return [(found[i], found[i + 1]) for i in range(0, len(found), 2)]

    def _at(self, x: Pointer) -> Vector:
        return x.of(self.packed).load(lanes=self.g.lanes, work=self.work)

    def _ends(self, value: Any, part: Pointer) -> tuple[Words, Bits | None]:
        """The integer of a sum, and where it may be another; of flat windows it is known."""
        total, differs = value
        bound, flat = part.of(self.packed).broadcast(0, self.g.lanes), differs.equals(
            differs.same(0))
        low, known = (total - bound).whole(), (total + bound).whole()
        unsure = low.differs(known) & ~flat
        with part.f.maybe(part.load_index(bells.FLAT).equals(0), [known]) as some:
            some.values = [bells.flats(part, known)]
        return flat.select(some.values[0], low), unsure

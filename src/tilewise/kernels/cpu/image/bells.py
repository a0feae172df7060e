"""Sums of bells that lie near an integer, by differences from the pixel in the middle.

A bell is a symmetric line of weights that are not negative and sum up to one. Its sum is the value
in the middle and weighted differences. Where an image is smooth these are small, and their errors
are too: mostly they tell on which side of the integer scipy's sum lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ....core.lines import is_bell
from ..emit import Function, Pointer, Vector
from ..emit.values import F32, Bits, Words

UNIT = {"f32": 2.0 ** -24, "f64": 2.0 ** -53}
LEVELS = 256
UNROLLED = 16  # pairs
# words: whether flat windows keep their value; a bound, 0 for what is no bell; bits of flat windows
FLAT, SLACK, MISSED = 2, 3, 4
WORDS = MISSED + LEVELS // 64


def slack(weights: Any, tiny: float) -> float:
    """How far scipy's sum is from the middle value and exact differences; 0 for what is no bell.

    Weights below `tiny` are left out of differences.

    >>> 0 < slack(np.array([0.25, 0.5, 0.25]), 0.0) < 1e-12
    True
    >>> slack(np.array([0.25, 0.25, 0.25]), 0.0)
    0.0
    """
    if not is_bell(weights):
        return 0.0
    apart = abs(math.fsum(weights) - 1.0)
    rounded = UNIT["f64"] * (weights.size + 8)
    return 2 * LEVELS * (rounded + apart + weights.size * tiny)


def missed(flat: Any) -> Any:
    """Of the results of flat windows by value, a bit for each that is not the value."""
    return np.packbits(flat != np.arange(LEVELS), bitorder="little").view(np.int64)


def step_of(k: Any, part: int) -> int:
    """Bytes from a tap to the next of an odd line; 0 for other windows."""
    r, s = k.g.windows[part]
    if not k.g.levels or min(r, s) > 1 or r * s % 2 == 0 or r * s < 3:
        return 0
    return int(k.g.pitch if r > 1 else k.p.c * k.g.bytes)


def flats(weight: Pointer, middle: Words) -> Words:
    """scipy's results of flat windows: the middle, or one less where a bit says so."""
    bits = weight.bytes(8 * MISSED).words_at(middle.shifted(-5), LEVELS // 32)
    return middle.minus(bits.shifted_by(middle.masked(31)).masked(1))


class Bells:
    """Writes the function that is called where sums are unsure; `again` sums as scipy does."""

    def __init__(self, k: Any, part: int, between: bool) -> None:
        self.k, self.g, self.between = k, k.g, between
        self.step, (r, s) = step_of(k, part), k.g.windows[part]
        self.pairs, self.weights = r * s // 2, 8 * WORDS
        self.element = k.packed if between else k.target

    def function(self, name: str, again: Function) -> Function:
        with self.k.m.function(name, x="pointer", weight="pointer", y="pointer", count="index",
                               unsure="index") as f, \
                f.either(f.weight.load_index(SLACK).equals(0)) as (other, bell):
            with other:
                self._leave_to(f, again)
            with bell:
                self._emit(f, again)
        return f

    def _leave_to(self, f: Function, again: Function) -> None:
        f.call(again, f.x, f.weight, f.y, f.count, f.unsure)

    def _emit(self, f: Function, again: Function) -> None:
        middle = self._at(f.x.bytes(self.pairs * self.step))
        flat = self._flatness(f, middle + middle)
        uneven = f.unsure.bits(self.g.lanes) & ~flat
        with f.either(uneven.any()) as (some, none):
            with some:
                self._by_differences(f, again, middle, flat, uneven)
            with none, f.either(f.weight.load_index(FLAT).equals(0)) as (other, kept):
                with other:
                    self._write(f, flat.select(self._flats(f, middle), self._now(f)))
                with kept:
                    self._write(f, flat.select(middle, self._now(f)))

    def _at(self, x: Pointer) -> Vector:
        return x.of(self.k.packed).load(lanes=self.g.lanes, work=F32)

    def _now(self, f: Function) -> Vector:
        """What was written: the lower of the two integers, where a sum is unsure."""
        count = None if self.between else f.count
        return f.y.of(self.element).load(lanes=self.g.lanes, count=count, work=F32)

    def _write(self, f: Function, value: Vector) -> None:
        if self.between:
            f.y.of(self.element).store(value)
        else:
            f.y.of(self.element).store(self.element.cut_off(value), count=f.count)

    def _flats(self, f: Function, middle: Vector) -> Vector:
        return flats(f.weight, middle.whole()).numbers()

    def _each_pair(self, f: Function, state: list[Any],
                   turn: Callable[[Vector, Vector, Any], list[Any]]) -> list[Any]:
        """turn(the sum of a pair, its weight, state) from the outside in; few pairs are unrolled.
        """
        last = 2 * self.pairs * self.step
        weights = f.weight.bytes(self.weights).of(self.k.packed)
        if self.pairs <= UNROLLED:
            for i in range(self.pairs):
                both = self._at(f.x.bytes(i * self.step)) + self._at(
                    f.x.bytes(last - i * self.step))
                state = turn(both, weights.broadcast(i, both.lanes), state)
            return state
        with f.loop(self.pairs, carry=[f.x, f.x.bytes(last), weights, *state]) as pair:
            a, b, weight, *state = pair.values
            both = self._at(a) + self._at(b)
            pair.values = [a.bytes(self.step), b.bytes(-self.step), weight + 1,
                           *turn(both, weight.broadcast(0, both.lanes), state)]
        return list(pair.values[3:])

    def _flatness(self, f: Function, twice: Vector) -> Bits:
        """Where pairs sum up to twice the middle: so scipy sums as if all were equal to it."""
        found: Bits = self._each_pair(f, [twice.equals(twice)], lambda both, by, state: [
            state[0] & both.equals(twice)])[0]
        return found

    def _by_differences(self, f: Function, again: Function, middle: Vector, flat: Bits,
                        uneven: Bits) -> None:
        total, size = self._differences(f, middle + middle)
        now = self._now(f)
        beyond = total - (now + now.same(1.0) - middle)  # the upper integer, which is exact
        bound = f.fma(size, size.same(1.01 * UNIT["f32"] * (self.pairs + 8)),
                      f.weight.bytes(8 * SLACK).of(self.k.packed).broadcast(0, size.lanes))
        sure = beyond.absolute().above(bound)
        with f.either((uneven & ~sure).any()) as (some, none):
            with some:
                self._leave_to(f, again)
            with none:
                above = uneven & beyond.above(beyond.same(0.0))
                found = above.select(now + now.same(1.0), now)
                self._write(f, flat.select(self._flats(f, middle), found))

    def _differences(self, f: Function, twice: Vector) -> list[Vector]:
        """Their weighted sum, and that of their sizes."""
        def turn(both: Vector, by: Vector, state: Any) -> list[Vector]:
            apart = both - twice
            return [f.fma(apart, by, state[0]), f.fma(apart.absolute(), by, state[1])]

        return self._each_pair(f, [twice.same(0.0)] * 2, turn)

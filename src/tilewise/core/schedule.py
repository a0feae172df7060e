"""The legal tunables of an algorithm, and one point among them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Tunable = int | str | bool


class Schedule(Mapping[str, Tunable]):
    """One JSON-able, hashable point of a space.

    >>> Schedule(tile=14, vectors=2).tile
    14
    """

    def __init__(self, **tunables: Tunable) -> None:
        self._tunables = dict(tunables)
        self._hash = hash(tuple(sorted(self._tunables.items(), key=lambda item: item[0])))

    def __getitem__(self, name: str) -> Tunable:
        return self._tunables[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_tunables"][name]
        except KeyError:
            raise AttributeError(f"schedule has no tunable {name!r}: {self}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tunables)

    def __len__(self) -> int:
        return len(self._tunables)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self._tunables == other._tunables

    def __reduce__(self) -> tuple[Callable[..., Schedule], tuple[str]]:
        return Schedule.from_json, (self.to_json(),)

    def __repr__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._tunables.items()) or "-"

    def with_(self, **changes: Tunable) -> Schedule:
        """A copy with some tunables changed."""
        return Schedule(**{**self._tunables, **changes})

    def without(self, names: Iterable[str]) -> Schedule:
        """A copy without some tunables."""
        return Schedule(**{name: value for name, value in self._tunables.items()
                           if name not in names})

    def to_json(self) -> str:
        return json.dumps(self._tunables, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Schedule:
        return Schedule(**json.loads(text))


class Space:
    """All combinations of the tunables that pass the predicate."""

    def __init__(self, legal: Callable[[Schedule], bool] = lambda schedule: True,
                 **tunables: tuple[Tunable, ...]) -> None:
        self._tunables, self._legal = tunables, legal

    @property
    def tunables(self) -> dict[str, tuple[Tunable, ...]]:
        """What each may be."""
        return self._tunables

    def __iter__(self) -> Iterator[Schedule]:
        for values in itertools.product(*self.tunables.values()):
            schedule = Schedule(**dict(zip(self.tunables, values, strict=True)))
            if self._legal(schedule):
                yield schedule

    def __contains__(self, schedule: Schedule) -> bool:
        if set(schedule) != set(self.tunables):
            return False
        inside = all(_is_one_of(schedule[name], values) for name, values in self.tunables.items())
        return inside and self._legal(schedule)

    def admits(self, schedule: Schedule) -> bool:
        """The same for a schedule whose tunables were taken from such a space."""
        return self._legal(schedule)

    def sample(self, rng: random.Random, start: Schedule, sweeps: int = 2) -> Schedule:
        """A random walk from a legal schedule, one tunable at a time: lists can be long."""
        schedule = start
        for name in rng.sample(tuple(self.tunables), len(self.tunables)) * sweeps:
            moves = [schedule.with_(**{name: value}) for value in self.tunables[name]]
            schedule = rng.choice([move for move in moves if move in self])
        return schedule


def _is_one_of(value: Tunable, values: tuple[Tunable, ...]) -> bool:
    """Also by its type: True is no 1 and 3.0 no 3, which generators would take for sizes."""
    return value in values and type(value) is type(values[values.index(value)])

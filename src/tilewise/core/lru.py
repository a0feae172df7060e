"""A bounded cache: the least recently used goes first."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from .locks import fork_safe_lock

T = TypeVar("T")


class Mark(weakref.ref[Any]):
    """A reference whose death tells a key; no Python runs then that an interrupt could end."""

    __slots__ = ("key",)
    key: Hashable


class Lru(Generic[T]):
    """At most `limit` in total, each entry counting `weigh(entry)` (one, if not said)."""

    def __init__(self, limit: int, weigh: Callable[[T], int] | None = None) -> None:
        self._limit, self._weigh = limit, weigh
        # a plain dict: an OrderedDict is torn by an interrupt in a key's __hash__
        self._entries: dict[Hashable, tuple[T, int]] = {}
        self._dead: deque[Hashable] = deque()
        self._lock = fork_safe_lock()
        self.times_cleared = 0

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        with self._lock:
            self._limit = limit
            self._shrink()

    @property
    def total(self) -> int:
        """Counted anew each time: an interrupt cannot leave it wrong."""
        if self._weigh is None:
            return len(self._entries)
        return sum(weight for _, weight in list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> T | None:
        with self._lock:
            self._bury()
            entry = self._entries.pop(key, None)
            if entry is None:
                return None
            self._entries[key] = entry  # the last used is the last
            return entry[0]

    def peek(self, key: Hashable) -> T | None:
        """An entry as it lies there: this is no use of it."""
        with self._lock:
            self._bury()
            entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def put(self, key: Hashable, value: T) -> T:
        with self._lock:
            self._bury()
            self._entries.pop(key, None)
            self._entries[key] = (value, self._weigh(value) if self._weigh else 1)
            self._shrink()
        return value

    def drop(self, key: Hashable) -> None:
        """Forget an entry; finalisers call it, in the middle of anything."""
        self._dead.append(key)
        if not self._lock.locked():  # else the next to hold it does it
            with self._lock:
                self._bury()

    def mark(self, source: object, key: Hashable) -> Mark:
        """While it is kept, an entry goes when its source does, at the latest with the next look.

        A finaliser that drops the entry is sooner, but an interrupt may end it before it begins.
        """
        mark = Mark(source, self._dead.append)
        mark.key = key
        return mark

    def items(self) -> list[tuple[Hashable, T]]:
        """All entries, the least recently used first."""
        with self._lock:
            self._bury()
            return [(key, value) for key, (value, _) in self._entries.items()]

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self.times_cleared += 1

    def _bury(self) -> None:
        while self._dead:
            dead = self._dead[0]
            self._entries.pop(dead.key if isinstance(dead, Mark) else dead, None)
            self._dead.popleft()

    def _shrink(self) -> None:
        excess = self.total - self._limit
        while excess > 0 and self._entries:
            _, weight = self._entries.pop(next(iter(self._entries)))
            excess -= weight

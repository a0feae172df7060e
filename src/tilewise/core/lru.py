"""A bounded cache: the least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from .locks import fork_safe_lock

T = TypeVar("T")


class Lru(Generic[T]):
    """At most `limit` in total, each entry counting `weigh(entry)` (one, if not said)."""

    def __init__(self, limit: int, weigh: Callable[[T], int] = lambda entry: 1) -> None:
        self._limit, self._weigh = limit, weigh
        self._entries: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._total = 0
        self._dead: deque[Hashable] = deque()
        self._lock = fork_safe_lock()

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
        return self._total

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> T | None:
        with self._lock:
            self._bury()
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, value: T) -> T:
        with self._lock:
            self._bury()
            self._remove(key)
            weight = self._weigh(value)
            self._entries[key] = (value, weight)
            self._total += weight
            self._shrink()
        return value

    def drop(self, key: Hashable) -> None:
        """Forget an entry; never waits, so that finalisers can call it."""
        self._dead.append(key)
        if self._lock.acquire(blocking=False):  # else the next to hold it does it
            try:
                self._bury()
            finally:
                self._lock.release()

    def items(self) -> list[tuple[Hashable, T]]:
        """All entries, the least recently used first."""
        with self._lock:
            self._bury()
            return [(key, value) for key, (value, _) in self._entries.items()]

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._total = 0

    def _bury(self) -> None:
        while self._dead:
            self._remove(self._dead.popleft())

    def _remove(self, key: Hashable) -> None:
        _, weight = self._entries.pop(key, (None, 0))
        self._total -= weight

    def _shrink(self) -> None:
        while self._total > self._limit and self._entries:
            _, (_, weight) = self._entries.popitem(last=False)
            self._total -= weight

"""Who on this thread is told of what runs: a program that is being recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Protocol


class Watcher(Protocol):
    """What it is told."""

    def launched(self, entry: Any, frame: Any) -> None:
        """Code is about to run with a frame."""

    def took(self, tensor: Any, pooled: bool) -> None:
        """Memory was taken for a result, or for scratch; whether from the pool, or such as it."""

    def relies_on(self, made: Any) -> None:
        """Something that was made from tensors is read, as long as they do not change."""

    def keeps(self, tensor: Any) -> None:
        """A table is read that never changes."""

    def loads(self, request: Any) -> None:
        """Code is about to be loaded, or compiled; may be prevented by an exception."""

    def cannot_repeat(self, why: str) -> None:
        """Something happens that launches do not tell."""


_watchers: dict[int, Watcher | None] = {}  # by thread


def watcher() -> Watcher | None:
    return _watchers.get(get_ident()) if _watchers else None


@contextmanager
def telling(who: Watcher | None) -> Iterator[None]:
    """Tell somebody, or nobody, of all that this thread runs meanwhile."""
    thread = get_ident()
    before = _watchers.get(thread)
    _watchers[thread] = who
    try:
        yield
    finally:
        if before is None:
            del _watchers[thread]
        else:
            _watchers[thread] = before

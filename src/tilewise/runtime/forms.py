"""How many forms of one weight are kept: the last two, more where calls take turns."""

from __future__ import annotations

from typing import Any

from ..core.lru import Lru

FEW, MANY = 2, 8


class Forms:
    """A cache under keys (form, *sources) whose entries say when they were last `used`.

    Image sizes ask for different forms of a weight. Of those made from the same sources the `FEW`
    last used stay. One that comes back after it went raises their number by one, up to `MANY`: so
    sizes in turns soon find all of theirs.
    """

    def __init__(self, cache: Lru[Any], known: int = 4096) -> None:
        self._cache, self.few = cache, FEW
        self._gone: Lru[bool] = Lru(known)
        self._allowed: Lru[int] = Lru(known)  # by sources
        self._names: Lru[tuple[tuple[object, ...], ...]] = Lru(known)  # keys by the first source

    def put(self, key: tuple[object, ...], entry: Any) -> Any:
        sources = key[1:]
        allowed = max(self._allowed.get(sources) or 0, self.few)
        if self._gone.get(key):
            self._gone.drop(key)
            allowed = self._allowed.put(sources, min(MANY, allowed + 1))
        names = [name for name in self.of(key[1]) if name != key] if sources else []
        others = [(other.used, name) for name in names
                  if name[1:] == sources and (other := self._cache.peek(name)) is not None]
        for _, name in sorted(others, key=lambda pair: pair[0])[:max(0, len(others) + 1 - allowed)]:
            self._cache.drop(name)
            self._gone.put(name, True)
        if sources:
            self._names.put(key[1], (*names, key))
        return self._cache.put(key, entry)

    def of(self, source: object) -> list[tuple[object, ...]]:
        """The keys of what is kept of a source, where it is the first; a look at all would take
        longer than to make one of them anew."""
        known = self._names.get(source) or ()
        return [name for name in known if self._cache.peek(name) is not None]

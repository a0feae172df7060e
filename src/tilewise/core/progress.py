"""How long work says how far it is."""

from __future__ import annotations

from collections.abc import Callable

# told what is done now, how many parts of it are done, and how many there are
Tell = Callable[[str, int, int], object]


def silent(what: str, done: int, total: int) -> None:
    """For who does not want to know."""


def counting(tell: Tell, what: str, total: int) -> Callable[[], None]:
    """A function that tells of one part more whenever it is called.

    >>> tick = counting(print, "measuring", 2)
    measuring 0 2
    >>> tick()
    measuring 1 2
    """
    done = 0
    tell(what, done, total)

    def tick() -> None:
        nonlocal done
        done += 1
        tell(what, done, total)

    return tick

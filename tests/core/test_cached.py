"""A property that is computed once."""

from __future__ import annotations

import threading

from tilewise.core.cached import cached


class Slow:
    """Whose property takes as long as it is told to."""

    def __init__(self) -> None:
        self.begun, self.may_end, self.computed = threading.Event(), threading.Event(), 0

    @cached
    def value(self) -> int:
        """Documented."""
        self.begun.set()
        assert self.may_end.wait(20)
        self.computed += 1
        return 7


def test_it_is_computed_once_and_documented() -> None:
    slow = Slow()
    slow.may_end.set()
    assert slow.value == slow.value == 7
    assert slow.computed == 1
    assert Slow.value.__doc__ == "Documented."


def test_instances_do_not_wait_for_each_other() -> None:
    """A lock for all of them would be held for ever in a child forked meanwhile."""
    one, other, found = Slow(), Slow(), []
    other.may_end.set()
    busy = threading.Thread(target=lambda: one.value)
    busy.start()
    assert one.begun.wait(20)
    second = threading.Thread(target=lambda: found.append(other.value), daemon=True)
    second.start()
    second.join(5)
    meanwhile = list(found)
    one.may_end.set()
    busy.join()
    assert meanwhile == [7]

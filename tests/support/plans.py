"""Which plans a call runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.conv.running import ENGINE
from tilewise.core.plan import Plan


def ran(call: Callable[[], Any]) -> list[Plan]:
    """In the order in which they run."""
    found: list[Plan] = []
    ENGINE.observers.append(found.append)
    try:
        call()
    finally:
        ENGINE.observers.remove(found.append)
    return found

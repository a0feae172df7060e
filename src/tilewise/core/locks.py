"""Locks that a forked child finds free."""

from __future__ import annotations

import os
import threading


def fork_safe_lock() -> threading.Lock:
    """A lock that is taken around every fork: no other thread is inside what it guards."""
    lock = threading.Lock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release,
                            after_in_child=lock.release)
    return lock

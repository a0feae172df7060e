"""Work that no interrupt can land in: Python runs signal handlers on the main thread only."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def apart(work: Callable[[], T]) -> T:
    """work(), beside the main thread if this is it; an interrupt is raised when it has ended.

    >>> apart(lambda: 6 * 7)
    42
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    results: list[T] = []
    problems: list[BaseException] = []
    started: list[int] = []
    running = threading.Lock()
    running.acquire()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as problem:
            problems.append(problem)
        finally:
            running.release()

    interrupt = None
    try:
        # one call in C starts it and notes that it did: no interrupt comes between
        started.extend(map(_thread.start_new_thread, [run], [()]))
    except BaseException as problem:
        if isinstance(problem, RuntimeError) and not started:  # no more threads to be had
            return work()
        interrupt = problem
    ended = not started
    while not ended:  # whatever comes: the work may write to memory that the caller would free
        try:
            with running:
                ended = True
        except BaseException as problem:
            interrupt = problem
    for found in (interrupt, *problems):
        if found is not None:
            raise found
    return results[0]

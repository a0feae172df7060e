"""What a crash does, or code that hangs, for a child that imports nothing else."""

from __future__ import annotations

import os
import time


def end_process(*_: object) -> None:
    os._exit(3)


def never_end(*_: object) -> None:
    while True:
        time.sleep(1)

"""What a crash does, for a child that imports nothing else."""

from __future__ import annotations

import os


def end_process(*_: object) -> None:
    os._exit(3)

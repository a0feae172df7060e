"""Filters of images on disk: how much memory they take."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np


def anonymous_memory() -> int:
    """Bytes of this process that no file stands behind."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines()
                    if line.startswith("RssAnon"))) << 10


def growth_on_disk(directory: str, size: int, run: Any) -> int:
    """Of anonymous memory at its peak, while a memory-mapped image is filtered to another."""
    source = np.memmap(f"{directory}/in", np.uint8, "w+", shape=(size, size))
    source[::3] = 9
    out = np.memmap(f"{directory}/out", np.uint8, "w+", shape=(size, size))
    run(source[:64, :64], np.empty((64, 64), np.uint8))
    before, peak, done = anonymous_memory(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], anonymous_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    run(source, out)
    done.set()
    watcher.join()
    assert out.any()
    return peak[0] - before

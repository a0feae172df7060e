"""Compiling ahead of need: kernels that a model will ask for, spread over other processes.

The process that needs them compiles as well, from the first on; workers begin with the last. What
a worker has begun is waited for. Whatever goes wrong there, the kernel is compiled here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ....core import places
from ....core.cores import cores
from ....core.locks import fork_safe_lock
from .jit import ORIGIN
from .requests import Request

MOST = 8  # processes
WORTH = 2  # kernels for each: a process takes about as long to start
COMPILING = "tilewise compiles"  # name of threads that wait for them
PATIENCE = 60.0  # seconds that one kernel may take
# the package without its first lines, which import torch
START = """
import sys, types
sys.path[:] = {path!r}
package = types.ModuleType("tilewise")
package.__path__ = [{root!r}]
sys.modules["tilewise"] = package
from tilewise.kernels.cpu.emit.worker import serve
serve(sys.stdin.buffer, sys.stdout.buffer, {origin!r})
"""


class Ahead:
    """Kernels that others compile, by their keys."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._waiting: dict[tuple[str, str], Request] = {}
        self._begun: dict[tuple[str, str], threading.Event] = {}
        self._made: dict[tuple[str, str], bytes] = {}
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """A forked child has no workers."""
        self._waiting, self._begun, self._made = {}, {}, {}

    def ask(self, requests: Sequence[Request]) -> int:
        """Start on these, if they are worth it; returns by how many processes."""
        with self._lock:
            wanted = {name: request for request in requests for name in [_name(request)]
                      if request.can_travel and name not in self._begun}
            workers = min(MOST, cores() - 1, len(wanted) // WORTH) if _can_start() else 0
            if workers < 1:
                return 0
            self._waiting.update(wanted)
        with suppress(RuntimeError):  # no more threads to be had: what waits is compiled here
            for _ in range(workers):
                threading.Thread(target=self._drive, name=COMPILING, daemon=True).start()
        return workers

    def take(self, request: Request) -> bytes | None:
        """The object, if a worker has begun it; else nobody else will."""
        name = _name(request)
        with self._lock:
            self._waiting.pop(name, None)
            begun = self._begun.get(name)
        if begun is None:
            return None
        begun.wait(PATIENCE)
        with self._lock:
            self._begun.pop(name, None)
            return self._made.pop(name, None)

    def _next(self) -> tuple[tuple[str, str], Request, threading.Event] | None:
        """What is needed last comes first."""
        with self._lock:
            if not self._waiting:
                return None
            name, request = self._waiting.popitem()
            begun = self._begun[name] = threading.Event()
            return name, request, begun

    def _drive(self) -> None:
        """One process, from its first kernel to its last."""
        try:
            process = _start()
        except (OSError, ValueError):
            return
        try:
            while (found := self._next()) is not None:
                name, request, begun = found
                try:
                    image = _ask(process, request)
                    if image:
                        with self._lock:
                            self._made[name] = image
                finally:
                    begun.set()
        finally:
            _end(process)


def _can_start() -> bool:
    """Whether there is a Python to start: an application may be its own interpreter."""
    name = Path(sys.executable or "").name.lower()
    return not getattr(sys, "frozen", False) and ("python" in name or "pypy" in name)


def _end(process: subprocess.Popen[bytes]) -> None:
    """An empty line ends a worker: a forked child may hold its input open."""
    with suppress(OSError, ValueError):
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _name(request: Request) -> tuple[str, str]:
    return request.isa.name, request.key


def _start() -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[3])
    code = START.format(path=[part for part in sys.path if part], root=root, origin=ORIGIN)
    # as this process began: what its environment says by now does not count
    mode = os.environ | {"TILEWISE_CHECK": str(int(places.CHECKED))}
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=mode)


def _ask(process: subprocess.Popen[bytes], request: Request) -> bytes:
    """Empty if the process is gone, or could not, or the request cannot travel after all."""
    try:
        line = request.to_line()
    except Exception:  # whatever pickle does not know
        return b""
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line)
        process.stdin.flush()
        length = int.from_bytes(process.stdout.read(8), "little")
        image = process.stdout.read(length)
        return image if len(image) == length else b""
    except OSError:
        return b""


AHEAD = Ahead()

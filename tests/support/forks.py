"""Processes that need not import torch: copies of one that has, and that does nothing else.

The first call starts a server. It imports what all tests of kernels need and then copies itself
for every job. It has no threads and has compiled nothing, so a copy is as good as a new process.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

SUPPORT = Path(__file__).parent
MESSAGE = 1 << 16  # bytes, at most
# several processes share the cores: threads that wait must not spin
ENVIRONMENT = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1",
               "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}


class Late(Exception):
    """A job did not end in time; what it had printed."""


class Done(NamedTuple):
    """How a job ended, as `subprocess` says it."""

    returncode: int
    stdout: str
    stderr: str


# where the tests are


def run(code: str, limit: float) -> Done:
    """What Python code does in a copy of the server, within so many seconds."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        read, write = os.pipe()
        try:
            job = json.dumps([code, {**os.environ, **ENVIRONMENT}]).encode()
            assert len(job) < MESSAGE
            socket.send_fds(_server(os.getpid()), [job], [out.fileno(), err.fileno(), write])
        finally:
            os.close(write)
        with os.fdopen(read) as told:
            child = int(told.readline())
            if not select.select([told], [], [], limit)[0]:
                os.kill(child, signal.SIGKILL)
                told.read()
                raise Late(_text(out))
            status = int(told.readline())
        return Done(os.waitstatus_to_exitcode(status), _text(out), _text(err))


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode())


_starting = threading.Lock()


def _server(process: int) -> socket.socket:
    with _starting:
        return _started(process)


@lru_cache(maxsize=1)
def _started(process: int) -> socket.socket:
    """The server of this process; it ends when nobody holds the other end of its socket."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = (f"import sys; sys.path.insert(0, {str(SUPPORT.parent)!r}); "
            f"from support import forks; forks.serve({its.fileno()})")
    server = subprocess.Popen([sys.executable, "-c", code], pass_fds=[its.fileno()],
                              env={**os.environ, **ENVIRONMENT})
    its.close()
    atexit.register(_end, ours, server)
    return ours


def _end(ours: socket.socket, server: subprocess.Popen[bytes]) -> None:
    ours.close()
    server.wait()


# in the server


def serve(descriptor: int) -> None:
    from support import harness  # noqa: F401  # and with it torch and tilewise

    jobs = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    while True:
        job, files, *_ = socket.recv_fds(jobs, MESSAGE, 3)
        if not job:
            return
        if not os.fork():
            _attend(jobs, job, *files)
        for file in files:
            os.close(file)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _attend(jobs: socket.socket, job: bytes, out: int, err: int, tell: int) -> None:
    """Start a job, and tell its number and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    jobs.close()
    child = os.fork()
    if not child:
        os.close(tell)
        os.dup2(out, 1)
        os.dup2(err, 2)
        _work(*json.loads(job))
    os.write(tell, f"{child}\n".encode())
    os.write(tell, f"{os.waitpid(child, 0)[1]}\n".encode())
    os._exit(0)


def _work(code: str, environment: dict[str, str]) -> None:
    failed = 1
    os.environ.clear()
    os.environ.update(environment)
    try:
        exec(code, {})
        failed = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed)

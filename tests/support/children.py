"""Forked copies of this process: what they say, how they end, and how they are ended."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

Say = Callable[[str], None]
PATIENCE = 120.0  # seconds; whoever takes longer hangs
# what Python tells of before it is done: all that changes names of files
TOUCHES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate",
           "tempfile.mkdtemp", "shutil.rmtree")


class Moment(NamedTuple):
    """When a process is ended: after some time, or before its next change of a file."""

    seconds: float | None = None
    touches: int | None = None
    group: bool = False  # with its children


class Ended(NamedTuple):
    """What became of a process."""

    said: list[str]
    status: int  # as os.waitpid tells it
    hung: bool
    seconds: float

    @property
    def killed(self) -> bool:
        return os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL

    @property
    def well(self) -> bool:
        return self.status == 0 and not self.hung

    @property
    def why(self) -> str:
        """Its last words, or the signal that ended it."""
        if self.hung:
            return f"not done after {self.seconds:.0f} s"
        if os.WIFSIGNALED(self.status):
            return f"ended by {signal.Signals(os.WTERMSIG(self.status)).name}"
        return "\n".join(self.said[-12:])


def forked(work: Callable[[Say], Any], moment: Moment | None = None, within: str = "",
           patience: float = PATIENCE) -> Ended:
    """Run `work` in a copy of this process, which has threads of its own; perhaps end it.

    `within` is the directory in which changes of files are counted.
    """
    read, write = os.pipe()
    start, child = time.monotonic(), os.fork()
    if not child:
        _child(work, write, moment, within)
    os.close(write)
    os.set_blocking(read, False)
    said = bytearray()
    try:
        status, hung = _wait(child, moment, start + patience, lambda: _drain(read, said))
        _drain(read, said)
    finally:
        os.close(read)
        with suppress(ProcessLookupError):  # children of its own
            os.killpg(child, signal.SIGKILL)
    whole = said.decode(errors="replace").splitlines()
    return Ended(whole, status, hung, time.monotonic() - start)


def _child(work: Callable[[Say], Any], write: int, moment: Moment | None, within: str) -> None:
    """Never returns."""
    code = 1
    os.setsid()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)

    def say(text: str) -> None:
        os.write(write, f"{text}\n".encode())

    try:
        if within:
            _count(within, moment.touches if moment else None, say)
        work(say)
        code = 0
    except BaseException:
        say(traceback.format_exc())
    finally:
        os._exit(code)


def _count(within: str, last: int | None, say: Say) -> None:
    """End this process before it changes a file for the last time; or tell of each change."""
    left, own = [last], os.getpid()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if os.getpid() != own or event not in TOUCHES or not any(
                within in str(one) for one in arguments[:2]):
            return
        if left[0] is None:
            say("touch")
            return
        left[0] -= 1
        if left[0] <= 0:
            os.kill(own, signal.SIGKILL)

    sys.addaudithook(hook)


def _wait(child: int, moment: Moment | None, end: float,
          drain: Callable[[], None]) -> tuple[int, bool]:
    seconds = moment.seconds if moment else None
    strike = time.monotonic() + seconds if seconds is not None else None
    while True:
        drain()
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status, False
        now = time.monotonic()
        if strike is not None and now >= strike:
            _kill(child, moment is not None and moment.group)
            return os.waitpid(child, 0)[1], False
        if now >= end:
            _kill(child, True)
            return os.waitpid(child, 0)[1], True
        time.sleep(min(0.002, max(0.0, (strike or end) - now)))


def _kill(child: int, group: bool) -> None:
    with suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(child, signal.SIGKILL)


def _drain(read: int, said: bytearray) -> None:
    with suppress(BlockingIOError):
        while part := os.read(read, 1 << 16):
            said += part

"""The line that tells of long compiling: once a burst, to people alone."""

from __future__ import annotations

import io
import sys

import pytest

from tilewise.kernels.cpu.emit.patience import LONG, PAUSE, Patience


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def burst(patience: Patience, now: list[float], kernels: int, seconds: float) -> None:
    for _ in range(kernels):
        patience.begins()
        now[0] += seconds
        patience.ends("here")


@pytest.mark.parametrize(("stream", "lines"), [(Terminal(), 1), (io.StringIO(), 0)])
def test_a_long_burst_is_told_once(stream: io.StringIO, lines: int,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    now = [100.0]
    burst(Patience(lambda: now[0]), now, 40, 0.25)
    assert len(stream.getvalue().splitlines()) == lines
    if lines:
        assert stream.getvalue() == ("tilewise: compiling for this machine, 9 kernels in 2 s so "
                                     "far; they are kept in here\n")


def test_short_bursts_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = Terminal(), [100.0]
    monkeypatch.setattr(sys, "stderr", stream)
    patience = Patience(lambda: now[0])
    for _ in range(20):
        burst(patience, now, 5, 0.9 * LONG / 5)
        now[0] += PAUSE + 0.1
    assert stream.getvalue() == ""
    burst(patience, now, 2, LONG)
    now[0] += PAUSE + 0.1
    burst(patience, now, 2, LONG)
    assert len(stream.getvalue().splitlines()) == 2  # each burst anew


def test_programs_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = Terminal()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        now = [100.0]
        burst(Patience(lambda now=now: now[0]), now, 3, LONG)

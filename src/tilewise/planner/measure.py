"""The only file that reads a clock.

Contenders take turns, so that a slow moment of the machine hits all of them; the minimum ranks,
the median and the spread tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, sleep

from ..core.target import Target, refuse_times


@dataclass(frozen=True)
class Timing:
    """Seconds a call took."""

    minimum: float
    median: float
    spread: float  # interquartile range over the median
    samples: tuple[float, ...] = ()  # one a round, in the order in which they were taken


def interleaved(contenders: Sequence[Callable[[], object]], rounds: int = 7,
                sample: float = 0.01, budget: float = 5.0, *, pause: float = 0.0,
                before: Callable[[], object] | None = None,
                tick: Callable[[], object] = lambda: None) -> list[Timing]:
    """Time callables in turns; each sample lasts at least `sample` seconds.

    `pause` seconds pass before every sample, for threads of others that still spin. `before` is
    called, untimed, before every call; a sample is then one call. `tick` is told of every sample.
    """
    refuse_times(Target.host())
    counts = [_calls_per_sample(run, 0.0 if before else sample) for run in contenders]
    times: list[list[float]] = [[] for _ in contenders]
    end = perf_counter() + budget
    for turn in range(rounds):
        if turn >= 2 and perf_counter() > end:
            break
        for run, count, seen in zip(contenders, counts, times, strict=True):
            sleep(pause)
            if before is not None:
                before()
            seen.append(_sample(run, count))
            tick()
    return [_summary(seen) for seen in times]


def _calls_per_sample(run: Callable[[], object], sample: float) -> int:
    run()  # warm up: compile, prepare, fault pages in
    return max(1, int(sample / max(_sample(run, 1), 1e-7)) + 1)


def _sample(run: Callable[[], object], count: int) -> float:
    start = perf_counter()
    for _ in range(count):
        run()
    return (perf_counter() - start) / count


def _summary(seen: list[float]) -> Timing:
    import statistics  # brings half a dozen modules; most processes measure nothing

    median = statistics.median(seen)
    if len(seen) < 4:
        return Timing(min(seen), median, (max(seen) - min(seen)) / median, tuple(seen))
    low, _, high = statistics.quantiles(seen, n=4)
    return Timing(min(seen), median, (high - low) / median, tuple(seen))

"""Errors that say what was found, what was needed and, where there is one, what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LONGEST = 500  # characters of what a message quotes


def cut(text: str) -> str:
    """A text that may come from anybody, short enough for a message.

    >>> cut("a" * 1000)[-9:]
    'aaaaa ...'
    """
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


class TilewiseError(Exception):
    """Base of every error tilewise raises on purpose.

    >>> from tilewise import Problem
    >>> try:
    ...     Problem.parse("n1c8h8w8k8r9s9_f32_forward")
    ... except TilewiseError as error:
    ...     print(error)
    the dilated filter (9x9) does not fit into the padded input (8x8)
    """


class InvalidProblem(TilewiseError, ValueError, RuntimeError):
    """A convolution that cannot exist: the message names the value found and the value needed.

    Also what torch raises for it, so that code which catches that goes on working.
    """


class InvalidSchedule(TilewiseError, ValueError):
    """A schedule outside its algorithm's space."""


class UnknownAlgorithm(TilewiseError, KeyError):
    """A name that is not in the list of algorithms."""

    def __str__(self) -> str:
        return str(self.args[0])


class OtherVersion(TilewiseError):
    """A plan of another version of tilewise, whose bits are not those of this one."""


class OutOfMemory(TilewiseError, MemoryError):
    """The system refuses memory, and there is nothing left to give back."""


class OutOfBounds(TilewiseError, RuntimeError):
    """Checked code (`TILEWISE_CHECK=1`) met an address outside of its memory: a bug of tilewise."""


class NotInstalled(TilewiseError):
    """A package is missing; the message says how to get it."""


class NoAlgorithm(TilewiseError, RuntimeError):
    """Nothing can run a problem; one line per algorithm with its reasons."""

    def __init__(self, problem: object, target: object, reasons: Mapping[str, Sequence[str]]):
        self.problem, self.target, self.reasons = problem, target, dict(reasons)
        width = max((len(name) for name in reasons), default=0) + 1
        lines = [f"no algorithm can run {problem} on {target}:"]
        lines += [f"  {name + ':':<{width}} {'; '.join(why)}" for name, why in reasons.items()]
        super().__init__("\n".join(lines))

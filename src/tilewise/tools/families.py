"""Making wisdom that comes with the package: of what was tuned, what gains clearly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..conv.running import ENGINE
from ..core.errors import TilewiseError
from ..core.files import write_atomically
from ..core.plan import Plan
from ..core.problem import Problem
from ..core.progress import Tell, silent
from ..core.target import Target
from ..planner.families import Family, family_path
from ..planner.measure import interleaved
from ..planner.planner import Planner
from ..planner.wisdom import Wisdom, asked_by, key

ROUNDS = 15
GAIN = 1.03  # times as fast as the estimate's choice; less may be noise


@dataclass(frozen=True)
class Trial:
    """A tuned plan beside the estimate's, both timed in turns."""

    name: str
    tuned: Plan
    gain: float


def ship(directory: Path, source: Path, gain: float = GAIN,
         tell: Tell = silent) -> tuple[Path, list[Trial], int]:
    """Write the file for this processor's family; returns it, all trials, and how many are in it.

    The file that is there keeps what is not tried again.
    """
    path = family_path(directory)
    if path is None:
        raise TilewiseError("the processor's family is not known, needs Linux, which tells vendor, "
                            "family and model in /proc/cpuinfo")
    found = Wisdom(dict(ENGINE.planner.wisdom.versions))
    found.load(source)
    family = Family(path)
    family.read_once()
    trials = _trials(found, tell)
    for trial in trials:
        max_error, bits = asked_by(trial.name)[1:]
        if trial.gain > gain:
            family.record(trial.tuned, max_error, bits)
        else:  # it may have gained before
            family.entries.pop(family.name_of(trial.tuned.problem, trial.tuned.target, max_error,
                                              bits), None)
    write_atomically(path, family.to_json().encode())
    path.chmod(0o644)
    return path, trials, len(family.entries)


def _trials(found: Wisdom, tell: Tell) -> list[Trial]:
    """Both plans of every entry that is for this machine and two threads."""
    wise, plain = (Planner(ENGINE.planner.algorithms, wisdom=wisdom) for wisdom in (found, None))
    t, trials = Target.host(threads=2), []
    for i, name in enumerate(sorted(found.entries)):
        tell(f"timing {name.partition(' on ')[0]}", i, len(found.entries))
        try:
            rest, max_error, bits = asked_by(name)
            p = Problem.parse(rest.partition(" on ")[0])
        except ValueError:  # a key that nobody asked by
            continue
        if key(p, t) != rest or not _can_travel(p):
            continue
        tuned, usual = (planner.plan(p, t, max_error=max_error, bits=bits)
                        for planner in (wise, plain))
        if tuned.source == "wisdom" and not _is_torchs(tuned) and not _is_same(tuned, usual):
            trials.append(_trial(name, tuned, usual))
    return trials


def _can_travel(p: Problem) -> bool:
    """Gradients of weights are divided among as many threads as there are."""
    return p.direction != "backward_weight"


def _is_torchs(plan: Plan) -> bool:
    """Which another torch would run in another time."""
    return ENGINE.planner.algorithm(plan.algorithm).baseline


def _is_same(tuned: Plan, usual: Plan) -> bool:
    return (tuned.algorithm, tuned.schedule) == (usual.algorithm, usual.schedule)


def _trial(name: str, tuned: Plan, usual: Plan) -> Trial:
    """With operands in the caches and without: a model has some of both, so both must gain."""
    runs = [ENGINE.start(plan) for plan in (tuned, usual)]
    swept = torch.zeros(tuned.target.l3 // 2)  # twice the bytes of the last cache
    times = [interleaved(runs, ROUNDS), interleaved(runs, ROUNDS, before=lambda: swept.add_(1.0))]
    return Trial(name, tuned, min(usual.minimum / tuned.minimum for tuned, usual in times))

"""Plans that travel: what one process decided, others use, whatever they would have chosen."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..conv.running import ENGINE
from ..core.errors import OtherVersion
from ..core.plan import Plan
from ..core.problem import Problem
from ..core.schedule import Schedule
from ..core.target import Target


@contextmanager
def noted() -> Iterator[list[Plan]]:
    """The plans of all convolutions that run meanwhile, each once.

    >>> from tilewise import conv2d
    >>> with noted() as plans:
    ...     y = conv2d(torch.ones(1, 1, 8, 8), torch.ones(1, 1, 3, 3))
    >>> len(plans)
    1
    """
    seen: list[Plan] = []

    def note(plan: Plan) -> None:
        if plan not in seen:
            seen.append(plan)

    ENGINE.observers.append(note)
    try:
        yield seen
    finally:
        ENGINE.observers.remove(note)


def to_text(plans: Iterable[Plan]) -> str:
    """The decisions as JSON: problem, algorithm, schedule; estimates and measurements alike."""
    return json.dumps([{"problem": str(plan.problem), "device": plan.target.device,
                        "algorithm": plan.algorithm, "version": plan.version,
                        "schedule": dict(plan.schedule)} for plan in plans])


def adopt(text: str) -> int:
    """Use these decisions before any of this process's own; returns how many there were.

    Refused as a whole, with the reasons, if one of them cannot run here.
    """
    plans = [_here(item) for item in json.loads(text)]
    ENGINE.planner.decided.forget()
    for plan in plans:
        ENGINE.planner.decided.record(plan)
    ENGINE.executables.clear()  # what was built by own choice
    return len(plans)


def _here(item: dict[str, Any]) -> Plan:
    """A decision as a plan for this machine."""
    here = ENGINE.planner.algorithm(item["algorithm"])
    if here.version != item["version"]:  # and other schedules, which would be refused
        raise OtherVersion(f"{here.name} has version {here.version} here, the plan for "
                           f"{item['problem']} needs version {item['version']}: use the same "
                           "tilewise everywhere")
    host = Target.host(threads=torch.get_num_threads()).with_(device=item["device"])
    return ENGINE.planner.plan(Problem.parse(item["problem"]), host, algorithm=item["algorithm"],
                               schedule=Schedule(**item["schedule"]))

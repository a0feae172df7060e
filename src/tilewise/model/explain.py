"""Why a convolution, or every convolution of a model, runs the way it does."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ..conv.checks import arguments_of, check_bound, kind_of, module_advice
from ..conv.running import ENGINE
from ..core.errors import TilewiseError
from ..core.plan import Plan
from ..core.problem import DIRECTIONS, Problem
from ..core.progress import Tell, silent
from ..core.target import Target
from ..planner.planner import Candidate
from .optimize import optimize
from .profile import memory_of, memory_text, programs_of
from .stages import STAGES, noted
from .tuning import distinct, observe

ESTIMATED = "~"  # stands before a time that nobody measured
GRADIENTS = dict(zip(DIRECTIONS, ("forward", "gradients of images", "gradients of weights"),
                     strict=True))
ESTIMATES = f"{ESTIMATED} is an estimate; effort=\"measure\" runs and times every candidate"


@dataclass(frozen=True)
class Explanation:
    """Every candidate with its time, or the reasons for its refusal; prints as a table."""

    problem: Problem
    target: Target
    candidates: tuple[Candidate, ...]

    @property
    def plan(self) -> Plan | None:
        """What will run."""
        return self.candidates[0].plan

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """Of each candidate: its name, what is told of it, and its schedule."""
        return [_row(candidate, first=i == 0) for i, candidate in enumerate(self.candidates)]

    def __str__(self) -> str:
        rows = [(name, f"{told} {schedule}".rstrip()) for name, told, schedule in self.rows]
        width = max(len(row[0]) for row in rows)
        title = (f"{self.problem} on {self.target}\n"
                 f"{self.problem.flops / 1e9:.3f} GFLOP, {self.problem.bytes / 1e6:.1f} MB")
        return "\n".join([title, *(f"{row[0]:<{width}}  {row[1]}" for row in rows)])

    __repr__ = __str__


@dataclass(frozen=True)
class StageExplanation:
    """What a model's graphs look like after a pass; prints as a line a step."""

    stage: str
    graphs: tuple[str, ...]

    def __str__(self) -> str:
        title = f"{self.stage}: {STAGES[self.stage]}"
        return "\n\n".join([title, *(self.graphs or ("nothing",))])

    __repr__ = __str__


@dataclass(frozen=True)
class ModelExplanation:
    """Every convolution of a model; prints as a table, a line a layer."""

    layers: tuple[tuple[str, Explanation], ...]
    program: str = ""  # what runs as a whole, and the memory it takes; or why nothing does

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The header, then a row a layer."""
        header = ("layer", "problem", "algorithm", "time", "torch", "error", "schedule")
        return [header, *(_layer_row(name, explanation) for name, explanation in self.layers)]

    def __str__(self) -> str:
        rows = self.rows
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
                 for row in rows]
        return "\n".join(line.rstrip() for line in [*lines, *self.notes])

    @property
    def notes(self) -> list[str]:
        """What a reader of the table has to know."""
        estimates = any(ESTIMATED in cell for row in self.rows for cell in row)
        return [note for note in (self.program, ESTIMATES if estimates else "") if note]

    __repr__ = __str__


def explain(subject: str | Problem | nn.Module, example: Any = None, *,
            target: Target | None = None, max_error: float | None = None,
            effort: str = "estimate", stage: str | None = None, training: bool = False,
            tell: Tell = silent) -> Explanation | ModelExplanation | StageExplanation:
    """Every algorithm's answer to a problem, what will run first; or that for a whole model.

    Args:
        subject: A problem, its string, or a model.
        example: The model's input, a tensor or a tuple of arguments.
        target: A machine to plan for; this one, if not said.
        max_error: Bound on the relative rms error, as in `conv2d`.
        effort: "estimate", or "measure" to run and time the candidates.
        stage: A pass, to see what a model's graphs look like after it: "captured", "normalised",
            "fused", "laid_out", "lowered", "placed" or "bound".
        training: Whether a model is shown as it learns: below each layer its gradients, that of
            its images and that of its weight.
        tell: A function `(what, done, total)` that is told how far it is.

    Returns:
        An object that prints as a table. For a problem it has `plan` and `candidates`, for a model
        `layers`, for a stage `graphs`.

    >>> print(explain("n1c8h8w8k8r3s3p1_f64_forward"))  # doctest: +ELLIPSIS
    n1c8h8w8k8r3s3p1_f64_forward on ...
    """
    _check(subject, target, max_error)
    if training and (stage is not None or not isinstance(subject, nn.Module)):
        raise TilewiseError("training is True, needs a model and no stage: a problem says its "
                            "direction itself, and stages are those of inference")
    if stage is not None:
        return _explain_stage(subject, example, stage, max_error)
    if isinstance(subject, nn.Module):
        forward = subject.__dict__.get("forward")
        own = getattr(forward, "max_error", None)  # what the model itself was optimised for
        return _explain_model(subject, example, own if max_error is None else max_error, effort,
                              tell, training)
    p = Problem.parse(subject) if isinstance(subject, str) else subject
    return _explain_problem(p, target or Target.host(threads=torch.get_num_threads()), max_error,
                            effort, tell)


def _check(subject: Any, target: Any, max_error: Any) -> None:
    if not isinstance(subject, str | Problem | nn.Module):
        advice = f": {module_advice(subject)}" if callable(subject) else ""
        raise TilewiseError(f"subject is {kind_of(subject)}, needs a problem, its text or a "
                            f"torch.nn.Module{advice}")
    if target is not None and not isinstance(target, Target):
        raise TilewiseError(f"target is {kind_of(target)}, needs a tilewise.Target: "
                            "Target.host(threads=2), or None for this machine")
    check_bound(max_error)


def _explain_problem(p: Problem, t: Target, max_error: float | None, effort: str,
                     tell: Tell = silent) -> Explanation:
    here = {a.name for a in ENGINE.planner.algorithms if a.is_for(t)}
    asked = ENGINE.planner.candidates(p, t, ENGINE.admitted(max_error, p, t),
                                      ENGINE.bits(max_error, p, t))
    found = [candidate for candidate in asked if candidate.algorithm in here]
    if effort in ("measure", "exhaustive"):
        found = _measured(found, tell)
    if not any(candidate.plan for candidate in found):
        return Explanation(p, t, tuple(found))
    chosen = ENGINE.plan(p, t, "estimate" if effort == "measure" else effort, max_error=max_error)
    if chosen.source == "wisdom":
        found = [Candidate(chosen.algorithm, chosen),
                 *(c for c in found if c.plan is None or c.plan.schedule != chosen.schedule
                   or c.algorithm != chosen.algorithm)]
    return Explanation(p, t, tuple(found))


def _measured(found: list[Candidate], tell: Tell) -> list[Candidate]:
    plans = ENGINE.planner.measure([c.plan for c in found if c.plan], tell)
    timed = [Candidate(plan.algorithm, plan) for plan in plans]
    names = {(plan.algorithm, plan.schedule) for plan in plans}
    rest = [c for c in found if c.plan is None or (c.algorithm, c.plan.schedule) not in names]
    return timed + rest


def _row(candidate: Candidate, first: bool) -> tuple[str, str, str]:
    mark = "> " if first and candidate.plan else "  "
    plan = candidate.plan
    if plan is None:
        offer = candidate.refused
        what = f"; would take {offer.seconds * 1e6:.1f} us" if offer else ""
        return (mark + candidate.algorithm, "refused: " + "; ".join(candidate.reasons) + what,
                f"with {offer.schedule}" if offer else "")
    passes = f", then {', '.join(plan.after)}" if plan.after else ""
    rate = plan.problem.flops / plan.seconds / 1e9
    return mark + candidate.algorithm, (
        f"{plan.seconds * 1e6:8.1f} us {plan.source:<8} {rate:7.1f} GF/s  "
        f"error <= {plan.error:.0e} "), f"{plan.schedule}{passes}"


def _explain_model(model: nn.Module, example: Any, max_error: float | None,
                   effort: str, tell: Tell, training: bool) -> ModelExplanation:
    if example is None:
        raise TilewiseError("a model needs an example of its input: explain(model, example)")
    layers = observe(model, example, tell, training)
    if not layers:
        raise TilewiseError("the model ran no convolution by tilewise: explain what "
                            "tilewise.optimize(model) returns; with effort='measure' that is "
                            "torch's own form where nothing else was faster")
    known = {problem: _explain_problem(problem, target, max_error, effort)
             for problem, target in distinct(layers, "explaining", tell)}
    told = tuple((layer.name, known[layer.plan.problem]) for layer in layers)
    return ModelExplanation(told, _step(told) if training else _program(model, example))


def _step(layers: tuple[tuple[str, Explanation], ...]) -> str:
    """The directions of a step of training, and what their layers take together."""
    sums = {direction: [explanation.plan for _, explanation in layers
                        if explanation.problem.direction == direction and explanation.plan]
            for direction in DIRECTIONS}
    return "a step: " + ", ".join(
        f"{GRADIENTS[direction]} {_sum(plans)} ({len(plans)})" for direction, plans in sums.items())


def _sum(plans: list[Plan]) -> str:
    mark = "" if all(plan.is_timed for plan in plans) else ESTIMATED
    return f"{mark}{sum(plan.seconds for plan in plans) * 1e3:.3f} ms"


def _explain_stage(model: Any, example: Any, stage: str,
                   max_error: float | None) -> StageExplanation:
    """The passes run anew, on a copy around the same tensors."""
    if stage not in STAGES:
        raise TilewiseError(f"stage is {stage!r}, needs one of {', '.join(STAGES)}")
    if not isinstance(model, nn.Module) or example is None:
        raise TilewiseError("a stage needs a model and an example of its input: "
                            f"explain(model, example, stage={stage!r})")
    try:  # a forward may write to buffers, so these are copied
        own = copy.deepcopy(model, {id(tensor): tensor for tensor in model.parameters()})
    except RuntimeError as why:
        raise TilewiseError(f"{type(model).__name__} cannot be copied, which a stage needs: "
                            f"{why}") from None
    with noted() as notes:
        programs_of(optimize(own, max_error=max_error).eval(), arguments_of(example))
    return StageExplanation(stage, tuple(notes[stage]))


def _program(model: nn.Module, example: Any) -> str:
    """What runs without Python between its steps, and the memory that takes."""
    found = [bound.program for bound in programs_of(model, arguments_of(example))]
    if not found:
        return "no program: each layer is called by Python"
    kernels, by_torch = (sum(map(attrgetter(name), found)) for name in (
        "kernels", "steps_of_torch"))
    arena, weights = memory_of(found)
    return (f"{'one program' if len(found) == 1 else f'{len(found)} programs'}: {kernels} steps by "
            f"tilewise, {by_torch} by torch; {memory_text(arena, weights)}")


def _layer_row(name: str, explanation: Explanation) -> tuple[str, ...]:
    plan, torch_ = explanation.plan, next(
        (c.plan for c in explanation.candidates if c.algorithm == "vendor"), None)
    if plan is None:
        return (name, str(explanation.problem), "-", "-", "-", "-", "-")
    return (name, str(explanation.problem), plan.algorithm, _time(plan),
            _time(torch_) if torch_ else "-", f"{plan.error:.0e}", str(plan.schedule))


def _time(plan: Plan) -> str:
    mark = "" if plan.is_timed else ESTIMATED
    return f"{mark}{plan.seconds * 1e3:.3f} ms"

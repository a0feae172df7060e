"""The choice among algorithms; they are handed in, never imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.algorithm import Algorithm
from ..core.cost import CALL, traffic, turn
from ..core.errors import InvalidSchedule, NoAlgorithm, TilewiseError, UnknownAlgorithm
from ..core.lru import Lru
from ..core.plan import Plan, passes
from ..core.problem import Problem
from ..core.progress import Tell, counting, silent
from ..core.schedule import Schedule
from ..core.target import Target, refuse_times
from .classes import representative, share
from .families import Family
from .layers import NEAR, SOON, Code, Layer
from .measure import interleaved
from .search import EFFORTS, shortlist
from .wisdom import Decided, Entry, Wisdom

ROUNDS = 7  # in which candidates take turns
CLOSE = 1.15  # those that take at most this much longer than the fastest meet again
Start = Callable[[Plan], Callable[[], object]]  # makes a plan ready to be timed


@dataclass(frozen=True)
class Candidate:
    """An algorithm's answer to a problem: a plan, or the reasons why there is none."""

    algorithm: str
    plan: Plan | None
    reasons: tuple[str, ...] = ()
    refused: Plan | None = None  # what was offered and is not accurate enough


class Planner:
    """Holds the algorithms and what was learned of them; plans are data."""

    def __init__(self, algorithms: Sequence[Algorithm], start: Start | None = None,
                 wisdom: Wisdom | None = None, family: Family | None = None) -> None:
        self.algorithms, self._start = algorithms, start
        self.wisdom = Wisdom() if wisdom is None else wisdom
        # decided elsewhere: comes before all that is known here, and is never saved
        self.decided = Decided(dict(self.wisdom.versions))
        # of the machine: comes after the user's own, and is never saved either
        self.system = Wisdom(dict(self.wisdom.versions))
        # of the processor's family: stands in for estimates, and is not worth a measurement
        self.family = Family() if family is None else family
        self._choices: Lru[Code] = Lru(limit=4096)  # by class of problems
        self._layers: Lru[Layer] = Lru(limit=2048)

    def forget(self) -> None:
        """All plans, and what was chosen by them."""
        for known in (self.wisdom, self.system, self.decided, self.family):
            known.forget()
        self._choices.clear()
        self._layers.clear()

    def algorithm(self, name: str) -> Algorithm:
        for algorithm in self.algorithms:
            if algorithm.name == name:
                return algorithm
        known = ", ".join(algorithm.name for algorithm in self.algorithms)
        raise UnknownAlgorithm(f"algorithm is {name!r}, needs one of {known}")

    def candidates(self, p: Problem, t: Target, max_error: float | None = None,
                   bits: int = 0) -> list[Candidate]:
        """Every algorithm's answers, what an estimate chooses first, refusals last."""
        answers = self._ranked(p, t, max_error, bits)
        if not answers or answers[0].plan is None:
            return answers
        plan = self._estimated(p, t, max_error, bits)
        # what the family's choice replaces is worth a look, and a measurement
        rest = [a for a in answers if a.plan is None or a.algorithm != plan.algorithm
                or (plan.source == "family" and a.plan.schedule != plan.schedule)]
        return [Candidate(plan.algorithm, plan), *rest]

    def _ranked(self, p: Problem, t: Target, max_error: float | None, bits: int,
                brief: bool = False) -> list[Candidate]:
        """The same by costs alone; in brief, without those that round too much."""
        answers = [self._answer(algorithm, p, t, max_error, bits) for algorithm in self.algorithms
                   if not brief or algorithm.baseline or algorithm.bits >= bits]
        return sorted(answers, key=lambda answer: self._rank(answer, p, t))

    def plan(self, p: Problem, t: Target, effort: str = "estimate", algorithm: str | None = None,
             schedule: Schedule | None = None, max_error: float | None = None,
             bits: int = 0) -> Plan:
        """The best plan that errs and rounds no more; with `algorithm`, that algorithm's."""
        if effort not in EFFORTS:
            raise TilewiseError(f"effort is {effort!r}, needs one of {', '.join(EFFORTS)}")
        if algorithm is not None:
            return self._asked_for(p, t, self.algorithm(algorithm), schedule,
                                   _holds(max_error, bits))
        known = self._remembered(p, t, max_error, bits)
        if known is not None and effort != "exhaustive":
            return known
        if effort == "estimate":
            return self._estimated(p, t, max_error, bits)
        answers = self.candidates(p, t, max_error, bits)
        plans = _plans(answers, p, t)
        if effort == "wisdom_only":
            return next((plan for plan in plans
                         if plan.source == "family" or self._is_baseline(plan)), plans[0])
        return self._learned(plans, effort, max_error, bits)

    def _estimated(self, p: Problem, t: Target, max_error: float | None, bits: int) -> Plan:
        """What is chosen for all problems of its class, with the costs of this one."""
        allowed = max_error, bits
        try:
            plan = self._with_code(self._chosen(representative(p), t, *allowed), p, t, *allowed)
            if plan is None:  # the class is not like this one: a row of pixels, a longer sum
                plan = self._with_code(self._chosen(p, t, *allowed), p, t, *allowed)
        except NoAlgorithm as nobody:
            raise NoAlgorithm(p, t, nobody.reasons) from None
        self._meet(p, t, max_error, bits)
        if plan is None:
            return _plans(self._ranked(p, t, max_error, bits), p, t)[0]
        known = self._of_family(representative(p), t, max_error, bits)
        by_family = known == (plan.algorithm, plan.schedule)
        return replace(plan, source="family") if by_family else plan

    def _chosen(self, *key: Any) -> Code:
        return self._choices.get(key) or self._choices.put(key, self._choose(*key))

    def _meet(self, p: Problem, t: Target, max_error: float | None, bits: int) -> None:
        """A layer remembers what it met."""
        if isinstance(p, Problem):
            key = p.code, t.on_two, max_error, bits
            layer = self._layers.get(key) or Layer()
            met = layer.met(p)
            if met is not layer:
                self._layers.put(key, met)

    def _choose(self, p: Problem, t: Target, max_error: float | None, bits: int) -> Code:
        """The best code, or some that the layer has already and that is nearly as good.

        A new image size then needs neither a compiler nor another form of the weight. A layer that
        met many sizes takes what it has. It is weighed on two threads, whatever the number.
        """
        if not isinstance(p, Problem):  # filters: small code, and few shapes of it
            return self._best(p, t, max_error, bits)
        common = t.on_two
        key = p.code, common, max_error, bits
        layer = self._layers.get(key) or Layer()
        known = [self._adapted(code, p, t) for code in layer.codes]
        costs = {code: self._seconds(code, p, common, max_error, bits) for code in known}
        # what torch runs is no code that a layer has: a program would stop for it
        near = [code for code in known if costs[code] < float("inf")
                and not self.algorithm(code[0]).baseline]
        far = near and min(map(costs.__getitem__, near)) > NEAR * min(costs.values())
        if far or not (near and layer.is_versed(p)):
            best = self._best(p, t, max_error, bits)
            least = self._seconds(best, p, common, max_error, bits)
            near = [code for code in near if costs[code] <= max(NEAR * least, least + SOON)]
        code = min(near, key=costs.__getitem__) if near else best
        self._layers.put(key, layer.with_codes(tuple(dict.fromkeys((*known, code)))))
        return code

    def _of_family(self, p: Problem, t: Target, max_error: float | None,
                   bits: int) -> Code | None:
        """What is known of the processor's family, for any number of threads."""
        entry = self.family.find(p, t, max_error, bits)
        plan = self._by(entry, p, t, max_error, bits) if entry else None
        if plan is None:
            return None
        schedule = self.algorithm(plan.algorithm).shared_by(plan.inner, t, plan.schedule)
        return plan.algorithm, schedule

    def _best(self, p: Problem, t: Target, max_error: float | None, bits: int) -> Code:
        known = self._of_family(p, t, max_error, bits)
        if known is not None:
            return known
        plan = _plans(self._ranked(p, t, max_error, bits, brief=True), p, t)[0]
        return plan.algorithm, plan.schedule

    def _adapted(self, code: Code, p: Problem, t: Target) -> Code:
        algorithm = self.algorithm(code[0])
        inner = inner_problem(algorithm, p)
        return code if algorithm.reject(inner, t) else (
            code[0], algorithm.adapted(inner, t, code[1]))

    def _seconds(self, code: Code, p: Problem, t: Target, max_error: float | None,
                 bits: int) -> float:
        plan = self._with_code(code, p, t, max_error, bits)
        return float("inf") if plan is None else plan.seconds

    def _with_code(self, code: Code, p: Problem, t: Target, max_error: float | None,
                   bits: int) -> Plan | None:
        """A plan of a problem with such code, if that is legal and as accurate as needed."""
        algorithm, schedule = self.algorithm(code[0]), code[1]
        inner = inner_problem(algorithm, p)
        if algorithm.reject(inner, t) or not algorithm.space(inner, t).admits(schedule):
            return None
        plan = _plan(algorithm, p, t, inner, schedule, _holds(max_error, bits))
        return None if self._complaints(plan, max_error, bits) else plan

    def measure(self, plans: Sequence[Plan], tell: Tell = silent) -> list[Plan]:
        """The plans with their measured times, the fastest first; hopeless ones are left out."""
        if self._start is None:
            raise TilewiseError("effort is 'measure', needs a planner that can run plans")
        for plan in plans:
            refuse_times(plan.target)
        least = min((plan.seconds for plan in plans), default=0.0)
        worth = [plan for plan in plans if plan.seconds < 20 * least or self._is_baseline(plan)]
        runs = [self._start(plan) for plan in worth]
        times = interleaved(runs, ROUNDS, tick=counting(tell, "timing", ROUNDS * len(runs)))
        found = [time.minimum for time in times]
        close = [i for i, time in enumerate(found) if time <= CLOSE * min(found)]
        if len(close) > 1:  # too close for so few rounds
            again = interleaved([runs[i] for i in close], 2 * ROUNDS)
            for i, time in zip(close, again, strict=True):
                found[i] = min(found[i], time.minimum)
        timed = [replace(plan, seconds=time, source="measured")
                 for plan, time in zip(worth, found, strict=True)]
        return sorted(timed, key=lambda plan: plan.seconds)

    def _learned(self, plans: Sequence[Plan], effort: str, max_error: float | None,
                 bits: int) -> Plan:
        """The fastest by measurement, and remembered."""
        tried = [_plan(algorithm, plan.problem, plan.target, plan.inner, schedule, plan.held)
                 for plan in plans for algorithm in [self.algorithm(plan.algorithm)]
                 for schedule in shortlist(algorithm, plan.inner, plan.target, effort,
                                           plan.schedule)]
        tried = [plan for plan in dict.fromkeys(tried)
                 if not self._complaints(plan, max_error, bits)]
        best = self.measure(tried)[0] if len(tried) > 1 else tried[0]
        self.wisdom.record(best, max_error, bits)
        return best

    def _remembered(self, p: Problem, t: Target, max_error: float | None,
                    bits: int) -> Plan | None:
        """What was decided, else what wisdom says, if its algorithm still stands by it."""
        if not (self.decided.entries or self.wisdom.entries or self.system.entries):
            return None
        entry = (self.decided.find(p, t) or self.wisdom.find(p, t, max_error, bits)
                 or self.system.find(p, t, max_error, bits))
        plan = self._by(entry, p, t, max_error, bits) if entry else None
        if entry is None or plan is None:
            return None
        return replace(plan, source="wisdom", seconds=entry.seconds * share(p))

    def _by(self, entry: Entry, p: Problem, t: Target, max_error: float | None,
            bits: int) -> Plan | None:
        """A plan as an entry has it, if its algorithm still stands by it."""
        algorithm = next((a for a in self.algorithms if a.name == entry.algorithm), None)
        if algorithm is None or algorithm.version != entry.version:
            return None
        inner = inner_problem(algorithm, p)
        if algorithm.reject(inner, t) or not _is_legal(algorithm, inner, t, entry.schedule):
            return None
        plan = _plan(algorithm, p, t, inner, entry.schedule, _holds(max_error, bits))
        return None if self._complaints(plan, max_error, bits) else plan

    def _is_baseline(self, plan: Plan) -> bool:
        return self.algorithm(plan.algorithm).baseline

    def _rank(self, answer: Candidate, p: Problem, t: Target) -> float:
        """Seconds on two threads, whatever the number: one algorithm, and so the same bits."""
        algorithm = self.algorithm(answer.algorithm)
        if answer.plan is None:
            return float("inf")
        common = t.on_two
        if common == t:
            return answer.plan.seconds
        return _plan(algorithm, p, common, answer.plan.inner, None).seconds

    def _asked_for(self, p: Problem, t: Target, algorithm: Algorithm,
                   schedule: Schedule | None, held: bool) -> Plan:
        inner = inner_problem(algorithm, p)
        reasons = algorithm.reject(inner, t)
        if reasons:
            raise NoAlgorithm(p, t, {algorithm.name: reasons})
        if schedule is not None and not _is_legal(algorithm, inner, t, schedule):
            raise InvalidSchedule(f"schedule {schedule} is not in the space of {algorithm.name} "
                                  f"for {inner}; algorithm.space(problem, target) lists it")
        return _plan(algorithm, p, t, inner, schedule, held)

    def _answer(self, algorithm: Algorithm, p: Problem, t: Target, max_error: float | None,
                bits: int) -> Candidate:
        inner = inner_problem(algorithm, p)
        reasons = algorithm.reject(inner, t)
        if reasons:
            return Candidate(algorithm.name, None, tuple(reasons))
        plan = _plan(algorithm, p, t, inner, None, _holds(max_error, bits))
        why = self._complaints(plan, max_error, bits)
        if why:
            return Candidate(algorithm.name, None, why, plan)
        return Candidate(algorithm.name, plan)

    def _complaints(self, plan: Plan, max_error: float | None, bits: int) -> tuple[str, ...]:
        """Why a plan is not accurate enough; the baseline is what the caller would get anyway."""
        algorithm, found = self.algorithm(plan.algorithm), []
        if algorithm.baseline:
            return ()
        if max_error is not None and plan.error > max_error:
            found.append(f"error is up to {plan.error:.1e}, needs at most {max_error:.1e}")
        if algorithm.bits < bits:
            found.append(f"products keep {algorithm.bits} bits, need {bits}")
        return tuple(found)


def inner_problem(algorithm: Algorithm, p: Problem) -> Problem:
    """What the kernel itself is asked for: its layout, and the steps it can fuse.

    A gradient of the input is a forward convolution with another weight, for who knows no other.
    """
    if p.direction == "backward_data" and p.direction not in algorithm.directions:
        p = p.mirrored or p
    layout = p.layout if p.layout in algorithm.layouts else sorted(algorithm.layouts)[0]
    epilogue = p.epilogue.split(algorithm.fuses)[0]
    same = (layout, epilogue) == (p.layout, p.epilogue)
    return p if same else p.with_(layout=layout, epilogue=epilogue)


def _is_legal(algorithm: Algorithm, inner: Problem, t: Target, schedule: Schedule) -> bool:
    return schedule in algorithm.space(inner, t)


def _holds(max_error: float | None, bits: int) -> bool:
    """Whether a caller bounds the error; torch's setting also asks for bits."""
    return max_error is not None and not bits


def _plan(algorithm: Algorithm, p: Problem, t: Target, inner: Problem,
          schedule: Schedule | None, held: bool = False) -> Plan:
    if schedule is None:
        schedule = _default(algorithm, p, t, inner)
    seconds = algorithm.cost(inner, t, schedule) + _passes(p, t, inner)
    return Plan(p, t, algorithm.name, algorithm.version, schedule, inner, seconds, "estimate",
                algorithm.bound(inner, t, schedule, held), held)


def _default(algorithm: Algorithm, p: Problem, t: Target, inner: Problem) -> Schedule:
    """One for all sizes of a class, so that they share a kernel, if it fits this one too."""
    like = inner_problem(algorithm, representative(p))
    if algorithm.reject(like, t):
        return algorithm.default(inner, t)
    schedule = algorithm.default(like, t)
    return schedule if _is_legal(algorithm, inner, t, schedule) else algorithm.default(inner, t)


def _plans(answers: Sequence[Candidate], p: Problem, t: Target) -> list[Plan]:
    """Those that there are; at least one."""
    plans = [answer.plan for answer in answers if answer.plan]
    if not plans:
        raise NoAlgorithm(p, t, {answer.algorithm: answer.reasons for answer in answers})
    return plans


def _passes(p: Problem, t: Target, inner: Problem) -> float:
    """Seconds of the passes before and after the kernel."""
    before, after = passes(p, inner)
    written = inner.output_bytes  # an upper bound once it has been pooled
    rest = [step for step in after if not step.startswith("to_")]
    total = sum(CALL + traffic(t, (3 if step == "residual" else 2) * written) for step in rest)
    return total + (_turns(p, t) if before else 0.0)


def _turns(p: Problem, t: Target) -> float:
    """Seconds to bring the operands into the kernel's layout, and the result back."""
    image, output = (p.c, p.h * p.w), (p.k, p.conv_h * p.conv_w)
    read = {"forward": [image, output] if p.epilogue.residual else [image],
            "backward_data": [output], "backward_weight": [image, output]}[p.direction]
    total = sum(turn(t, p.n, *shape) for shape in read)
    if p.direction == "backward_weight":  # always (K, C, R, S)
        return total
    n, channels, height, width = p.result_shape
    return total + turn(t, n, channels, height * width)

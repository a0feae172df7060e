"""One measurement: everybody's result is checked, then all take turns."""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..core.errors import TilewiseError
from ..core.progress import Tell, counting, silent
from ..planner.measure import Timing, interleaved
from .contenders import Contender, tilewise_contender, torch_contenders, use_huge_pages
from .graph import CannotExport, export
from .peers import check, start
from .results import Row
from .subjects import Subject

CHECKED = 2  # images whose results are compared with float64
OURS = (5e-6, 3.0)  # our error may be the first, as many times that of torch, or --max-error
LOOSE = 1e-3  # a peer that errs more than this computes something else
LOW = {"openvino_default": 0.05}  # may round every layer to bfloat16
PAUSE = 0.03  # seconds until the threads of the one before have stopped spinning


class WrongResult(TilewiseError):
    """Ours is not what it should be; no speed is told."""


@dataclass(frozen=True)
class Options:
    """How to measure."""

    against: tuple[str, ...] = ("torch",)
    threads: int = 1
    rounds: int = 9
    budget: float = 240.0
    effort: str = "estimate"
    max_error: float | None = None
    algorithm: str | None = None
    cold: bool = False  # weights come from memory, not from a cache
    compile: bool = True


@torch.no_grad()
def measure(s: Subject, o: Options, tell: Tell = silent) -> list[Row]:
    """Rows of all contenders, torch's first, then ours, then the peers'."""
    peers = [name for name in o.against if name != "torch"]
    for name in peers:
        check(name)
    use_huge_pages()
    with tempfile.TemporaryDirectory() as directory:
        tell("preparing torch", 0, len(peers) + 2)
        everybody = torch_contenders(s, o.compile)
        tell("preparing tilewise", 1, len(peers) + 2)
        everybody.append(tilewise_contender(s, o.effort, o.max_error, o.algorithm, tell))
        refused: list[Row] = []
        for i, name in enumerate(peers):
            tell(f"preparing {name}", i + 2, len(peers) + 2)
            try:
                everybody.append(_peer(name, s, o, Path(directory)))
            except CannotExport as reason:
                refused.append(Row(s.name, name, name, note=str(reason)))
        errors = _errors(s, everybody, o.max_error, tell)
        wrong = [c for c in everybody if not errors[c.name] <= LOW.get(c.name, LOOSE)]
        timed = [c for c in everybody if c not in wrong]
        times = interleaved([c.run for c in timed], o.rounds, 0.03, o.budget,
                            pause=PAUSE if peers else 0.0, before=_evict if o.cold else None,
                            tick=counting(tell, f"measuring {s.name}", o.rounds * len(timed)))
        refused += [Row(s.name, c.name, c.family, errors[c.name], note="wrong result: not timed")
                    for c in wrong]
        return _rows(s, timed, times, errors) + refused


@torch.no_grad()
def beside_torch(s: Subject, fast: Callable[[Tensor], Any],
                 tell: Tell = silent) -> tuple[float, float]:
    """Least seconds of an optimised subject, and of torch's fastest form that is not compiled."""
    theirs = torch_contenders(s, compile_=False)
    tick = counting(tell, f"measuring {s.name}", 3 * (len(theirs) + 1))
    ours, *times = interleaved([lambda: fast(s.example), *(c.run for c in theirs)], 3, 0.02, 20.0,
                               tick=tick)
    return ours.minimum, min(time.minimum for time in times)


def step_beside_torch(s: Subject, fast: nn.Module,
                      tell: Tell = silent) -> tuple[float, float]:
    """The same of forward and backward in training mode; parameters get no gradients from it."""
    planes = copy.deepcopy(s.model).to(memory_format=torch.contiguous_format)
    last = copy.deepcopy(s.model).to(memory_format=torch.channels_last)
    images = s.example.contiguous(memory_format=torch.channels_last)
    models = [(fast, s.example), (planes, s.example.contiguous()), (last, images)]
    was = fast.training
    try:
        ours, *times = interleaved([_step_of(*one) for one in models], 3, 0.02, 60.0,
                                   tick=counting(tell, f"measuring {s.name}", 3 * len(models)))
    finally:
        fast.train(was)
    return ours.minimum, min(time.minimum for time in times)


def _step_of(model: nn.Module, x: Tensor) -> Callable[[], Any]:
    learns = [p for p in model.train().parameters() if p.requires_grad]

    def step() -> Any:
        results = [y for y in tree_leaves(model(x)) if isinstance(y, Tensor) and y.requires_grad]
        return torch.autograd.grad([y.sum() for y in results], learns, allow_unused=True)

    return step


def _peer(name: str, s: Subject, o: Options, directory: Path) -> Contender:
    graph = export(s.model, s.example)
    place = directory / name.partition("=")[0]
    place.mkdir()
    return start(name, graph, s.example.contiguous(), o.threads, place)


def _errors(s: Subject, everybody: Sequence[Contender], admitted: float | None,
            tell: Tell) -> dict[str, float]:
    """Relative rms errors against float64; raises if ours is out of line."""
    few = min(CHECKED, s.images)
    model: Any = copy.deepcopy(s.model).double()
    if getattr(model, "residual", None) is not None:
        model.residual = model.residual[:few]
    reference = model(s.example[:few].double())
    errors = {}
    for i, c in enumerate(everybody):  # the first run of each, which compiles where it has to
        tell(f"checking the result of {c.name}", i, len(everybody))
        errors[c.name] = rms_error(c.result(c.run())[:few], reference)
    theirs = min(error for name, error in errors.items() if name.startswith("torch"))
    ours = errors["tilewise"]
    if not ours <= max(OURS[0], OURS[1] * theirs, admitted or 0.0):
        raise WrongResult(f"{s.name}: our rms error is {ours:.1e}, torch's {theirs:.1e}: no speed "
                          "is told of a wrong result")
    return errors


def rms_error(y: Tensor, reference: Tensor) -> float:
    """Root mean square of the difference over that of the reference."""
    difference = y.reshape(reference.shape).double() - reference
    scale = reference.square().mean().clamp_min(1e-300)
    return float((difference.square().mean() / scale).sqrt())


def _rows(s: Subject, timed: Sequence[Contender], times: Sequence[Timing],
          errors: dict[str, float]) -> list[Row]:
    theirs = [time for c, time in zip(timed, times, strict=True) if c.family == "torch"]
    least = min(time.minimum for time in theirs)
    steady = min(theirs, key=lambda time: time.median)
    return [Row(s.name, c.name, c.family, errors[c.name], time.minimum, time.median, time.spread,
                least / time.minimum, _paired(steady, time), s.images)
            for c, time in zip(timed, times, strict=True)]


def _paired(yardstick: Timing, time: Timing) -> float:
    """Median over the rounds of torch's time over this one's: what drifts hits both."""
    return statistics.median(a / b for a, b in zip(yardstick.samples, time.samples))


_EVICTION: list[Tensor] = []


def _evict() -> None:
    """Fill the caches with something else."""
    from ..core.target import Target

    if not _EVICTION:
        _EVICTION.append(torch.zeros(2 * min(Target.host().l3, 256 << 20) // 4))
    _EVICTION[0].add_(1.0)

"""What a model's Python asks of tensors, changes and leaves behind is as without tilewise."""

from __future__ import annotations

import collections
import contextvars
import copy
import dataclasses
import functools
import gc
import os
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tilewise
from tilewise.model import captured

X = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    def __init__(self, **own: Any) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.__dict__.update(own)


def outcomes(forward: Callable[..., Any], own: dict[str, Any], change: Callable[[Any], Any],
             read: Callable[[Any], Any], optimised: bool) -> list[Any]:
    """Of six calls, with a change after half of them."""
    torch.manual_seed(0)
    model: Any = type("Model", (Base,), {"forward": forward})(**copy.deepcopy(own)).eval()
    if optimised:
        model = tilewise.optimize(model)
    found: list[Any] = []
    for number in range(6):
        if number == 3:
            change(model)
        with torch.inference_mode():
            found.append(model(X).double().abs().mean().item())
        found.append(read(model))
    return found


def agree(forward: Callable[..., Any], own: dict[str, Any] | None = None,
          change: Callable[[Any], Any] = lambda model: None,
          read: Callable[[Any], Any] = lambda model: None) -> None:
    theirs, ours = (outcomes(forward, own or {}, change, read, optimised)
                    for optimised in (False, True))
    same(ours, theirs)


def same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        assert one == (pytest.approx(other, rel=1e-4) if isinstance(other, float) else other)


# what is asked


QUESTIONS: dict[str, Callable[[Any, Any], bool]] = {
    "a tensor's class": lambda self, x: isinstance(x, torch.Tensor),
    "one of two classes": lambda self, x: isinstance(x, (list, torch.Tensor)),
    "a shape's class": lambda self, x: isinstance(x.shape, (list, tuple)),
    "a size's class": lambda self, x: isinstance(x.shape[0], int),
    "a parameter": lambda self, x: isinstance(self.a.weight, nn.Parameter),
    "no parameter": lambda self, x: isinstance(x, nn.Parameter),
    "by TorchScript's words": lambda self, x: torch.jit.isinstance(x, torch.Tensor),
    "a class of long ago": lambda self, x: isinstance(x, torch.FloatTensor),
    "another of long ago": lambda self, x: isinstance(x, torch.DoubleTensor),
    "its history": lambda self, x: x.grad_fn is None,
    "its gradient": lambda self, x: self.a.weight.grad is None,
    "what it is a view of": lambda self, x: x._base is None,
    "the number of its device": lambda self, x: x.device.index is None,
    "its type as text": lambda self, x: repr(x.dtype) == "torch.float32"}


@pytest.mark.parametrize("asked", QUESTIONS)
def test_questions_are_answered_as_by_tensors(asked: str) -> None:
    question = QUESTIONS[asked]
    agree(lambda self, x: self.a(x) * (2 if question(self, x) else 3))


def test_patterns_see_tensors() -> None:
    def forward(self: Any, x: Any) -> Any:
        match x.shape:
            case (_, _, _, _):
                y = self.a(x) * 2
            case _:
                y = self.a(x) * 3
        match x:
            case torch.Tensor():
                return y + 2
            case _:
                return y + 3

    agree(forward)


def test_a_value_that_may_be_a_function() -> None:
    def default(given: Any, other: Any) -> Any:
        return given if given is not None else other() if callable(other) else other

    agree(lambda self, x: self.a(default(None, x)), {"default": default})


# what is changed


@dataclasses.dataclass(slots=True)
class Slots:
    k: float = 2.0


class Settings:
    k: Any = 2.0
    ks: Any = [2.0]
    inner: Any = types.SimpleNamespace(k=2.0)
    many: Any = [types.SimpleNamespace(k=2.0), types.SimpleNamespace(k=2.0)]


class Named(dict):
    """As settings are often read."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


HELD: dict[str, Any] = {"one": types.SimpleNamespace(k=2.0)}
NAME = "TILEWISE_TEST_FACTOR"
IN_CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("factor", default=2.0)
IN_THREAD = threading.local()


def restore() -> None:
    Settings.k, Settings.ks, Settings.inner.k = 2.0, [2.0], 2.0
    HELD["one"].k = Settings.many[0].k = 2.0
    os.environ.pop(NAME, None)
    IN_CONTEXT.set(2.0)


CHANGES: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "an object with slots": (lambda self, x: self.a(x) * self.own.k, {"own": Slots()},
                             lambda model: setattr(model.own, "k", 3.0)),
    "a default of a class": (lambda self, x: self.a(x) * self.own.k, {"own": Settings()},
                             lambda model: setattr(model.own, "k", 3.0)),
    "a class": (lambda self, x: self.a(x) * self.own.k, {"own": Settings},
                lambda model: setattr(Settings, "k", 3.0)),
    "a list of a class": (lambda self, x: self.a(x) * Settings.ks[0], {},
                          lambda model: Settings.ks.__setitem__(0, 3.0)),
    "an object of a class": (lambda self, x: self.a(x) * Settings.inner.k, {},
                             lambda model: setattr(Settings.inner, "k", 3.0)),
    "an object in a list of a class": (lambda self, x: self.a(x) * self.own.many[0].k,
                                       {"own": Settings()},
                                       lambda model: setattr(Settings.many[0], "k", 3.0)),
    "an object in a dictionary": (lambda self, x: self.a(x) * HELD["one"].k, {},
                                  lambda model: setattr(HELD["one"], "k", 3.0)),
    "a dictionary of its own class": (lambda self, x: self.a(x) * self.own.k,
                                      {"own": Named(k=2.0)},
                                      lambda model: model.own.__setitem__("k", 3.0)),
    "a truth that is a number then": (lambda self, x: self.a(x)[:, self.own], {"own": True},
                                      lambda model: setattr(model, "own", 1)),
    "the environment": (lambda self, x: self.a(x) * float(os.getenv(NAME, "2")), {},
                        lambda model: os.environ.__setitem__(NAME, "3")),
    "whether the environment has it": (lambda self, x: self.a(x) * (3 if NAME in os.environ else 2),
                                       {}, lambda model: os.environ.__setitem__(NAME, "3")),
    "a variable of a context": (lambda self, x: self.a(x) * IN_CONTEXT.get(), {},
                                lambda model: IN_CONTEXT.set(3.0)),
    "by the dictionary of a module": (lambda self, x: self.a(x) * self.__dict__["own"],
                                      {"own": 2.0}, lambda model: setattr(model, "own", 3.0)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changes_are_seen(what: str) -> None:
    forward, own, change = CHANGES[what]
    found = []
    for optimised in (False, True):
        restore()
        found.append(outcomes(forward, own, change, lambda model: None, optimised))
    restore()
    same(*found)
    assert found[0][0] != found[0][-2]


def test_a_variable_of_a_thread() -> None:
    def in_thread(model: Any, factor: float) -> float:
        found: list[float] = []

        def call() -> None:
            IN_THREAD.factor = factor
            with torch.inference_mode():
                found.append(model(X).double().abs().mean().item())

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return found[0]

    torch.manual_seed(0)
    model = tilewise.optimize(type("Model", (Base,), {
        "forward": lambda self, x: self.a(x) * IN_THREAD.factor})().eval())
    first = in_thread(model, 2.0)
    assert [in_thread(model, factor) / first for factor in (2.0, 3.0, 2.0)] == pytest.approx(
        [1.0, 1.5, 1.0])


# what the model itself changes and leaves


COUNTS: Any = collections.defaultdict(int)


def counts_globally(self: Any, x: Any) -> Any:
    COUNTS["calls"] += 1
    return self.a(x) * COUNTS["calls"]


def counts_in_a_tuple(self: Any, x: Any) -> Any:
    self.own[0].append(1)
    return self.a(x) * len(self.own[0])


def keeps_by_dictionary(self: Any, x: Any) -> Any:
    self.__dict__["last"] = y = self.a(x)
    return y * 2


def keeps_by_object(self: Any, x: Any) -> Any:
    y = self.a(x)
    object.__setattr__(self, "last", y)
    return y * 2


def keeps_a_buffer(self: Any, x: Any) -> Any:
    y = self.a(x)
    self._buffers["last"] = y.mean()
    return y


@pytest.mark.parametrize("forward", [counts_globally, counts_in_a_tuple])
def test_what_it_counts(forward: Any) -> None:
    found = []
    for optimised in (False, True):
        COUNTS.clear()
        found.append(outcomes(forward, {"own": ([],)}, lambda model: None,
                              lambda model: COUNTS["calls"], optimised))
    same(*found)


@pytest.mark.parametrize("forward", [keeps_by_dictionary, keeps_by_object, keeps_a_buffer])
def test_what_it_keeps_are_tensors(forward: Any) -> None:
    agree(forward, read=lambda model: type(model.last).__name__)


@functools.lru_cache
def grid(length: int) -> torch.Tensor:
    return torch.arange(length).float()


def test_caches_hold_tensors() -> None:
    grid.cache_clear()
    agree(lambda self, x: self.a(x) + grid(x.shape[-1]), read=lambda model: type(grid(16)).__name__)


KNOWN: dict[int, torch.Tensor] = {}


def remembered(length: int) -> torch.Tensor:
    if length not in KNOWN:
        KNOWN[length] = torch.arange(length).float()
    return KNOWN[length]


def test_a_dictionary_of_tensors_is_a_cache() -> None:
    KNOWN.clear()
    remembered(8)
    agree(lambda self, x: self.a(x) + remembered(x.shape[-1]),
          read=lambda model: type(remembered(16)).__name__)


def test_caches_keep_what_they_have_of_others() -> None:
    @functools.lru_cache
    def session(name: str) -> object:
        return object()

    first = session("first")
    agree(lambda self, x: self.a(x) * (2 if self.session("second") else 3), {"session": session})
    assert session("first") is first


class Boxes(NamedTuple):
    xy: torch.Tensor

    def doubled(self) -> torch.Tensor:
        return self.xy * 2


@dataclasses.dataclass(slots=True)
class Slotted:
    y: torch.Tensor

    def doubled(self) -> torch.Tensor:
        return self.y * 2


@pytest.mark.parametrize("kind", [Boxes, Slotted])
def test_objects_that_are_made_inside(kind: Any) -> None:
    class Model(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return kind(self.a(x)).doubled()

    fast = tilewise.optimize(Model().eval())
    with torch.inference_mode():
        fast(X)
        assert not fast.forward.refusals
        old = weakref.ref(fast.a.weight)
        fast.a.weight = nn.Parameter(torch.randn(8, 3, 3, 3))
        fast(X)
    gc.collect()
    assert old() is None


def test_what_is_not_read_may_change() -> None:
    class Own:
        k = 2.0
        made = 0

        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.k

    class Model(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own.scaled(self.a(x))

    own = Own()
    fast = tilewise.optimize(Model(own=own).eval())
    with torch.inference_mode():
        for number in range(5):
            fast(X)
            setattr(own, f"log{number}", number)
            Own.made = number
    assert sum(map(len, fast.forward.captures.values())) == 1


def test_objects_of_classes_of_objects_are_no_reason_to_refuse() -> None:
    class Model(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) * self.own.many[0].k

    fast = tilewise.optimize(Model(own=Settings()).eval())
    with torch.inference_mode():
        fast(X)
    assert not fast.forward.refusals


def test_an_object_in_the_place_of_another() -> None:
    held = {"one": types.SimpleNamespace(k=2.0)}

    class Model(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) * self.held["one"].k

    fast = tilewise.optimize(Model(held=held).eval())
    with torch.inference_mode():
        before = fast(X)
        held.clear()
        fast.held["one"] = types.SimpleNamespace(k=3.0)
        torch.testing.assert_close(fast(X), before * 1.5)


def test_a_scripted_part_is_no_fault() -> None:
    part = torch.jit.trace(nn.Conv2d(3, 8, 3).eval(), X)
    model = nn.Sequential(nn.Conv2d(3, 3, 3), part).eval()
    with torch.inference_mode():
        torch.testing.assert_close(tilewise.optimize(model)(X), model(X))


def test_properties_that_are_kept_hold_tensors() -> None:
    class Model(Base):
        @functools.cached_property
        def grid(self) -> torch.Tensor:
            return torch.arange(16.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.grid

    model = Model().eval()
    fast = tilewise.optimize(copy.deepcopy(model))
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(fast(X), model(X))
    assert type(fast.grid) is torch.Tensor


@pytest.mark.parametrize("made", [
    lambda y: lambda t: t * y, lambda y: functools.partial(torch.mul, y)])
def test_results_that_are_functions_hold_tensors(made: Any) -> None:
    class Model(Base):
        def forward(self, x: torch.Tensor) -> Any:
            return made(self.a(x))

    with torch.inference_mode():
        assert type(tilewise.optimize(Model().eval())(X)(2.0)) is torch.Tensor


@pytest.mark.parametrize("change", [
    lambda model: model.zero_grad(), lambda model: model.a.requires_grad_(False)])
def test_attributes_of_parameters_may_be_set(change: Any) -> None:
    class Model(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            change(self)
            return self.a(x)

    fast = tilewise.optimize(Model().eval())
    fast.a.weight.grad = torch.zeros_like(fast.a.weight)
    with torch.no_grad():
        assert fast(X).shape == (1, 8, 16, 16)


def test_numbers_that_another_thread_draws_are_drawn_once() -> None:
    drawn: list[float] = []
    ended = threading.Event()

    def draw() -> None:
        while not ended.is_set() and len(drawn) < 100_000:
            drawn.append(np.random.rand())

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        with torch.inference_mode():
            for _ in range(4):
                tilewise.optimize(nn.Sequential(*[Base().a, nn.ReLU()]).eval())(X)
    finally:
        ended.set()
        thread.join()
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("company", [False, True])
def test_numbers_that_the_model_draws_are_new_in_every_call(company: bool) -> None:
    class Model(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) * float(np.random.rand())

    fast, ended = tilewise.optimize(Model().eval()), threading.Event()
    thread = threading.Thread(target=ended.wait)
    if company:
        thread.start()
    try:
        with torch.inference_mode():
            found = {float(fast(X).sum()) for _ in range(4)}
    finally:
        ended.set()
    assert len(found) == 4


def test_texts_that_differ_in_every_call_are_not_kept() -> None:
    class Model(Base):
        def forward(self, x: torch.Tensor, caption: str = "") -> torch.Tensor:
            return self.a(x) * len(caption)

    fast = tilewise.optimize(Model().eval())
    with torch.inference_mode():
        for number in range(3 * captured.MOST):
            fast(X, f"a caption, number {number}")
    kept = fast.forward
    assert len(kept.refusals) + len(kept.captures) <= 2 * captured.MOST


# modes


class Frozen(nn.Module):
    """A part without gradients, as frozen backbones have."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.mode():
            y = F.relu(self.a(x))
        return self.b(y.float())


MODES: dict[str, Any] = {
    "no_grad": torch.no_grad, "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16)}
OUTSIDE: dict[str, Any] = {**MODES, "nothing": torch.enable_grad}


@pytest.mark.parametrize("inside", MODES)
@pytest.mark.parametrize("first", OUTSIDE)
@pytest.mark.parametrize("later", OUTSIDE)
def test_modes_inside_are_those_of_each_call(inside: str, first: str, later: str) -> None:
    model = Frozen(MODES[inside]).eval()
    fast = tilewise.optimize(copy.deepcopy(model))

    def seen(one: nn.Module, outside: str) -> Any:
        with OUTSIDE[outside]():
            try:
                y = one(X)
            except RuntimeError as refusal:
                return str(refusal)[:40]
            return (y.dtype, y.requires_grad, y.is_inference(), torch.is_grad_enabled(),
                    torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))

    for outside in (first, later, first, later):
        assert seen(fast, outside) == seen(model, outside)
    assert torch.is_grad_enabled()


def test_gradients_are_switched_on_again_where_a_step_raises() -> None:
    class Model(Base):
        def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = self.a(x)
                return y + rows

    fast = tilewise.optimize(Model().eval())
    fast(X, torch.zeros(16))
    with pytest.raises(RuntimeError):
        fast(X, torch.zeros(5))
    assert torch.is_grad_enabled()


# methods


def tiled(self: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    """Padding that wraps around, as images that repeat are made with."""
    return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), weight, bias, self.stride)


def convolutions(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, nn.Conv2d)]


@pytest.mark.parametrize("early", [False, True])
def test_a_convolution_may_get_another_inner_function(early: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    model.eval()
    fast = tilewise.optimize(copy.deepcopy(model))
    with torch.inference_mode():
        if not early:
            fast(X)
        for part in (*convolutions(model), *convolutions(fast)):
            part._conv_forward = tiled.__get__(part)
        for _ in range(3):
            torch.testing.assert_close(fast(X), model(X))


@pytest.mark.parametrize("early", [False, True])
def test_all_convolutions_may_get_another_inner_function(
        early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    model.eval()
    with torch.inference_mode():
        if not early:
            tilewise.optimize(model)(X)
        fast = tilewise.optimize(model)
        if not early:
            fast(X)
        monkeypatch.setattr(nn.Conv2d, "_conv_forward", tiled)
        torch.testing.assert_close(fast(X), model(X))


def test_a_forward_may_be_wrapped() -> None:
    model = Base()
    type(model).forward = lambda self, x: self.a(x)
    fast = tilewise.optimize(copy.deepcopy(model).eval())
    whole = fast.forward
    fast.forward = lambda x: whole(x) * 2
    with torch.inference_mode():
        for _ in range(4):
            torch.testing.assert_close(fast(X), model(X) * 2)
    del type(model).forward


def test_zeros_of_two_signs_are_two_arguments() -> None:
    class Model(Base):
        def forward(self, x: torch.Tensor, k: float) -> torch.Tensor:
            return self.a(x) + torch.ones(()) / k

    fast = tilewise.optimize(Model().eval())
    with torch.inference_mode():
        assert float(fast(X, 0.0).mean()) == -float(fast(X, -0.0).mean()) == float("inf")


@pytest.mark.filterwarnings("default:.*cannot make a graph")
def test_a_fault_of_ours_is_told_and_torch_runs_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    fast = tilewise.optimize(copy.deepcopy(model))

    def broken(*_: Any) -> Any:
        raise ValueError("a fault")

    monkeypatch.setattr(captured, "Capture", broken)
    with torch.inference_mode():
        with pytest.warns(RuntimeWarning, match="Sequential runs by torch.*ValueError: a fault"):
            found = [fast(X), fast(X)]
        assert all(torch.equal(y, model(X)) for y in found)

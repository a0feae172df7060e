"""Code that a graph cannot repeat is refused where it runs, and only there."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copy
import dataclasses
import functools
import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress as quiet
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import register_pytree_node

import tilewise

X = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
OTHER = torch.randn(1, 3, 12, 16, generator=torch.Generator().manual_seed(1))
KEPT: dict[str, Any] = {"set": 0}
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("variable", default=None)


class Settings:
    factor = 1.0


class Base(nn.Module):
    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.settings = Settings()


def pair(forward: Callable[..., Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = type("Model", (Base,), {"forward": forward})().eval()
    return model, tilewise.optimize(model)


def is_whole(fast: Any) -> bool:
    """Whether there is a graph of the model, and all of it is in there."""
    captures = [one for same in fast.forward.captures.values() for one in same]
    return bool(captures) and not any(capture.opaque for capture in captures)


def outcome(model: Any, x: torch.Tensor) -> Any:
    try:
        return model(x)
    except Exception as raised:
        return type(raised)


@torch.inference_mode()
def agree(model: Any, fast: Any, images: tuple[torch.Tensor, ...] = (X, X, OTHER, X)) -> None:
    for image in images:
        theirs, ours = outcome(model, image), outcome(fast, image)
        if isinstance(theirs, type):
            assert ours is theirs
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert sys.gettrace() is None


# exceptions


def is_exporting() -> bool:
    try:
        return torch.compiler.is_exporting()
    except Exception:
        return False


def asks_a_library(self: Any, x: Any) -> Any:
    return self.a(x) * (2 if is_exporting() else 3)


def cleans_up(self: Any, x: Any) -> Any:
    try:
        y = self.a(x)
        return y * 2
    finally:
        KEPT.get("set")


def falls_back(self: Any, x: Any) -> Any:
    y = self.a(x)
    try:
        return y.view(16, 128)
    except RuntimeError:
        return y * 3


def falls_back_at_once(self: Any, x: Any) -> Any:
    y = self.a(x)
    try:
        return y * float(y.mean())  # a tensor is a number, a stand-in is not
    except TypeError:
        return y * 3


def takes_all(self: Any, x: Any) -> Any:
    y = self.a(x)
    try:
        return y * (2 if y.mean() > 100 else 5)
    except:  # noqa: E722
        return y * 3


def factor_by_class(y: Any) -> int:
    try:
        return 2 if type(y).__name__ == "Tensor" else 3
    except:  # noqa: E722
        return 5


def factor_by_call(y: Any) -> int:
    try:
        print(end="")
        return 2
    except:  # noqa: E722
        return 5


def takes_a_refused_class(self: Any, x: Any) -> Any:
    y = self.a(x)
    return y * factor_by_class(y)


def takes_a_refused_call(self: Any, x: Any) -> Any:
    y = self.a(x)
    return y * factor_by_call(y)


def takes_all_inside(self: Any, x: Any) -> Any:
    def inner(y: Any) -> Any:
        try:
            return math.floor(y)
        except BaseException:
            return 7

    y = self.a(x)
    return y * inner(y.sum() * 0 + 1.5)


def gives_up_quietly(self: Any, x: Any) -> Any:
    y = self.a(x)
    try:
        y = y.view(16, 128)
    finally:
        return y  # noqa: B012


def suppresses(self: Any, x: Any) -> Any:
    y = self.a(x)
    with contextlib.suppress(RuntimeError):
        y = y.view(16, 128)
    return y


@contextlib.contextmanager
def forgiving() -> Iterator[None]:
    try:
        yield
    except RuntimeError:
        KEPT.get("set")


def forgives(self: Any, x: Any) -> Any:
    y = self.a(x)
    with forgiving():
        y = y.view(16, 128)
    return y


class Forgiving:
    def __enter__(self) -> None:
        KEPT.get("set")

    def __exit__(self, kind: Any, *_: Any) -> bool:
        return kind is not None


def forgives_by_a_class(self: Any, x: Any) -> Any:
    y = self.a(x)
    with Forgiving():
        y = y.view(16, 128)
    return y


def quietly(self: Any, x: Any) -> Any:
    y = self.a(x)
    with quiet(RuntimeError):
        y = y + torch.ones(1, 8, 16, 1)
    return y


def sizes_inside(self: Any, x: Any) -> Any:
    y = self.a(x)
    try:
        if len(y) == 1 and y.size(5) > 3:
            return y
    except IndexError:
        return y * 3
    return y * 2


RIGHT = {function.__name__: function for function in (
    falls_back, falls_back_at_once, takes_all, takes_all_inside, takes_a_refused_class,
    takes_a_refused_call, gives_up_quietly, suppresses,
    forgives, forgives_by_a_class, quietly, sizes_inside)}


@pytest.mark.parametrize("name", RIGHT)
def test_exceptions_that_are_caught(name: str) -> None:
    model, fast = pair(RIGHT[name])
    agree(model, fast)
    assert not is_whole(fast)


@pytest.mark.parametrize("forward", [asks_a_library, cleans_up])
def test_handlers_that_handle_nothing(forward: Any) -> None:
    model, fast = pair(forward)
    agree(model, fast)
    assert is_whole(fast)


def test_what_a_finally_does_is_not_the_reason() -> None:
    """The part asks for sizes, so that a graph for one size may have it."""
    def forward(self: Any, x: Any) -> Any:
        try:
            return self.a(x) * (2 if x.shape[2] > 12 else 3)
        finally:
            if KEPT["set"]:
                self.settings.factor = 2.0

    model, fast = pair(forward)
    agree(model, fast, (X, X, X, OTHER, OTHER, OTHER, X))
    assert is_whole(fast)


def test_a_debugger_keeps_its_hook() -> None:
    seen: list[str] = []

    def debugger(frame: Any, event: str, _: Any) -> Any:
        seen.append(event)
        return debugger

    model, fast = pair(asks_a_library)
    sys.settrace(debugger)
    try:
        with torch.inference_mode():
            theirs, ours = model(X), fast(X)
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(None)
    assert "exception" in seen or "line" in seen
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# what runs although something was refused


def writes(x: Any) -> None:
    KEPT["object"].n += x


def after_a_refused_line(self: Any, x: Any) -> Any:
    try:
        writes(1)
        return self.a(x)
    finally:
        KEPT["object"].m += 1


def after_a_refused_call(self: Any, x: Any) -> Any:
    try:
        print(end="")
        return self.a(x)
    finally:
        KEPT["object"].m += 1


@contextlib.contextmanager
def counted() -> Iterator[None]:
    try:
        yield
    finally:
        KEPT["object"].m += 1


def inside_of_a_generator(self: Any, x: Any) -> Any:
    with counted():
        y = self.a(x)
        print(end="")
        return y


def many(self: Any, x: Any) -> Iterator[Any]:
    try:
        for _ in range(3):
            yield self.a(x)
    finally:
        KEPT["object"].m += 1


def leaves_a_generator(self: Any, x: Any) -> Any:
    y = next(iter(many(self, x)))
    writes(1)
    return y


class CountedByClass:
    def __enter__(own) -> None:
        KEPT.get("set")

    def __exit__(own, *_: Any) -> None:
        KEPT["object"].m += 1


def inside_of_a_class(self: Any, x: Any) -> Any:
    with CountedByClass():
        y = self.a(x)
        print(end="")
        return y


def inner_and_outer(self: Any, x: Any) -> Any:
    try:
        return after_a_refused_line(self, x)
    finally:
        KEPT["object"].n += 100


class Nested(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.b = part, nn.Conv2d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            y = self.part(x)
        finally:
            KEPT["object"].n += 1000
        return self.b(y)


TWICE = (after_a_refused_line, after_a_refused_call, inside_of_a_generator, leaves_a_generator,
         inside_of_a_class, inner_and_outer)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("forward", TWICE, ids=lambda one: one.__name__)
def test_what_is_counted_is_counted_once(forward: Any, nested: bool) -> None:
    counts = []
    for which in range(2):
        model = pair(forward)[0]
        model = Nested(model).eval() if nested else model
        model = tilewise.optimize(model) if which else model
        kept = KEPT["object"] = types.SimpleNamespace(n=0, m=0)
        with torch.inference_mode():
            for _ in range(4):
                model(X)
        counts.append((kept.n, kept.m))
        assert sys.gettrace() is None
        assert sys.getprofile() is None
    assert counts[0] == counts[1]


# writes


def writes_never(self: Any, x: Any) -> Any:
    if KEPT["set"]:
        self.settings.factor = 2.0
    return self.a(x) * self.settings.factor


def test_writes_that_do_not_run() -> None:
    model, fast = pair(writes_never)
    agree(model, fast)
    assert is_whole(fast)
    KEPT["set"] = 1
    try:
        agree(model, fast)
    finally:
        KEPT["set"] = 0


def test_writes_that_run() -> None:
    def forward(self: Any, x: Any) -> Any:
        if x.dim() == 4:
            self.settings.factor = self.settings.factor + 1.0
        return self.a(x) * self.settings.factor

    model, fast = pair(forward)
    with torch.inference_mode():
        for _ in range(4):
            torch.testing.assert_close(fast(X) / fast.settings.factor,
                                       model(X) / model.settings.factor, rtol=1e-4, atol=1e-4)
    assert fast.settings.factor == model.settings.factor == 5.0
    assert not is_whole(fast)


class Hooked(Base):
    """Registers a hook when it runs for the first time, as libraries do that hand out features."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []
        self.is_hooked = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_hooked:
            self.a.register_forward_hook(lambda _, __, y: self.found.append(y))
            object.__setattr__(self, "is_hooked", True)
        y = self.a(x)
        return y + self.found[-1] * len(self.found)


def test_hooks_that_a_forward_registers() -> None:
    torch.manual_seed(0)
    model = Hooked().eval()
    fast = tilewise.optimize(copy.deepcopy(model))
    agree(model, fast)
    assert len(fast.a._forward_hooks) == 1


def test_hooks_that_a_forward_removes() -> None:
    def forward(self: Any, x: Any) -> Any:
        if self.handles:
            self.handles.pop().remove()
        return self.a(x)

    model, _ = pair(forward)
    model.handles = []
    fast = tilewise.optimize(copy.deepcopy(model))
    for one in (model, fast):
        one.handles += [one.a.register_forward_hook(lambda _, __, y: y * 2),
                        one.a.register_forward_hook(lambda _, __, y: y * 3)]
    agree(model, fast)
    assert not fast.a._forward_hooks


# variables of the context


def sets_and_resets(self: Any, x: Any) -> Any:
    token = VARIABLE.set([x])
    try:
        return self.a(x) * (2 if VARIABLE.get() else 3)
    finally:
        VARIABLE.reset(token)


def sets(self: Any, x: Any) -> Any:
    VARIABLE.set("set")
    return self.a(x) * 2


def reads_what_it_set_before(self: Any, x: Any) -> Any:
    token = VARIABLE.set("own")
    VARIABLE.reset(token)
    return self.a(x) * (2 if VARIABLE.get() else 3)


def test_variables_of_the_context() -> None:
    model, fast = pair(sets_and_resets)
    agree(model, fast)
    assert is_whole(fast)
    assert VARIABLE.get() is None
    model, fast = pair(reads_what_it_set_before)
    agree(model, fast)
    token = VARIABLE.set("other")
    agree(model, fast)
    VARIABLE.reset(token)
    agree(model, fast)


def test_a_variable_that_is_put_back_by_another_s_token() -> None:
    def forward(self: Any, x: Any) -> Any:
        y = self.a(x)
        VARIABLE.reset(KEPT["token"])
        return y * (2 if VARIABLE.get() else 3)

    model, fast = pair(forward)
    found = []
    for one in (model, fast, fast, fast):
        KEPT["token"] = VARIABLE.set("set")
        with torch.inference_mode():
            found.append(one(X))
        torch.testing.assert_close(found[-1], found[0], rtol=1e-4, atol=1e-4)


def test_a_variable_that_is_set_where_something_is_refused() -> None:
    def forward(self: Any, x: Any) -> Any:
        token = VARIABLE.set((VARIABLE.get() or 0) + 1)
        y = self.a(x)
        print(end="")
        found = VARIABLE.get()
        VARIABLE.reset(token)
        return y * found

    agree(*pair(forward))
    assert VARIABLE.get() is None


def test_a_variable_that_stays_set() -> None:
    model, fast = pair(sets)
    for _ in range(3):
        token = VARIABLE.set(None)
        agree(model, fast)
        assert VARIABLE.get() == "set"
        VARIABLE.reset(token)
        token = VARIABLE.set(None)
        with torch.inference_mode():
            fast(X)
        assert VARIABLE.get() == "set"
        VARIABLE.reset(token)


# closures


def scaled_by(factor: float) -> Callable[..., Any]:
    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(self: Any, x: Any) -> Any:
            return function(self, x) * factor

        def change(other: float) -> None:
            nonlocal factor
            factor = other

        wrapper.change = change  # type: ignore[attr-defined]
        return wrapper

    return decorated


class Inner(Base):
    @scaled_by(5.0)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


class Outer(nn.Module):
    """Two functions of the same code, with other variables."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.b = Inner(), nn.Conv2d(8, 8, 3)

    @scaled_by(2.0)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.inner(x))


def test_variables_of_functions_around() -> None:
    model = Outer().eval()
    fast = tilewise.optimize(model)
    agree(model, fast)
    assert is_whole(fast)
    for function, value in ((Inner.forward, 3.0), (Outer.forward, 7.0), (Inner.forward, 5.0),
                            (Outer.forward, 2.0)):
        function.change(value)  # type: ignore[attr-defined]
        agree(model, fast)


def multiplier(factor: float) -> tuple[Any, Any]:
    def times(x: Any) -> Any:
        return x * factor

    def change(other: float) -> None:
        nonlocal factor
        factor = other

    return times, change


def test_two_functions_with_the_same_variables() -> None:
    (one, change_one), (two, change_two) = multiplier(KEPT.setdefault("two", 2.0)), multiplier(
        KEPT["two"])
    model, fast = pair(lambda self, x: self.two(self.one(self.a(x))))
    type(model).one, type(model).two = staticmethod(one), staticmethod(two)
    agree(model, fast)
    assert is_whole(fast)
    for change, value in ((change_one, 5.0), (change_two, 3.0)):
        change(value)
        agree(model, fast)


def test_a_list_of_a_function_around_is_refused() -> None:
    counts: list[int] = []

    def forward(self: Any, x: Any) -> Any:
        counts.append(1)
        return self.a(x)

    _, fast = pair(forward)
    with torch.inference_mode():
        for _ in range(4):
            fast(X)
    assert len(counts) >= 4  # an attempt to trace it may count, too


# classes


def by_class(self: Any, x: Any) -> Any:
    return self.a(x) * type(self).scale


def by_class_of_instance(self: Any, x: Any) -> Any:
    return self.a(x) * self.__class__.scale


@pytest.mark.parametrize("forward", [by_class, by_class_of_instance])
def test_attributes_of_a_class_that_is_asked_for(forward: Any) -> None:
    model, fast = pair(forward)
    agree(model, fast)
    assert is_whole(fast)
    for value in (3.0, 4.0):
        type(model).scale = value
        agree(model, fast)


def test_methods_that_two_classes_share() -> None:
    class Part(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) * type(self).scale

    class Another(Part):
        scale = 3.0

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Part(), Another()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) + self.two(x)

    model = Both().eval()
    fast = tilewise.optimize(model)
    agree(model, fast)
    Another.scale = 5.0
    agree(model, fast)


def test_the_class_of_a_tensor() -> None:
    def name_of(self: Any) -> str:
        return type(self).__name__

    def forward(self: Any, x: Any) -> Any:
        return self.a(x) * (2 if name_of(x) == "Tensor" else 3)

    agree(*pair(forward))


def same_again(given: Any, factor: Any) -> Any:
    return type(given)(factor) * given.__class__(1)


def test_the_class_of_an_argument() -> None:
    model, fast = pair(lambda self, x: self.a(x) * same_again(self.scale, 3))
    agree(model, fast)
    assert is_whole(fast)


def by_type(given: Any) -> bool:
    return type(given) is torch.Tensor


def by_its_class(given: Any) -> bool:
    return given.__class__.__name__ == "Tensor"


@pytest.mark.parametrize("question", [by_type, by_its_class])
def test_the_class_of_an_argument_that_is_a_tensor(question: Any) -> None:
    model, fast = pair(lambda self, x: self.a(x) * (2 if question(x) else 3))
    agree(model, fast)
    assert not is_whole(fast)


class Act:
    pass


class OtherAct:
    pass


def test_an_object_that_gets_another_class() -> None:
    def is_act(given: Any) -> bool:
        return type(given) is Act

    model, fast = pair(lambda self, x: self.a(x) * (2 if is_act(self.act) else 3))
    model.act = fast.act = act = Act()
    agree(model, fast)
    act.__class__ = OtherAct  # type: ignore[assignment]
    agree(model, fast)


class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """Results as a library of models has them: by names, by numbers, as attributes."""

    def __post_init__(self) -> None:
        found = [getattr(self, field.name) for field in dataclasses.fields(self)]  # type: ignore
        if all(one is None for one in found[1:]) and not isinstance(found[0], torch.Tensor):
            try:
                iter(found[0])
            except TypeError:
                setattr(self, dataclasses.fields(self)[0].name, None)  # type: ignore
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


@dataclasses.dataclass
class Both(Output):
    image: Any = None
    mean: Any = None


register_pytree_node(Both, lambda one: (list(one.values()), list(one)),
                     lambda values, names: Both(**dict(zip(names, values))))


def test_results_of_a_class_of_their_own() -> None:
    class Part(Base):
        def forward(self, x: torch.Tensor, plain: bool | None = None) -> Any:
            y = self.a(x)
            found = Both(y, None if plain is True else y.mean())
            return type(found)(**{name: one for name, one in found.items() if name == "image"})

    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, x: torch.Tensor) -> Any:
            return Both(self.part(x)["image"] * 2, self.part(x).image.mean())

    model = Model().eval()
    fast = tilewise.optimize(model)
    for image in (X, OTHER, X):
        with torch.inference_mode():
            theirs, ours = model(image), fast(image)
        assert type(ours) is Both
        assert list(ours) == ["image", "mean"]
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-4)
    assert is_whole(fast)


# comparisons


def test_options_are_compared_beside_what_is_not_known() -> None:
    """The result of a part that is called as it is might be a truth."""
    class Part(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x * 2 if float(x.sum()) > -1e9 else False

    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, x: torch.Tensor, plain: Any = None) -> Any:
            y = self.part(x)
            if plain is True:
                return y
            return self.a(y)

    model = Model().eval()
    fast = tilewise.optimize(model)
    agree(model, fast)
    assert fast.forward.captures

    class Asking(Model):
        def forward(self, x: torch.Tensor, plain: Any = None) -> Any:
            y = self.part(x)
            if y is False:
                return x
            return self.a(y)

    model = Asking().eval()
    fast = tilewise.optimize(model)
    agree(model, fast)
    assert not fast.forward.captures


# sizes that are as wanted


class Checking(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, channels, height, _ = x.shape
        if channels != self.a.in_channels:
            raise ValueError(f"{channels} channels")
        y = self.a(x)
        return y * 2 if height == 16 else y * 3


def graphs(fast: Any) -> list[Any]:
    return [one for same in fast.forward.captures.values() for one in same]


def test_sizes_that_are_compared_with_numbers() -> None:
    model = Checking().eval()
    fast = tilewise.optimize(model)
    agree(model, fast, (X,))
    (graph,) = graphs(fast)
    assert graph.forms is None  # and this one is for all images of 16 rows
    wide, four = torch.randn(1, 3, 16, 40), torch.randn(1, 4, 16, 16)
    agree(model, fast, (wide, X, OTHER, OTHER, OTHER, four, X, four, OTHER, wide))
    model.a.in_channels = fast.a.in_channels = 4
    agree(model, fast, (X, OTHER, X))


@pytest.mark.parametrize("asked", [
    lambda x: x.shape[1] == 3, lambda x: x.size(-3) == 3, lambda x: x.size()[1] == 3,
    lambda x: x.size(1) == 3, lambda x: (x.shape[1], x.shape[2]) == (3, 16),
    lambda x: x.shape[1] == 3 and x.shape[2] != 16])
def test_ways_to_ask_for_a_size(asked: Any) -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.a(x) * (2 if asked(x) else 3)

    model, fast = pair(forward)
    agree(model, fast, (X,))
    assert [graph.forms for graph in graphs(fast)] == [None]
    agree(model, fast, (X, OTHER, X, OTHER, OTHER, OTHER, X))


@pytest.mark.parametrize("asked", [
    lambda x: math.ceil(x.shape[2] / 5), lambda x: round(x.shape[2] / 5),
    lambda x: round(x.shape[2] / 7, 1), lambda x: float(x.size(3)) / 4,
    lambda x: math.floor(x.shape[2] * 0.3)])
def test_numbers_of_sizes(asked: Any) -> None:
    """A graph for one size has them, where the same size comes again."""
    model, fast = pair(lambda self, x: self.a(x) * asked(x))
    agree(model, fast, (X, X, X, OTHER, OTHER, OTHER, X))
    assert is_whole(fast)


def test_axes_counted_from_the_end() -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.a(x) * (2 if x.shape[-2] == 16 else 3)

    agree(*pair(forward), (X, X, torch.randn(3, 12, 16), X, torch.randn(3, 16, 12)))


def test_axes_that_are_exchanged_where_they_are() -> None:
    def forward(self: Any, x: Any) -> Any:
        x.transpose_(1, 3)
        y = self.a(x.transpose(1, 3))
        return y * 2 if x.shape[1] == 3 else y * 3

    model, fast = pair(forward)
    with torch.inference_mode():
        for _ in range(4):
            torch.testing.assert_close(fast(X.clone()), model(X.clone()), rtol=1e-4, atol=1e-4)


def test_a_size_that_changes_where_it_is() -> None:
    def forward(self: Any, x: Any) -> Any:
        y = self.a(x)
        x.unsqueeze_(0)
        return y * (2 if x.shape[1] == 3 else 3)

    model, fast = pair(forward)
    with torch.inference_mode():
        for _ in range(4):
            torch.testing.assert_close(fast(X.clone()), model(X.clone()), rtol=1e-4, atol=1e-4)


def test_parts_that_are_alike_are_left_out_together() -> None:
    class Part(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x)[:, :3] * (2 if x.shape[2] > 14 else 3)

    model = nn.Sequential(*[Part() for _ in range(20)], nn.Conv2d(3, 8, 3)).eval()
    fast = tilewise.optimize(model)
    agree(model, fast, (X,))
    assert len(graphs(fast)) == 1
    agree(model, fast, (X, X, X))
    assert is_whole(fast) or any(not graph.opaque for graph in graphs(fast))

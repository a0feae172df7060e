"""Python that asks what a result is: a tensor or several, and whether an answer is one of torch's.

A stand-in that answers wrongly takes the other branch: results would differ.
"""

from __future__ import annotations

import collections.abc
import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import tilewise
from tilewise.model.kinds import kind_of


class Gives(nn.Module):
    """A part that is called as it is."""

    def forward(self, y: Any) -> Any:
        self.last = y
        return {"y": y, "none": None, "true": True}


class Net(nn.Module):
    def __init__(self, question: Callable[[Any, Any], bool]) -> None:
        super().__init__()
        self.a, self.question = nn.Conv2d(3, 8, 3, padding=1), question
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.pairs, self.pool = nn.MaxPool2d(2, return_indices=True), nn.MaxPool2d(2)
        self.same, self.gives = nn.Identity(), Gives()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, enable_nested_tensor=False)
        self.flag, self.two = True, nn.ParameterList([nn.Parameter(torch.ones(1))] * 2)

    def forward(self, x: Any) -> Any:
        y = self.a(x)
        return y * 2 if self.question(self, y) else y * 3


def rows(y: Any) -> Any:
    return y.flatten(2).transpose(1, 2)


def is_single(kind: Any) -> bool:
    return kind is torch.float32


def is_true(answer: Any) -> bool:
    return answer is True


def of_unknown_type(y: Any) -> Any:
    return y * torch.ones(1, dtype=torch.int64)


def state_of(self: Any, y: Any) -> Any:
    _, state = self.lstm(rows(y))
    return state


def without_weights(self: Any, y: Any) -> bool:
    _, weights = self.attention(*[rows(y)] * 3, need_weights=False)
    return weights is None


def of_another_part(self: Any, y: Any) -> bool:
    found = self.gives(y)
    none = found["none"]
    return none is None


def chosen_on_the_right(self: Any, y: Any) -> bool:
    kind = of_unknown_type(y).dtype
    return bool(kind is (torch.float32 if self.flag else nn.ReLU))


@functools.singledispatch
def kind_by_dispatch(_: Any) -> bool:
    return False


@kind_by_dispatch.register
def _(_: Tensor) -> bool:
    return True


# each with whether it is answered, not left to PyTorch
QUESTIONS: dict[str, tuple[Callable[[Any, Any], bool], bool]] = {
    "a recurrent net": (lambda s, y: isinstance(s.lstm(rows(y)), tuple), False),
    "its state": (lambda s, y: isinstance(state_of(s, y), tuple), False),
    "attention": (lambda s, y: isinstance(s.attention(*[rows(y)] * 3), tuple), False),
    "a pool with indices": (lambda s, y: isinstance(s.pairs(y), tuple), False),
    "a pool": (lambda s, y: isinstance(s.pool(y), tuple), True),
    "nothing, of two": (lambda s, y: isinstance(s.same((y, y)), tuple), False),
    "nothing": (lambda s, y: isinstance(s.same(y), Tensor), True),
    "pieces": (lambda s, y: isinstance(y.tensor_split(2), tuple), True),
    "pieces by a function": (lambda s, y: isinstance(torch.split(y, 4, 1), Tensor), True),
    "a piece": (lambda s, y: isinstance(y.unbind(1)[0], Tensor), True),
    "the largest": (lambda s, y: isinstance(y.max(1), tuple), False),
    "both ends": (lambda s, y: isinstance(torch.aminmax(y), tuple), False),
    "largest with places": (lambda s, y: isinstance(
        F.max_pool2d(y, 2, return_indices=True), tuple), False),
    "largest in windows": (lambda s, y: isinstance(F.max_pool2d(y, 2), Tensor), True),
    "where": (lambda s, y: isinstance(torch.where(y > 0, y, 0.0), Tensor), True),
    "places": (lambda s, y: isinstance(torch.where(y > 0), tuple), False),
    "arithmetic": (lambda s, y: all(isinstance(z, Tensor) for z in (
        y + 1, 1 - y, torch.add(y, 1), torch.cat([y, y]), y == 0, y.sum(), y.float(), -y)), True),
    "resized": (lambda s, y: isinstance(F.interpolate(y, scale_factor=2), Tensor), True),
    "sizes": (lambda s, y: isinstance(y.shape, tuple) and isinstance(y.size(1), int), True),
    "an attribute of several": (lambda s, y: hasattr(s.lstm(rows(y)), "shape"), False),
    "an attribute with another": (lambda s, y: getattr(y.max(1), "foo", None) is None, False),
    "the type of a sum": (lambda s, y: torch.result_type(y, 1) is torch.float32, False),
    "a type in a helper": (lambda s, y: is_single(of_unknown_type(y).dtype), False),
    "a type by a function": (lambda s, y: operator.is_(
        of_unknown_type(y).dtype, torch.float32), False),
    "another type by a function": (lambda s, y: all(map(
        operator.is_, [of_unknown_type(y).dtype], [torch.float32])), False),
    "a type on either side": (chosen_on_the_right, False),
    "a type of a parameter": (lambda s, y: next(s.parameters()).dtype is torch.float32, True),
    "a parameter's gradient": (lambda s, y: all(p.grad is None for p in s.parameters()), False),
    "weights that are not given": (without_weights, False),
    "nothing of another part": (of_another_part, False),
    "a truth of another part": (lambda s, y: is_true(s.gives(y)["true"]), False),
    "an encoder": (lambda s, y: isinstance(s.encoder(rows(y)), tuple), True),
    "the first of a recurrent net": (lambda s, y: isinstance(s.lstm(rows(y))[0], Tensor), True),
    "the first of the largest": (lambda s, y: isinstance(y.max(1)[0], Tensor), True),
    "places of one": (lambda s, y: isinstance((y > 0).nonzero(as_tuple=True), tuple), False),
    "at least": (lambda s, y: isinstance(torch.atleast_1d(y, y), tuple), False),
    "all sizes": (lambda s, y: isinstance(y.size(None), tuple), True),
    "equal to a text": (lambda s, y: isinstance(y == "text", bool), False),
    "a parameter as it was": (lambda s, y: isinstance(s.a.bias.float(), nn.Parameter), False),
    "two that are one": (lambda s, y: s.two[0] is s.two[1], False),
    "one that is not copied": (lambda s, y: y is y.contiguous(), False),
    "an abstract class of a number": (lambda s, y: isinstance(
        y.shape[-1], collections.abc.Iterable), False),
    "keys": (lambda s, y: hasattr(y, "keys"), False),
    "by dispatch": (lambda s, y: kind_by_dispatch(y), True),
    "a number of axes as a truth": (lambda s, y: is_true(y.dim() == 4), True),
    "a number of images as a truth": (lambda s, y: is_true(y.size(0) == 1), False),
    "equal as a truth": (lambda s, y: is_true(torch.equal(y, y)), False),
    "a setting beside an unknown type": (lambda s, y: of_unknown_type(y).to(
        of_unknown_type(y).dtype) is not None and s.flag is True, True),
    "a truth": (lambda s, y: y.is_floating_point() is True, True),
    "a truth in a helper": (lambda s, y: is_true(torch.is_floating_point(y)), False),
    "a leaf": (lambda s, y: y.is_leaf is True, False),
    "a layout": (lambda s, y: y.layout is torch.strided, False),
    "a parameter": (lambda s, y: s.a.weight is s.a.weight, False),
    "an address": (lambda s, y: id(s.a.weight) == id(s.a.weight), False),
    "a parameter or nothing": (lambda s, y: s.a.bias is not None, True)}
# under autocast types follow from more than the inputs
LEFT = {"a truth"}


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_are_answered_or_left(name: str, casts: bool) -> None:
    question, is_answered = QUESTIONS[name]
    torch.manual_seed(0)
    net = Net(question).eval()
    model: Any = tilewise.optimize(net)
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad(), torch.autocast("cpu", enabled=casts):
        for _ in range(3):
            torch.testing.assert_close(model(x).float(), net(x).float(), rtol=3e-2, atol=3e-2)
    found = any(model.__dict__["forward"].captures.values())
    assert found == (is_answered and not (casts and name in LEFT))


def test_a_pool_that_gives_indices_later() -> None:
    net = Net(lambda s, y: isinstance(s.pool(y), Tensor)).eval()
    model: Any = tilewise.optimize(net)
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        for gives in (False, False, True, False):
            net.pool.return_indices = model.pool.return_indices = gives
            torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-4)


def test_a_helper_that_compares_classes_is_captured() -> None:
    """An answer that is not known is no class."""
    def is_relu(kind: Any) -> bool:
        return kind is nn.ReLU

    model: Any = tilewise.optimize(Net(
        lambda s, y: y.to(of_unknown_type(y).dtype) is not None and is_relu(nn.ReLU)).eval())
    with torch.no_grad():
        model(torch.randn(1, 3, 16, 16))
    assert any(model.__dict__["forward"].captures.values())


DECLARED: dict[Any, type | None] = {
    torch.add: Tensor, torch.abs: Tensor, torch.einsum: Tensor, torch.stack: Tensor,
    torch.meshgrid: None, torch.topk: None, torch.svd: None, torch.split: tuple,
    torch.unbind: tuple, torch.std_mean: None, torch.var: Tensor, torch.equal: None,
    torch.allclose: None, torch.numel: None, F.pad: Tensor, F.gelu: Tensor, F.normalize: Tensor,
    F.multi_head_attention_forward: None, F.scaled_dot_product_attention: Tensor,
    torch.ops.aten.add: Tensor, torch.ops.aten.max.dim: None, torch.ops.aten.max.other: Tensor,
    torch.ops.aten.split: None, operator.add: Tensor, operator.matmul: Tensor}


@pytest.mark.parametrize("function", DECLARED, ids=lambda function: function.__name__)
def test_what_functions_declare(function: Any) -> None:
    graph = fx.Graph()
    node = graph.call_function(function, (graph.placeholder("x"), 2))
    assert kind_of(node) is DECLARED[function]


@pytest.mark.parametrize(("method", "options", "kind"), [
    ("size", (), torch.Size), ("size", (0,), int), ("dim", (), int), ("type", (), None),
    ("type", (torch.float64,), Tensor), ("add_", (1,), Tensor), ("item", (), None),
    ("tolist", (), None), ("chunk", (2,), tuple), ("half", (), Tensor), ("stride", (), None)])
def test_what_methods_give(method: str, options: tuple[Any, ...], kind: type | None) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert kind_of(graph.call_method(method, (x, *options))) is kind
    unknown = graph.call_method("max", (x, 1))
    assert kind_of(graph.call_method(method, (unknown, *options))) is None

"""tilewise.conv2d as an operator of torch: gradients, opcheck, fake tensors, torch.compile."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.convolutions import LAST, PLANES, assert_close, draw, leaf, theirs
from torch import Tensor

import tilewise
from tilewise.conv import calls, ops

CONV = torch.ops.tilewise.conv2d.default


# gradients

GRADIENTS: list[dict[str, Any]] = [
    {}, {"padding": 1, "stride": 2}, {"padding": (1, 0, 2, 1)}, {"padding": "same", "dilation": 2},
    {"groups": 2, "padding": 1}, {"padding": 1, "activation": "relu"}, {"residual": True},
    {"residual": True, "activation": "relu", "padding": (0, 1, 1, 0), "groups": 2},
    {"activation": "silu"}, {"activation": "relu", "pool": 2}, {"activation": "tanh", "pool": 2},
]


@pytest.mark.parametrize("options", GRADIENTS, ids=str)
def test_gradients(options: dict[str, Any]) -> None:
    options = dict(options)
    x, weight, bias = leaf(2, 4, 6, 5), leaf(4, 4 // options.get("groups", 1), 3, 3), leaf(4)
    operands = [x, weight, bias]
    if options.pop("residual", False):
        operands.append(leaf(*theirs(x, weight, bias, **options).shape, seed=1))

    def run(*operands: Tensor) -> Tensor:
        residual = operands[3] if len(operands) > 3 else None
        return tilewise.conv2d(*operands[:3], residual=residual, **options)

    assert torch.autograd.gradcheck(run, operands, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, operands, fast_mode=True)


def test_gradients_of_every_element() -> None:
    operands = (leaf(1, 2, 4, 4), leaf(2, 2, 3, 3), leaf(2), leaf(1, 2, 4, 4, seed=1))
    assert torch.autograd.gradcheck(
        lambda x, weight, bias, residual: tilewise.conv2d(
            x, weight, bias, padding=1, residual=residual, activation="relu"), operands)


@pytest.mark.parametrize("layout", [PLANES, LAST])
@pytest.mark.parametrize("options", [{}, {"activation": "relu"}, {"activation": "gelu"},
                                     {"activation": "relu", "pool": 2}], ids=str)
def test_gradients_equal_those_of_torch(options: dict[str, Any],
                                        layout: torch.memory_format) -> None:
    for needed in itertools.product((False, True), repeat=4):
        if not any(needed):
            continue
        grads = []
        for function in (tilewise.conv2d, theirs):
            x, weight, bias, residual = (
                draw(*shape).requires_grad_(wanted) for shape, wanted
                in zip([(2, 8, 9, 9), (8, 8, 3, 3), (8,), (2, 8, 9, 9)], needed, strict=True))
            y = function(x.contiguous(memory_format=layout), weight, bias, padding=1,
                         residual=residual, **options)
            y.backward(draw(*y.shape))
            grads.append([x.grad, weight.grad, bias.grad, residual.grad])
        for mine, other, wanted in zip(*grads, needed, strict=True):
            assert (mine is not None) == (other is not None) == wanted
            if mine is not None:
                assert_close(mine, other, 1e-4)


def test_gradients_of_relu_at_nan_and_inf() -> None:
    """A NaN passes its gradient on, an infinite gradient of a zero stays zero, as in torch."""
    x, weight = torch.tensor([1.0, -1.0, math.nan, 2.0]).view(1, 1, 1, 4), torch.ones(1, 1, 1, 1)
    grad = torch.tensor([math.inf, math.inf, 1.0, math.nan]).view(1, 1, 1, 4)
    found = []
    for function in (tilewise.conv2d, theirs):
        bias = torch.zeros(1, 1, 1, 4, requires_grad=True)
        function(x, weight, residual=bias, activation="relu").backward(grad)
        found.append(bias.grad)
    assert torch.allclose(*found, equal_nan=True)


def test_no_gradient_is_recorded_where_none_is_wanted() -> None:
    x, weight = draw(1, 8, 9, 9), torch.nn.Parameter(draw(8, 8, 3, 3))
    assert tilewise.conv2d(x, weight).requires_grad
    with torch.no_grad():
        assert not tilewise.conv2d(x, weight, activation="silu").requires_grad
    assert not tilewise.conv2d(x, weight.detach()).requires_grad
    with torch.inference_mode():
        assert tilewise.conv2d(x, weight).is_inference()


# torch.library and torch.compile

CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "planes": lambda: (draw(2, 8, 9, 9), draw(8, 8, 3, 3), draw(8), None),
    "channels_last": lambda: (draw(2, 8, 9, 9).to(memory_format=LAST), draw(8, 8, 3, 3), None,
                              None),
    "one_channel": lambda: (draw(2, 1, 9, 9).to(memory_format=LAST), draw(1, 1, 3, 3), None, None),
    "requires_grad": lambda: (*(draw(*s).requires_grad_() for s in ((2, 8, 9, 9), (8, 8, 3, 3),
                                                                   (8,), (2, 8, 9, 9))),),
    "double": lambda: (leaf(1, 4, 5, 5), leaf(4, 4, 3, 3), None, None),
}


@pytest.fixture
def operator_arguments(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, ...]]:
    """What tilewise.conv2d hands to the operator."""
    def arguments(*args: Any, **options: Any) -> tuple[Any, ...]:
        seen: list[tuple[Any, ...]] = []
        for module in (calls, ops):
            monkeypatch.setattr(module, "is_unwatched", lambda *tensors: False)
        monkeypatch.setattr(ops, "CONV2D", lambda *given: seen.append(given) or CONV(*given))
        tilewise.conv2d(*args, **options)
        return seen[0]

    return arguments


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("activation, padding", [(None, 1), ("relu", (1, 1, 2, 0))])
def test_opcheck(name: str, activation: str | None, padding: Any,
                 operator_arguments: Callable[..., tuple[Any, ...]]) -> None:
    x, weight, bias, residual = CALLS[name]()
    torch.library.opcheck(CONV, operator_arguments(
        x, weight, bias, 1, padding, residual=residual, activation=activation))


@pytest.mark.parametrize("layout", [PLANES, LAST])
@pytest.mark.parametrize("algorithm", ["cpu_direct", "cpu_pixels", "vendor", "reference"])
def test_opcheck_of_algorithms(algorithm: str, layout: torch.memory_format,
                               operator_arguments: Callable[..., tuple[Any, ...]]) -> None:
    x = draw(1, 3, 8, 8).contiguous(memory_format=layout)
    for k, pool in ((1, 1), (4, 1), (4, 2)):
        arguments = operator_arguments(x, draw(k, 3, 3, 3), padding=1, pool=pool,
                                       algorithm=algorithm)
        torch.library.opcheck(CONV, arguments, test_utils=("test_schema", "test_faketensor"))


def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = tilewise.conv2d(x * 2, weight, bias, padding="same", activation="relu")
    return tilewise.conv2d(y, weight, None, 1, (1, 1, 2, 0), residual=y).sin()


def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = theirs(x * 2, weight, bias, padding=1, activation="relu")
    return theirs(y, weight, None, 1, (1, 1, 2, 0), residual=y).sin()


INDUCTOR = pytest.param("inductor", LAST, marks=[
    pytest.mark.slow, pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")])


@pytest.mark.parametrize("backend, layout", [("eager", PLANES), ("eager", LAST),
                                             ("aot_eager", PLANES), ("aot_eager", LAST), INDUCTOR])
def test_compile(backend: str, layout: torch.memory_format) -> None:
    torch.compiler.reset()
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    x = draw(2, 8, 10, 10).contiguous(memory_format=layout)
    operands = (x, 0.1 * draw(8, 8, 3, 3), draw(8))
    assert_close(compiled(*operands), eager(*operands))
    assert compiled(*operands).stride() == eager(*operands).stride()
    found = []
    for function in (compiled, eager):
        leaves = [operand.clone().requires_grad_() for operand in operands]
        function(*leaves).sum().backward()
        found.append([value.grad for value in leaves])
    for mine, other in zip(*found, strict=True):
        assert_close(mine, other, 1e-4)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_with_a_dynamic_batch(backend: str) -> None:
    torch.compiler.reset()
    graphs = []

    def count(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return torch._dynamo.lookup_backend(backend)(module, inputs)

    compiled = torch.compile(block, backend=count, fullgraph=True, dynamic=True)
    weight, bias = 0.1 * draw(8, 8, 3, 3), draw(8)
    for n in (2, 3, 7):
        x = draw(n, 8, 10, 10)
        assert_close(compiled(x, weight, bias), eager(x, weight, bias))
    assert len(graphs) == 1


def test_meta_tensors_have_shape_and_strides() -> None:
    x, weight = draw(2, 3, 9, 9).to(memory_format=LAST), draw(4, 3, 3, 3)
    y = tilewise.conv2d(x.to("meta"), weight.to("meta"), stride=2, padding=1, pool=2)
    assert y.is_meta
    assert y.shape == (2, 4, 2, 2)
    assert y.stride() == tilewise.conv2d(x, weight, stride=2, padding=1, pool=2).stride()

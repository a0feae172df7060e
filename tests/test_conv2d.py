"""tilewise.conv2d as a drop-in for torch's: same answers, layouts, gradients and refusals."""

from __future__ import annotations

import gc
import itertools
import math
import re
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tilewise
from tilewise.algorithms import ALGORITHMS
from tilewise.core import InvalidProblem, NoAlgorithm, TilewiseError, UnknownAlgorithm
from tilewise.core.problem import ACTIVATIONS
from tilewise.frontend import ops
from tilewise.frontend.ops import ENGINE
from tilewise.runtime.weights import MADE

LAST = torch.channels_last
PLANES = torch.contiguous_format
BY_NAME = {algorithm.name: algorithm for algorithm in ALGORITHMS}
CONV = torch.ops.tilewise.conv2d.default


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=rng).to(dtype)


def theirs(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
           padding: Any = 0, dilation: Any = 1, groups: int = 1, *, activation: str | None = None,
           residual: Tensor | None = None, pool: int = 1) -> Tensor:
    """What torch makes of the arguments of tilewise.conv2d."""
    if isinstance(padding, tuple) and len(padding) == 4:
        top, bottom, left, right = padding
        x, padding = F.pad(x, (left, right, top, bottom)), 0
    y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    y = y if residual is None else y + residual
    y = y if activation is None else getattr(F, activation)(y)
    return y if pool == 1 else F.max_pool2d(y, pool)


def assert_close(y: Tensor, expected: Tensor, bound: float = 1e-5) -> None:
    """Root mean square of the difference, beside that of the answer."""
    assert y.shape == expected.shape
    assert y.dtype == expected.dtype
    y, expected = y.detach().double(), expected.detach().double()
    error, scale = float((y - expected).norm()), float(expected.norm())
    apart = (y - expected).abs().flatten()
    # whether a few values are far off or all a little tells a wrong address from a wrong rounding
    assert error <= bound * scale, (
        f"{error:.2e} > {bound:.0e} * {scale:.2e}; {int((apart > bound).sum())} of {len(apart)} "
        f"values differ by more than {bound:.0e}, the most {float(apart.max()):.2e}")


def assert_same(x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any,
                **options: Any) -> None:
    """Numbers and strides as torch's."""
    algorithm = options.pop("algorithm", None)
    y = tilewise.conv2d(x, weight, bias, *args, algorithm=algorithm, **options)
    expected = theirs(x, weight, bias, *args, **options)
    assert_close(y, expected)
    if x.dim() == 4 and len(x) and "activation" not in options:
        assert y.stride() == expected.stride()


def test_the_comparison_can_fail() -> None:
    y = draw(1, 2, 3, 3)
    with pytest.raises(AssertionError):
        assert_close(y + 1e-4 * y, y)
    with pytest.raises(AssertionError):
        assert_close(y[..., 1:], y[..., 1:, :])


# arguments


@pytest.mark.parametrize("padding", ["same", "valid", 0, 2, (1, 3), [2], (0, 1, 2, 3), (3, 0) * 2])
@pytest.mark.parametrize("dilation", [1, (2, 1), [3, 2]])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_padding(padding: Any, dilation: Any) -> None:
    assert_same(draw(2, 5, 17, 15), draw(7, 5, 3, 4), draw(7), 1, padding, dilation)


@pytest.mark.parametrize("stride", [1, 2, (2,), (1, 3), [3, 2], torch.Size([2, 1]), np.int64(2)])
def test_stride(stride: Any) -> None:
    assert_same(draw(2, 5, 17, 15), draw(7, 5, 3, 3), None, stride, 1)


@pytest.mark.parametrize("groups, c, k", [(1, 1, 1), (2, 6, 4), (3, 3, 9), (8, 8, 8), (8, 8, 24)])
@pytest.mark.parametrize("layout", [PLANES, LAST])
def test_groups(groups: int, c: int, k: int, layout: torch.memory_format) -> None:
    x = draw(2, c, 11, 13).contiguous(memory_format=layout)
    assert_same(x, draw(k, c // groups, 3, 3), draw(k), padding=1, groups=groups)


def test_arguments_by_position_are_those_of_torch() -> None:
    x, weight, bias = draw(2, 4, 12, 12), draw(6, 2, 3, 3), draw(6)
    assert_same(x, weight, bias, 2, 1, 2, 2)
    assert_same(x, weight, bias, (2, 1), (1, 0), (1, 2), 2)


def test_an_image_without_a_batch() -> None:
    x, weight, residual = draw(5, 9, 9), draw(7, 5, 3, 3), draw(7, 9, 9)
    assert_same(x, weight, None, padding=1)
    assert_same(x, weight, draw(7), padding=1, residual=residual, activation="relu", pool=2)


@pytest.mark.parametrize("layout", [PLANES, LAST])
@pytest.mark.parametrize("algorithm", [None, *tilewise.algorithms()])
def test_an_empty_batch(layout: torch.memory_format, algorithm: str | None) -> None:
    size, groups = (1, 1) if algorithm == "cpu_pointwise" else (3, 1)
    groups = 8 if algorithm == "cpu_depthwise" else groups
    x = torch.empty(0, 8, 9, 9).contiguous(memory_format=layout)
    y = tilewise.conv2d(x, draw(8, 8 // groups, size, size), draw(8), groups=groups,
                        algorithm=algorithm)
    assert y.shape == (0, 8, 10 - size, 10 - size)


# layouts


def sliced(x: Tensor) -> Tensor:
    return torch.cat([x, x], 3)[..., :x.shape[3]]


def sliced_last(x: Tensor) -> Tensor:
    return torch.cat([x, x], 3).contiguous(memory_format=LAST)[..., :x.shape[3]]


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "planes": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=LAST),
    "to_channels_last": lambda x: x.to(memory_format=LAST),
    "sliced": sliced,
    "sliced_channels_last": sliced_last,
    "every_other_channel": lambda x: torch.stack([x, x], 2).flatten(1, 2)[:, ::2],
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "expanded": lambda x: x[:1].expand(x.shape),
    "one_channel_expanded": lambda x: x[:, :1].expand(x.shape),
    "flipped_strides": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
}
# input channels, filters, image, filter: sizes of one leave the layout open to interpretation
SHAPES = [(16, 32, 12, 3), (1, 8, 12, 3), (8, 1, 12, 3), (1, 1, 12, 3), (8, 8, 12, 1),
          (8, 1, 12, 1), (1, 8, 12, 1), (8, 8, 1, 1), (8, 8, 3, 3), (1, 1, 3, 3), (8, 1, 3, 3)]


@pytest.mark.parametrize("view", VIEWS)
def test_any_strides_of_the_input(view: str) -> None:
    for (c, k, h, r), n in itertools.product(SHAPES, (1, 2)):
        x, weight = VIEWS[view](draw(n, c, h, h)), draw(k, c, r, r)
        assert_same(x, weight, draw(k))
        assert_same(x, weight.to(memory_format=LAST))


@pytest.mark.parametrize("view", VIEWS)
def test_any_strides_of_the_weight(view: str) -> None:
    for c, k, h, r in SHAPES:
        x, weight = draw(2, c, h, h), VIEWS[view](draw(k, c, r, r))
        assert_same(x, weight, draw(k))
        assert_same(x.to(memory_format=LAST), weight)


def algorithms_for(*call: Any, **options: Any) -> list[str]:
    """Names of those that accept a call."""
    found = []
    for name in tilewise.algorithms():
        try:
            tilewise.conv2d(*call, **options, algorithm=name)
            found.append(name)
        except NoAlgorithm:
            continue
    return found


@pytest.mark.parametrize("c, k, h, r", SHAPES)
@pytest.mark.parametrize("layout", [PLANES, LAST])
def test_the_layout_of_every_algorithm(c: int, k: int, h: int, r: int,
                                       layout: torch.memory_format) -> None:
    x, weight = draw(2, c, h, h).contiguous(memory_format=layout), draw(k, c, r, r)
    names = algorithms_for(x, weight)
    assert {"cpu_direct", "vendor", "reference"} <= set(names)
    for name in names:
        assert_same(x, weight, algorithm=name)
        assert_same(x, weight, algorithm=name, pool=1 if h - r < 1 else 2)


@pytest.mark.parametrize("algorithm", [None, *tilewise.algorithms()])
def test_strides_of_bias_and_residual(algorithm: str | None) -> None:
    size = 1 if algorithm == "cpu_pointwise" else 3
    groups = 8 if algorithm == "cpu_depthwise" else 1
    x, weight = draw(2, 8, 9, 12), draw(8, 8 // groups, size, size)
    bias = draw(16)[::2]
    residual = draw(2, 8, 13 - size, 10 - size).transpose(2, 3)
    for layout in (PLANES, LAST):
        assert_same(x.contiguous(memory_format=layout), weight, bias, groups=groups,
                    residual=residual, algorithm=algorithm)
    assert_same(x, weight, draw(1).expand(8), groups=groups, algorithm=algorithm)


def test_inputs_are_left_alone() -> None:
    operands = [draw(2, 8, 9, 9), draw(8, 8, 3, 3), draw(8), draw(2, 8, 9, 9)]
    before = [operand.clone() for operand in operands]
    x, weight, bias, residual = operands
    for name in algorithms_for(x, weight):
        tilewise.conv2d(x, weight, bias, padding=1, residual=residual, activation="relu",
                        algorithm=name)
    assert all(map(torch.equal, operands, before))


# types and values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [PLANES, LAST])
def test_other_types_go_to_torch(dtype: torch.dtype, layout: torch.memory_format) -> None:
    x = draw(2, 8, 9, 9, dtype=dtype).contiguous(memory_format=layout)
    weight, bias = draw(8, 8, 3, 3, dtype=dtype), draw(8, dtype=dtype)
    y = tilewise.conv2d(x, weight, bias, padding=1)
    expected = F.conv2d(x, weight.contiguous(memory_format=layout), bias, padding=1)
    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()
    assert torch.equal(tilewise.conv2d(x, weight, bias, padding=1, residual=x, activation="relu"),
                       F.relu(expected + x))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", [PLANES, LAST])
def test_activations(activation: str, layout: torch.memory_format) -> None:
    x, weight = draw(2, 8, 12, 12).contiguous(memory_format=layout), draw(8, 8, 3, 3)
    assert_same(x, weight, draw(8), padding=1, activation=activation)
    assert_same(x, weight, draw(8), padding=1, activation=activation, residual=x, pool=3)


@pytest.mark.parametrize("name", tilewise.algorithms())
@pytest.mark.parametrize("layout", [PLANES, LAST])
def test_every_algorithm_by_name(name: str, layout: torch.memory_format) -> None:
    size = 1 if name == "cpu_pointwise" else 3
    groups = 24 if name == "cpu_depthwise" else 1
    x = draw(2, 24, 14, 14).contiguous(memory_format=layout)
    weight, bias = draw(24, 24 // groups, size, size), draw(24)
    for options in ({}, {"activation": "relu"}, {"residual": x}, {"pool": 2},
                    {"activation": "relu", "residual": x, "pool": 2}):
        assert_same(x, weight, bias, padding=size // 2, groups=groups, algorithm=name, **options)
        assert_same(x, weight, padding=size // 2, groups=groups, algorithm=name, **options)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [None, *tilewise.algorithms()])
def test_nan_and_inf_propagate(name: str | None, value: float) -> None:
    size = 1 if name == "cpu_pointwise" else 3
    groups = 8 if name == "cpu_depthwise" else 1
    x, weight = draw(2, 8, 24, 24), draw(8, 8 // groups, size, size)
    x[0, 3, 5, 7] = x[1, 0, 0, 0] = x[1, 7, 23, 23] = value
    for activation in (None, "relu"):
        y = tilewise.conv2d(x, weight, padding=size // 2, groups=groups, activation=activation,
                            algorithm=name)
        expected = theirs(x, weight, padding=size // 2, groups=groups, activation=activation)
        assert not y[~expected.isfinite() & ~expected.isnan()].isfinite().any()
        assert y[expected.isnan()].isnan().all()
        assert y[0, :, 16:, 16:].isfinite().all()
        if name is not None and BY_NAME[name].exact_on_integers:
            assert torch.allclose(y, expected, atol=1e-4, equal_nan=True)


def test_relu_of_a_nan_from_every_operand() -> None:
    x, weight, bias = draw(1, 8, 9, 9), draw(8, 8, 3, 3), draw(8)
    residual = draw(1, 8, 9, 9)
    bias[2] = residual[0, 5, 4, 4] = math.nan
    for name in algorithms_for(x, weight):
        y = tilewise.conv2d(x, weight, bias, padding=1, residual=residual, activation="relu",
                            algorithm=name)
        assert y[0, 2].isnan().all(), name
        assert y[0, 5].isnan().sum() == 1, name
        assert y.isnan().sum() == 82, name


# refusals: what was found, and what was needed


def refusals() -> list[tuple[str, Callable[[], object], type[Exception], str]]:
    x, weight = draw(1, 8, 9, 9), draw(4, 8, 3, 3)

    def call(*args: Any, **options: Any) -> Callable[[], object]:
        return lambda: tilewise.conv2d(*args, **options)

    wrong, unknown = InvalidProblem, UnknownAlgorithm
    return [
        ("channels", call(x, draw(4, 5, 3, 3)), wrong,
         "input has 8 channels, needs 5 for a weight of shape (4, 5, 3, 3) and groups=1"),
        ("groups", call(x, weight, groups=2), wrong, "input has 8 channels, needs 16"),
        ("uneven groups", call(draw(1, 9, 9, 9), draw(4, 3, 3, 3), groups=3), wrong,
         "groups is 3, needs a divisor of the input channels (9) and of the output channels (4)"),
        ("types", call(x, weight.double()), wrong,
         "operands are torch.float32, torch.float64, need one dtype"),
        ("type of the bias", call(x, weight, draw(4).double()), wrong, "need one dtype"),
        ("type of the residual", call(x, weight, residual=draw(1, 4, 7, 7).half()), wrong,
         "operands are torch.float16, torch.float32, need one dtype"),
        ("shape of the bias", call(x, weight, draw(5)), wrong, "bias has shape (5,), needs (4,)"),
        ("dimensions of the bias", call(x, weight, draw(4, 1)), wrong,
         "bias has shape (4, 1), needs (4,)"),
        ("residual", call(x, weight, residual=draw(1, 4, 9, 9)), wrong,
         "residual has shape (1, 4, 9, 9), needs (1, 4, 7, 7)"),
        ("input", call(draw(9, 9), weight), wrong,
         "input has shape (9, 9), needs (N, C, H, W) or (C, H, W)"),
        ("weight", call(x, draw(8, 3, 3)), wrong,
         "weight has shape (8, 3, 3), needs (K, C/groups, R, S)"),
        ("algorithm", call(x, weight, algorithm="fastest"), unknown,
         "algorithm is 'fastest', needs one of cpu_depthwise, cpu_pointwise, "),
        ("activation", call(x, weight, activation="swish"), wrong,
         f"activation is 'swish', needs None or one of {', '.join(ACTIVATIONS)}"),
        ("pool", call(x, weight, pool=0), wrong, "pool is 0, needs 1"),
        ("pool that is too large", call(x, weight, pool=8), wrong, "found 7x7"),
        ("stride", call(x, weight, stride=(1, 2, 3)), wrong,
         "stride is (1, 2, 3), needs one or two numbers"),
        ("stride of nothing", call(x, weight, stride=0), wrong,
         "stride is (0, 0), needs at least 1 everywhere"),
        ("padding", call(x, weight, padding=(0, -1)), wrong,
         "padding is (0, 0, -1, -1), needs at least 0 everywhere"),
        ("name of a padding", call(x, weight, padding="full"), wrong,
         "padding is 'full', needs 'same', 'valid' or numbers"),
        ("same with a stride", call(x, weight, None, 2, "same"), wrong,
         "padding is 'same' with stride [2, 2], needs stride 1"),
        ("filter", call(x, draw(4, 8, 11, 3)), wrong,
         "the dilated filter (11x3) does not fit into the padded input (9x9)"),
        ("refused by name", call(x, weight, algorithm="cpu_pointwise"), NoAlgorithm,
         "cpu_pointwise: filter is 3x3, needs 1x1"),
    ]


@pytest.mark.parametrize("run, error, message", [pytest.param(*case[1:], id=case[0])
                                                 for case in refusals()])
def test_refusals_say_what_was_found_and_needed(run: Callable[[], object],
                                                error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        run()
    assert isinstance(caught.value, TilewiseError)
    with pytest.raises(error, match=re.escape(message)):  # nothing is remembered of a refusal
        run()


# gradients


def leaf(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return draw(*shape, dtype=dtype, seed=seed).requires_grad_()


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
        monkeypatch.setattr(ops, "_OP", lambda *given: seen.append(given) or CONV(*given))
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


# prepared weights


def check_follows(change: Callable[[torch.nn.Parameter], object],
                  layout: torch.memory_format = PLANES) -> None:
    """After a change of the weight, the answer is that of the new one."""
    for algorithm in ("cpu_direct", "vendor", None):
        x, weight = draw(1, 8, 9, 9), draw(8, 8, 3, 3).contiguous(memory_format=layout)
        weight = torch.nn.Parameter(weight)
        first = tilewise.conv2d(x, weight, algorithm=algorithm)
        change(weight)
        y = tilewise.conv2d(x, weight, algorithm=algorithm)
        assert_close(y, F.conv2d(x, weight))
        assert not torch.allclose(first, y)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("layout", [PLANES, LAST])
def test_an_optimizer_step_is_noticed(optimizer: Any, options: dict[str, bool],
                                      layout: torch.memory_format) -> None:
    def step(weight: torch.nn.Parameter) -> None:
        weight.grad = torch.ones_like(weight)
        optimizer([weight], lr=0.1, **options).step()

    def step_of_one_element(weight: torch.nn.Parameter) -> None:
        weight.grad = torch.zeros_like(weight)
        weight.grad[5, 3, 1, 1] = 1
        optimizer([weight], lr=0.1, **options).step()

    check_follows(step, layout)
    check_follows(step_of_one_element, layout)


def test_changes_of_a_weight_are_noticed() -> None:
    other = draw(8, 8, 3, 3, seed=5)

    def assign(weight: torch.nn.Parameter) -> None:
        weight.data = other.clone()

    def in_place(weight: torch.nn.Parameter) -> None:
        with torch.no_grad():
            weight[3].mul_(-2)

    def one_element(weight: torch.nn.Parameter) -> None:
        with torch.no_grad():
            weight[5, 3, 1, 1] += 1

    def in_inference(weight: torch.nn.Parameter) -> None:
        with torch.inference_mode():
            weight.mul_(2)

    def load(weight: torch.nn.Parameter) -> None:
        module = torch.nn.Module()
        module.weight = weight
        module.load_state_dict({"weight": other})

    def through_a_view(weight: torch.nn.Parameter) -> None:
        weight.detach().select(0, 3).neg_()

    for change in (assign, in_place, one_element, in_inference, load, through_a_view):
        check_follows(change)
        check_follows(change, LAST)


@pytest.mark.parametrize("change", [lambda w: w.data.mul_(2),
                                    lambda w: w.detach().numpy().fill(1)], ids=["data", "numpy"])
@pytest.mark.parametrize("layout", [PLANES, LAST])
def test_changes_that_no_version_counter_tells(change: Callable[[Any], object],
                                               layout: torch.memory_format) -> None:
    check_follows(change, layout)


def test_training_equals_training_with_torch() -> None:
    found = []
    for function in (tilewise.conv2d, theirs):
        weight = torch.nn.Parameter(0.2 * draw(8, 8, 3, 3))
        optimizer = torch.optim.SGD([weight], lr=0.01, momentum=0.9, fused=True)
        for i in range(5):
            optimizer.zero_grad()
            y = function(draw(2, 8, 9, 9, seed=i), weight, padding=1, activation="relu")
            y.square().mean().backward()
            optimizer.step()
        found.append(weight.detach())
    assert_close(*found, 1e-4)
    assert not torch.allclose(found[0], 0.2 * draw(8, 8, 3, 3), atol=1e-3)


def test_a_weight_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    direct, prepared = BY_NAME["cpu_direct"], []
    prepare = direct.prepare
    monkeypatch.setattr(direct, "prepare", lambda *args: prepared.append(args) or prepare(*args))
    weight = torch.nn.Parameter(draw(8, 8, 3, 3))
    for seed in range(3):
        tilewise.conv2d(draw(2, 8, 9, 9, seed=seed), weight, algorithm="cpu_direct")
    assert len(prepared) == 1
    with torch.no_grad():
        weight.add_(1)
    for seed in range(3):
        tilewise.conv2d(draw(2, 8, 9, 9, seed=seed), weight, algorithm="cpu_direct")
    assert len(prepared) == 2


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        x, weight = draw(1, 8, 9, 9), draw(8, 8, 3, 3)
        before = len(MADE)
        for _ in range(2):
            assert_close(tilewise.conv2d(x, weight, algorithm="cpu_direct"), F.conv2d(x, weight))
            weight.mul_(2)
        assert len(MADE) == before


def test_a_prepared_weight_goes_with_its_weight() -> None:
    gc.collect()
    before, bytes_before = len(MADE), MADE.total
    weight = draw(64, 64, 3, 3)
    tilewise.conv2d(draw(1, 64, 9, 9), weight, algorithm="cpu_direct")
    tilewise.conv2d(draw(1, 64, 9, 9), weight, algorithm="cpu_pixels")
    assert len(MADE) == before + 2
    assert MADE.total >= bytes_before + 2 * weight.numel() * 4
    del weight
    gc.collect()
    assert (len(MADE), MADE.total) == (before, bytes_before)


def test_a_weight_at_the_address_of_a_dead_one() -> None:
    x, seen = draw(1, 8, 9, 9), set()
    for seed in range(50):
        weight = draw(8, 8, 3, 3, seed=seed)
        seen.add((id(weight), weight.data_ptr()))
        assert_close(tilewise.conv2d(x, weight, algorithm="cpu_direct"), F.conv2d(x, weight))
        del weight
    assert len(seen) < 50  # some did come back


def test_the_largest_error_is_part_of_the_call() -> None:
    """With none admitted, only the baseline is left, whatever was planned before."""
    x, weight = draw(1, 64, 56, 56).to(memory_format=LAST), draw(64, 64, 3, 3)
    y = tilewise.conv2d(x, weight, padding=1)
    assert_same(x, weight, padding=1)
    strict = tilewise.conv2d(x, weight, padding=1, max_error=0.0)
    vendor = tilewise.conv2d(x, weight, padding=1, algorithm="vendor")
    assert torch.equal(strict, vendor)
    assert not torch.equal(y, vendor)


def test_planned_calls_are_remembered() -> None:
    ENGINE.executables.clear()  # a full cache would not grow
    x, weight = draw(3, 8, 23, 29), draw(8, 8, 3, 3)
    tilewise.conv2d(x, weight)
    before = len(ENGINE.executables)
    tilewise.conv2d(draw(3, 8, 23, 29, seed=1), draw(8, 8, 3, 3, seed=1))
    assert len(ENGINE.executables) == before
    tilewise.conv2d(x, weight, padding=1)
    assert len(ENGINE.executables) == before + 1


# what only torch can do is torch's


def test_types_that_no_problem_describes() -> None:
    for dtype in (torch.complex64, torch.complex128):
        x, weight = (draw(1, 2, 5, 5).to(dtype), draw(3, 2, 3, 3).to(dtype))
        assert torch.equal(tilewise.conv2d(x, weight, padding=1), F.conv2d(x, weight, padding=1))


def test_autocast_casts() -> None:
    x, weight = draw(1, 4, 6, 6).bfloat16(), draw(3, 4, 3, 3)
    with torch.autocast("cpu"):
        y = tilewise.conv2d(x, weight, padding=(0, 1, 1, 0), activation="relu", pool=2)
        reference = F.max_pool2d(F.conv2d(F.pad(x, (1, 0, 0, 1)), weight).relu(), 2)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, reference)


def test_forward_derivatives_and_transforms() -> None:
    x, v, weight = draw(1, 4, 6, 6), draw(1, 4, 6, 6, seed=1), draw(3, 4, 3, 3)
    y, tangent = torch.func.jvp(lambda x: tilewise.conv2d(x, weight, activation="relu"), (x,), (v,))
    expected, wanted = torch.func.jvp(lambda x: F.conv2d(x, weight).relu(), (x,), (v,))
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(tangent, wanted)
    assert tangent.abs().sum() > 0
    gradient = torch.func.grad(lambda x: tilewise.conv2d(x, weight).square().sum())(x)
    torch.testing.assert_close(gradient, torch.func.grad(
        lambda x: F.conv2d(x, weight).square().sum())(x))

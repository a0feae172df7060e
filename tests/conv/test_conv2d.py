"""tilewise.conv2d as a drop-in for torch's: same answers, layouts and refusals."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.convolutions import BY_NAME, LAST, PLANES, assert_close, assert_same, draw, theirs
from torch import Tensor
from torch.nn import functional as F

import tilewise
from tilewise.conv.running import ENGINE
from tilewise.core import InvalidProblem, NoAlgorithm, TilewiseError, UnknownAlgorithm
from tilewise.core.activations import ACTIVATIONS

# without those for large weights alone, which have tests of their own
NAMES = [name for name in tilewise.algorithms() if not name.startswith("cpu_few_rows")]


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
@pytest.mark.parametrize("algorithm", [None, *NAMES])
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
    for name in NAMES:
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


@pytest.mark.parametrize("algorithm", [None, *NAMES])
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


@pytest.mark.parametrize("layout", [PLANES, LAST])
def test_other_types_go_to_torch(layout: torch.memory_format) -> None:
    dtype = torch.float64
    x = draw(2, 8, 9, 9, dtype=dtype).contiguous(memory_format=layout)
    weight, bias = draw(8, 8, 3, 3, dtype=dtype), draw(8, dtype=dtype)
    y = tilewise.conv2d(x, weight, bias, padding=1)
    expected = F.conv2d(x, weight.contiguous(memory_format=layout), bias, padding=1)
    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()
    assert torch.equal(tilewise.conv2d(x, weight, bias, padding=1, residual=x, activation="relu"),
                       F.relu(expected + x))


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS.keys() - {"prelu"}))
@pytest.mark.parametrize("layout", [PLANES, LAST])
def test_activations(activation: str, layout: torch.memory_format) -> None:
    x, weight = draw(2, 8, 12, 12).contiguous(memory_format=layout), draw(8, 8, 3, 3)
    assert_same(x, weight, draw(8), padding=1, activation=activation)
    assert_same(x, weight, draw(8), padding=1, activation=activation, residual=x, pool=3)


@pytest.mark.parametrize("name", NAMES)
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
@pytest.mark.parametrize("name", [None, *NAMES])
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
        if name and BY_NAME[name].exact_on_integers and BY_NAME[name].keeps_infinities:
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


# plans


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

"""bfloat16 and float16 tensors: convolutions, linear layers, what stands between them, models."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from support.plans import ran
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise
from tilewise.conv.linear import linear
from tilewise.model.dynamo import rewrite
from tilewise.runtime import pools, resampling, turning
from tilewise.runtime.concatenation import concatenated
from tilewise.runtime.pointwise import pointwise
from tilewise.runtime.types import element_of, is_on_unit

TYPES = [t for t in (torch.bfloat16, torch.float16) if element_of(t)]
pytestmark = [pytest.mark.skipif(not TYPES, reason="torch multiplies both on this machine"),
              pytest.mark.usefixtures("by_our_kernels")]
STORED = {torch.bfloat16: 2.0 ** -8, torch.float16: 2.0 ** -11}  # half a unit in the last place
LAST, PLANES = torch.channels_last, torch.contiguous_format
types = pytest.mark.parametrize("dtype", TYPES)


def draw(*shape: int, dtype: torch.dtype, layout: Any = LAST, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return values.to(dtype).contiguous(memory_format=layout if len(shape) == 4 else PLANES)


def error(found: Tensor, want: Tensor) -> float:
    return float((found.double() - want).norm() / want.norm())


LAYERS = {  # input, weight, options
    "direct": ((2, 3, 33, 31), (40, 3, 7, 7), {"stride": 2, "padding": 3}),
    "winograd": ((1, 48, 20, 22), (64, 48, 3, 3), {"padding": 1}),
    "pointwise": ((2, 64, 14, 14), (80, 64, 1, 1), {}),
    "strided pointwise": ((1, 64, 15, 15), (80, 64, 1, 1), {"stride": 2}),
    "depthwise": ((2, 40, 17, 17), (40, 1, 3, 3), {"padding": 1, "groups": 40}),
    "grouped": ((1, 32, 14, 14), (48, 8, 3, 3), {"padding": 1, "groups": 4}),
    "dilated": ((1, 24, 19, 18), (33, 24, 3, 3), {"padding": 3, "dilation": 3})}


@types
@pytest.mark.parametrize("layout", [LAST, PLANES])
@pytest.mark.parametrize("name", LAYERS)
def test_convolutions_err_by_one_rounding(name: str, layout: Any, dtype: torch.dtype) -> None:
    shape, filters, options = LAYERS[name]
    x, weight = draw(*shape, dtype=dtype, layout=layout), draw(*filters, dtype=dtype, layout=layout)
    weight /= math.sqrt(weight[0].numel())
    bias = draw(filters[0], dtype=dtype)
    plain = F.conv2d(x, weight, bias, **options)
    residual = torch.randn_like(plain)
    y = tilewise.conv2d(x, weight, bias, residual=residual, activation="silu", **options)
    want = F.silu(F.conv2d(x.double(), weight.double(), bias.double(), **options)
                  + residual.double())
    assert y.dtype == dtype
    assert y.stride() == plain.stride()
    assert error(y, want) < STORED[dtype]
    theirs = F.silu(plain + residual)
    assert error(y, want) <= 1.02 * error(theirs, want)


@types
def test_the_kernel_is_ours(dtype: torch.dtype) -> None:
    x, weight = draw(1, 64, 28, 28, dtype=dtype), draw(64, 64, 3, 3, dtype=dtype)
    assert ran(lambda: tilewise.conv2d(x, weight, padding=1))[0].algorithm.startswith("cpu_")
    plan = tilewise.explain(f"n1c64h28w28k64r3s3p1_{element_of(dtype)}_forward").plan
    assert plan.algorithm.startswith("cpu_")
    rounds = plan.algorithm.startswith("cpu_direct_bf16")  # weights, which may have been float32
    assert plan.error < (3.0 if rounds else 1.01) * STORED[dtype]


@types
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38])
def test_what_is_not_finite_goes_where_torch_has_it(value: float, dtype: torch.dtype) -> None:
    x, weight = draw(1, 16, 12, 12, dtype=dtype), draw(16, 16, 3, 3, dtype=dtype)
    x[0, 3, 5, 6] = value
    y, want = tilewise.conv2d(x, weight, padding=1), F.conv2d(x, weight, padding=1)
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y.isposinf(), want.isposinf())
    assert torch.equal(y.isneginf(), want.isneginf())


@types
def test_a_changed_weight_is_noticed(dtype: torch.dtype) -> None:
    x, weight, bias = (draw(1, 8, 9, 9, dtype=dtype), draw(5, 8, 3, 3, dtype=dtype, layout=PLANES),
                       draw(5, dtype=dtype))  # an odd number of biases
    tilewise.conv2d(x, weight, bias)
    for tensor, at in ((weight, -1), (weight, 0), (bias, -1), (bias, 0)):
        tensor.data.view(-1)[at] += 4  # which no counter tells
        want = F.conv2d(x.double(), weight.double(), bias.double())
        assert error(tilewise.conv2d(x, weight, bias), want) < STORED[dtype]


@types
def test_gradients(dtype: torch.dtype) -> None:
    x, weight = draw(2, 16, 10, 10, dtype=dtype), draw(24, 16, 3, 3, dtype=dtype)
    found, want = [], []
    for run, to, into in ((tilewise.conv2d, dtype, found), (F.conv2d, torch.float64, want)):
        a, b = (t.detach().to(to).requires_grad_() for t in (x, weight))
        run(a, b, padding=1).square().sum().backward()
        into += [a.grad, b.grad]
    for ours, exact in zip(found, want, strict=True):
        assert ours.dtype == dtype
        assert error(ours, exact) < 4 * STORED[dtype]


@types
@pytest.mark.parametrize("weight, options", [
    ((24, 16, 3, 3), {"padding": 1}), ((24, 16, 3, 3), {"stride": 2}), ((24, 16, 1, 1), {}),
    ((16, 1, 3, 3), {"padding": 1, "groups": 16})], ids=str)
def test_gradients_of_weights_are_ours_and_rounded_once(
        weight: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype) -> None:
    x, w = draw(4, 16, 28, 28, dtype=dtype), draw(*weight, dtype=dtype)
    grads = {}
    for to in (dtype, torch.float64):
        a, b = x.to(to), w.detach().to(to).requires_grad_()
        y = (tilewise.conv2d if to == dtype else F.conv2d)(a, b, **options)
        given = draw(*y.shape, dtype=dtype).to(to)
        y.backward(given)
        grads[to] = b.grad
    assert error(grads[dtype], grads[torch.float64]) < STORED[dtype]
    y = tilewise.conv2d(x, w.requires_grad_(), **options)
    plans = ran(lambda: y.backward(torch.ones_like(y)))
    assert [p.problem.dtype for p in plans] == [element_of(dtype)]
    assert plans[0].algorithm.startswith("cpu_") != is_on_unit(dtype)  # which torch uses, too
    x[0, 3, 5, 6] = math.nan  # reaches the filters of a channel, and no others
    found, want = (torch.autograd.grad(run(x, w, **options).sum(), w)[0].isnan()
                   for run in (tilewise.conv2d, F.conv2d))
    assert torch.equal(found.flatten(2).any(2), want.flatten(2).any(2))


@types
@pytest.mark.parametrize("shape, stride", [((24, 16, 2, 2), 2), ((24, 16, 4, 4), 2),
                                           ((24, 16, 3, 3), 1)])
def test_transposed(shape: tuple[int, ...], stride: int, dtype: torch.dtype) -> None:
    x, weight, bias = draw(2, 24, 9, 9, dtype=dtype), draw(*shape, dtype=dtype), draw(
        16, dtype=dtype)
    y = tilewise.conv_transpose2d(x, weight, bias, stride, activation="relu")
    want = F.conv_transpose2d(x.double(), weight.double(), bias.double(), stride).relu()
    assert y.dtype == dtype
    assert error(y, want) < STORED[dtype]


@types
@pytest.mark.parametrize("rows", [1, 5])
def test_linear_layers(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = (draw(rows, 2048, dtype=dtype), draw(1024, 2048, dtype=dtype),
                       draw(1024, dtype=dtype))
    want = F.linear(x.double(), weight.double(), bias.double()).relu()
    assert error(linear(x, weight, bias, activation="relu"), want) < STORED[dtype]


# between convolutions


@types
def test_pools(dtype: torch.dtype) -> None:
    x = draw(2, 37, 18, 18, dtype=dtype)
    x[0, 1, 2, 3], x[1, 2, 3, 4] = math.nan, math.inf
    most = pools.max_pool2d(x, 3, 2, 1)
    assert most is not None
    torch.testing.assert_close(most, F.max_pool2d(x, 3, 2, 1), rtol=0, atol=0, equal_nan=True)
    x = draw(2, 37, 18, 18, dtype=dtype)
    for found, want in ((pools.avg_pool2d(x, 2), F.avg_pool2d(x.double(), 2)),
                        (pools.global_average(x), x.double().mean((2, 3), keepdim=True))):
        assert found is not None
        assert found.dtype == dtype
        assert error(found, want) < STORED[dtype]


@types
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_resampling(mode: str, dtype: torch.dtype) -> None:
    x = draw(2, 21, 7, 9, dtype=dtype)
    found = resampling.upsample(x, scale_factor=2, mode=mode)
    assert found is not None
    assert error(found, F.interpolate(x.double(), scale_factor=2, mode=mode)) < STORED[dtype]


@types
def test_chains(dtype: torch.dtype) -> None:
    x, other, one = (draw(2, 21, 7, 9, dtype=dtype), draw(2, 21, 7, 9, dtype=dtype, seed=1),
                     draw(2, 1, 7, 9, dtype=dtype))
    found = pointwise((("mul", 0, 2), ("add", 3, 1), ("sigmoid", 4)), (x, other, one))
    assert found is not None
    want = torch.sigmoid(x.double() * one.double() + other.double())
    assert error(found, want) < STORED[dtype]
    assert pointwise((("add", 0, 1),), (x, other.float())) is None  # torch knows what that gives


@types
def test_concatenations_and_turns_move_every_bit(dtype: torch.dtype) -> None:
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    x = every.view(1, 16, 64, 64).contiguous(memory_format=LAST)
    parts = [x, x[:, :5], x, x, x[:, 3:], x]  # more than one launch takes
    found = concatenated(parts)
    assert found is not None
    want = torch.cat(parts, 1)
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
    turned = turning.laid_out(x, PLANES)
    torch.testing.assert_close(turned, x, rtol=0, atol=0, equal_nan=True)


# models


class Model(nn.Module):
    """All that is served in 16 bits, and softmax, which is torch's then."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24),
                                   nn.SiLU())
        self.deep = nn.Sequential(nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.ReLU6())
        self.point, self.pool = nn.Conv2d(24, 24, 1), nn.MaxPool2d(2)
        self.up, self.last = nn.ConvTranspose2d(24, 24, 2, 2), nn.Conv2d(48, 21, 3, padding=1)
        self.line = nn.Linear(21, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        y = self.point(self.deep(x)) + x
        y = torch.cat([self.up(self.pool(y)), y * torch.sigmoid(x)], 1)
        y = self.last(y)
        return torch.softmax(y, 1), self.line(y.mean((2, 3)))


@types
def test_models(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Model().eval().to(dtype)
    x = torch.randn(2, 3, 32, 32).to(dtype)
    ours = tilewise.optimize(copy.deepcopy(model))
    with torch.inference_mode():
        wants, theirs = copy.deepcopy(model).double()(x.double()), model(x)
        for _ in range(3):  # as a program from the second on
            results = ours(x)
        text = str(tilewise.profile(ours, x))
    for found, torchs, want in zip(results, theirs, wants, strict=True):
        assert found.dtype == dtype
        assert error(found, want) <= 1.1 * error(torchs, want)
    assert "2 of them by torch" in text or "1 of them by torch" in text


class Added(nn.Module):
    """A sum that is written to a convolution's result, or a new one."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.conv, self.in_place = nn.Conv2d(8, 8, 3, padding=1), in_place

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        y = torch.conv2d(x, self.conv.weight, self.conv.bias, padding=1)
        if self.in_place:
            y = y.add_(other)
            return torch.relu(y)
        return torch.relu(y + other)


@types
@pytest.mark.parametrize("in_place", [True, False])
def test_a_sum_has_torchs_type(in_place: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Added(in_place).eval().to(dtype), draw(1, 8, 9, 9, dtype=dtype)
    graph = torch.fx.symbolic_trace(model)
    rewrite(graph)
    with torch.no_grad():
        for other in (x.float(), x.double(), x):
            want = model(x, other)
            for run in (tilewise.optimize(model), graph):
                found = run(x, other)
                assert found.dtype == want.dtype
                assert error(found, want.double()) < 2 * STORED[dtype]
        if in_place:  # which cannot grow
            with pytest.raises(RuntimeError):
                tilewise.optimize(model)(x, torch.ones(4, 8, 9, 9))


NORMS = {
    "layer": lambda: nn.LayerNorm(24), "group": lambda: nn.GroupNorm(6, 24),
    "instance": lambda: nn.InstanceNorm2d(24, affine=True),
    "batch": lambda: nn.BatchNorm2d(24)}


class Normed(nn.Module):
    """A norm that no convolution does, between two."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.norm, self.is_layer = NORMS[name](), name == "layer"
        self.first, self.last = nn.Conv2d(8, 24, 3, padding=1), nn.Conv2d(24, 8, 1)
        for parameter in self.norm.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
        if name == "batch":
            self.norm.running_mean.uniform_(-1, 1)
            self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.first(x))
        if self.is_layer:
            y = self.norm(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        else:
            y = F.relu(self.norm(y))
        return self.last(y)


@types
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_models_are_ours(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Normed(name).eval().to(dtype)
    x, ours = draw(2, 8, 17, 15, dtype=dtype), tilewise.optimize(copy.deepcopy(model))
    with torch.inference_mode():
        want, theirs = copy.deepcopy(model).double()(x.double()), model(x)
        for _ in range(3):
            found = ours(x)
        text = str(tilewise.profile(ours, x))
        assert found.dtype == dtype
        assert error(found, want) <= 1.1 * error(theirs, want)
        assert "by torch" not in text or "0 of them by torch" in text, text
        for value in (math.inf, math.nan):
            y = x.clone()
            y[0, 3, 5, 6] = value
            assert torch.equal(ours(y).isfinite(), model(y).isfinite())
    for parameter in ours.norm.parameters():  # a change counts in the next call
        parameter.data.view(-1)[-1] += 4
    with torch.inference_mode():
        want = copy.deepcopy(ours).double()(x.double())
        assert error(ours(x), want) <= 4 * STORED[dtype]


# volumes


def volumes(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = (draw(1, 16, 6, 20, 20, dtype=dtype), draw(32, 16, 3, 3, 3, dtype=dtype))
    return (x.contiguous(memory_format=torch.channels_last_3d), weight / 20, draw(32, dtype=dtype))


@types
def test_volumes_are_rounded_once(dtype: torch.dtype) -> None:
    x, weight, bias = volumes(dtype)
    residual = torch.randn(1, 32, 6, 20, 20).to(dtype)
    found = []
    plans = ran(lambda: found.append(tilewise.conv3d(
        x, weight, bias, padding=1, residual=residual, activation="relu")))
    want = F.relu(F.conv3d(x.double(), weight.double(), bias.double(), padding=1)
                  + residual.double())
    assert found[0].dtype == dtype
    assert found[0].is_contiguous(memory_format=torch.channels_last_3d)
    assert error(found[0], want) < STORED[dtype]
    assert {plan.algorithm[:4] for plan in plans} == (set() if is_on_unit(dtype) else {"cpu_"})
    weight[-1, -1, -1, -1, -1] += 40  # what was widened is widened again
    y, want = tilewise.conv3d(x, weight), F.conv3d(x.double(), weight.double())
    assert error(y, want) < STORED[dtype]
    x[0, 3, 2, 5, 6] = math.inf
    y, want = tilewise.conv3d(x, weight), F.conv3d(x, weight)
    assert torch.equal(y.isfinite(), want.isfinite())


def test_gradients_of_volumes() -> None:
    grads, dtype = [], TYPES[0]
    for run, to in ((tilewise.conv3d, dtype), (F.conv3d, torch.float64)):
        given = [t.detach().to(to).requires_grad_() for t in volumes(dtype)]
        y = run(*given, padding=1)
        grads.append(torch.autograd.grad(y, given, torch.ones_like(y)))
    for ours, exact in zip(*grads, strict=True):
        assert ours.dtype == dtype
        assert error(ours, exact) < 1.1 * STORED[dtype]


def test_models_of_volumes() -> None:
    torch.manual_seed(0)
    dtype = TYPES[0]
    model = nn.Sequential(nn.Conv3d(8, 24, 3, padding=1), nn.BatchNorm3d(24), nn.ReLU(),
                          nn.GroupNorm(4, 24), nn.Conv3d(24, 16, 3, padding=1)).eval().to(dtype)
    ours = tilewise.optimize(copy.deepcopy(model))
    with torch.inference_mode():
        for seed in range(4):
            x = draw(1, 8, 6, 20, 20, dtype=dtype, seed=seed)
            want, theirs = copy.deepcopy(model).double()(x.double()), model(x)
            found = ours(x)
            assert found.dtype == dtype
            assert error(found, want) <= 1.1 * error(theirs, want)


@types
def test_steps_that_only_choose_keep_every_bit(dtype: torch.dtype) -> None:
    """Denormal numbers too, which the processor's own rounding would make zero."""
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    x = every[every.isfinite()][:32 * 48 * 40].view(1, 32, 48, 40).contiguous(memory_format=LAST)
    assert ((x != 0) & (x.abs() < torch.finfo(dtype).tiny)).any()
    for found, want in ((pools.max_pool2d(x, 1, 1), x),
                        (resampling.upsample(x, None, 2, "nearest", None),
                         F.interpolate(x, scale_factor=2, mode="nearest"))):
        assert found is not None
        assert torch.equal(found.view(torch.int16), want.contiguous(
            memory_format=LAST).view(torch.int16))

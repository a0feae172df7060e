"""PReLU: slopes are an operand, which may change from call to call."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise
from tilewise.conv.linear import linear
from tilewise.core import InvalidProblem
from tilewise.model import dynamo

CHANNELS = 19  # no whole vectors


class Net(nn.Module):
    """Slopes of modules and of a function, for each channel and for all, behind all that fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS)
        self.each = nn.PReLU(CHANNELS)
        self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.all = nn.PReLU()
        self.third = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.slopes = nn.Parameter(torch.randn(CHANNELS))
        self.last, self.pooled = nn.Conv2d(CHANNELS, 5, 3), nn.PReLU(5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.each(self.norm(self.first(x)))
        y = self.all(self.second(y) + y)
        y = F.prelu(self.third(y), weight=self.slopes)
        return F.max_pool2d(self.pooled(self.last(y)), 2)


def drawn_slopes(net: Net) -> dict[str, Tensor]:
    names = ("each.weight", "all.weight", "slopes", "pooled.weight")
    return {name: torch.randn_like(net.get_parameter(name)) for name in names}


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    net = Net().eval()
    net.load_state_dict({**net.state_dict(), **drawn_slopes(net)})
    return net


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 13, 14, generator=torch.Generator().manual_seed(1))


def assert_close(found: Tensor, want: Tensor) -> None:
    assert (found - want).norm() <= 1e-5 * want.norm()


def in_place(net: Net, slopes: dict[str, Tensor]) -> None:
    for name, values in slopes.items():
        net.get_parameter(name).copy_(values)


def loaded(net: Net, slopes: dict[str, Tensor]) -> None:
    net.load_state_dict({**net.state_dict(), **slopes})


def through_data(net: Net, slopes: dict[str, Tensor]) -> None:
    for name, values in slopes.items():
        net.get_parameter(name).data.copy_(values)


def replaced(net: Net, slopes: dict[str, Tensor]) -> None:
    for name, values in slopes.items():
        place, _, attribute = name.rpartition(".")
        setattr(net.get_submodule(place), attribute, nn.Parameter(values))


def grown(net: Net, slopes: dict[str, Tensor]) -> None:
    """One slope for each channel where there was one for all."""
    replaced(net, {"all.weight": torch.randn(CHANNELS)})


@torch.no_grad()
@pytest.mark.parametrize("change", [in_place, loaded, through_data, replaced, grown])
def test_slopes_are_read_in_every_call(net: Net, x: Tensor, change: Any) -> None:
    theirs, fast = copy.deepcopy(net), tilewise.optimize(net, x)
    for _ in range(2):
        assert_close(fast(x), theirs(x))
    slopes = drawn_slopes(net)
    for changed in (theirs, fast):
        torch.manual_seed(2)
        change(changed, slopes)
    assert_close(fast(x), theirs(x))


@pytest.mark.usefixtures("by_our_kernels")
@torch.no_grad()
def test_it_is_fused_and_pooling_is_not(net: Net, x: Tensor) -> None:
    told = tilewise.explain(tilewise.optimize(net, x), x)
    steps = [plan.problem.epilogue.steps for _, plan in told.layers]
    assert steps == [("bias", "prelu"), ("residual", "prelu"), ("bias", "prelu"),
                     ("bias", "prelu", "pool2")]
    assert all("prelu" in e.plan.inner.epilogue.steps for _, e in told.layers
               if e.plan.algorithm != "vendor")
    assert any(e.plan.algorithm != "vendor" for _, e in told.layers)
    assert all("pool2" not in e.plan.inner.epilogue.steps for _, e in told.layers)


@pytest.mark.parametrize("slopes_alone", [False, True])
def test_training_is_torch_s(x: Tensor, slopes_alone: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 1, bias=False), nn.BatchNorm2d(5), nn.PReLU(5))
    theirs, fast = copy.deepcopy(net), tilewise.optimize(net, x)
    for one in (theirs, fast):
        one.requires_grad_(not slopes_alone).train(not slopes_alone)
        one[2].requires_grad_()
        one(x).square().sum().backward()
    pairs = list(zip(fast.parameters(), theirs.parameters(), strict=True))
    assert sum(one.grad is not None for one, _ in pairs) == (1 if slopes_alone else 4)
    for one, other in pairs:
        if other.grad is not None:
            assert_close(one.grad, other.grad)


@torch.no_grad()
def test_a_released_model_has_its_own(net: Net, x: Tensor) -> None:
    want = net(x)
    alone = tilewise.optimize(net, x, keep_original=False)
    assert_close(alone(x), want)


@torch.no_grad()
def test_compiled(net: Net, x: Tensor) -> None:
    seen: list[int] = []

    def backend(graph: Any, example: Any) -> Any:
        seen.append(dynamo.rewrite(graph))
        assert not any(node.target is torch.prelu for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(net, backend=backend)
    assert_close(compiled(x), net(x))
    in_place(net, drawn_slopes(net))
    assert_close(compiled(x), net(x))
    assert seen == [4]


@torch.no_grad()
def test_slopes_go_by_the_second_axis_as_in_torch() -> None:
    """Without a batch that is the height, behind a linear layer what torch takes it for."""
    image = nn.Sequential(nn.Conv2d(3, 6, 3), nn.PReLU(8)).eval()
    image[1].weight.normal_()
    x = torch.randn(3, 10, 9)
    assert_close(tilewise.optimize(image, x)(x), image(x))
    wide, bias, slope = torch.randn(1021, 1031), torch.randn(1021), torch.randn(4)
    rows = torch.randn(2, 4, 1031)
    assert_close(linear(rows, wide, bias, activation="prelu", slope=slope),
                 F.prelu(F.linear(rows, wide, bias), slope))


@torch.no_grad()
@pytest.mark.usefixtures("by_our_kernels")
@pytest.mark.parametrize("slopes", [1, 1021])
def test_behind_large_linear_layers(slopes: int) -> None:
    layer = nn.Sequential(nn.Linear(1031, 1021), nn.PReLU(slopes)).eval()
    layer[1].weight.normal_()
    x = torch.randn(2, 1031)
    fast = tilewise.optimize(layer, x, max_error=1e-4)  # which lets torch read too many bytes
    assert (fast(x) - layer(x)).norm() <= 1e-4 * layer(x).norm()
    with mock.patch.object(F, "prelu", side_effect=AssertionError("not fused")):
        fast(x)


# the function


@torch.no_grad()
@pytest.mark.parametrize("algorithm", [None, "cpu_direct", "cpu_winograd", "cpu_pixels", "vendor",
                                       "reference"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_conv2d_keeps_nan_and_infinity(algorithm: str | None, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight, slope = torch.randn(1, 5, 12, 12), torch.randn(19, 5, 3, 3), torch.randn(19)
    bias = torch.randn(19) if has_bias else None
    x[0, 1, 2, 3], x[0, 2, 9, 9] = torch.nan, torch.inf
    y = tilewise.conv2d(x, weight, bias, activation="prelu", slope=slope, algorithm=algorithm)
    want = F.prelu(F.conv2d(x, weight, bias), slope)
    assert want.isnan().any()
    torch.testing.assert_close(y, want, equal_nan=True, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_operator_takes_slopes_and_does_without() -> None:
    x, weight, slope = torch.randn(1, 4, 8, 8), torch.randn(6, 4, 3, 3), torch.randn(6)
    options = [1, 1], [0, 0, 0, 0], [1, 1], 1
    run = torch.ops.tilewise.conv2d
    assert_close(run(x, weight, None, None, *options, "prelu", 1, None, None, slope),
                 F.prelu(F.conv2d(x, weight), slope))
    assert_close(run(x, weight, None, None, *options, None, 1, None, None), F.conv2d(x, weight))
    torch.library.opcheck(run.default, (x, weight, None, None, *options, "prelu", 1, None, None,
                                        slope), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("activation, slope, message", [
    ("prelu", None, r"slope is None, needs a tensor of 6 slopes"),
    ("prelu", 0.25, r"slope is 0.25, needs a tensor of 6 slopes"),
    ("prelu", torch.ones(5), r"slope has shape \(5,\), needs \(6,\) or \(1,\)"),
    ("prelu", torch.ones(6, 1), r"slope has shape \(6, 1\), needs"),
    ("relu", torch.ones(6), r"slope is given with activation relu, needs prelu"),
    ("prelu", torch.ones(6, dtype=torch.float64), r"need one dtype")])
def test_wrong_slopes_are_refused(activation: str, slope: Any, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        tilewise.conv2d(torch.randn(1, 4, 8, 8), torch.randn(6, 4, 3, 3), activation=activation,
                        slope=slope)

"""torch.autocast on CPUs: torch's types, by our kernels where torch would widen every number."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.plans import ran
from torch import Tensor, nn
from torch.autograd import forward_ad as fwAD
from torch.nn import functional as F

import tilewise
from tilewise.model.dynamo import rewrite
from tilewise.runtime.types import element_of

TYPES = [t for t in (torch.bfloat16, torch.float16) if element_of(t)]
types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
ours = pytest.mark.skipif(not TYPES, reason="torch multiplies both on this machine")
UNIT = {torch.bfloat16: 2.0 ** -8, torch.float16: 2.0 ** -11}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def check(found: Any, want: Any, dtype: torch.dtype, times: float = 4.0) -> None:
    """The same type, and as near as roundings of the type allow."""
    assert found.dtype == want.dtype
    assert found.shape == want.shape
    found, want = found.detach().double(), want.detach().double()
    far = float((found - want).norm() / want.norm())
    assert far < times * UNIT[dtype]


OPERANDS = {  # types of x, weight, bias, residual
    "float32": (torch.float32,) * 4,
    "mixed": (None, torch.float32, torch.float32, None),
    "cast already": (None,) * 4,
    "a wide residual": (None, torch.float32, torch.float32, torch.float32)}


@types
@pytest.mark.parametrize("kinds", OPERANDS.values(), ids=OPERANDS)
@pytest.mark.parametrize("groups", [1, 16])
def test_convolutions_have_torchs_types(kinds: tuple[Any, ...], groups: int,
                                        dtype: torch.dtype) -> None:
    tensors = draw(2, 16, 12, 11), draw(32, 16 // groups, 3, 3), draw(32), draw(2, 32, 12, 11)
    x, weight, bias, residual = (t.to(kind or dtype) for t, kind in zip(tensors, kinds))
    with torch.autocast("cpu", dtype):
        want = F.relu(F.conv2d(x, weight, bias, 1, 1, 1, groups) + residual)
        y = tilewise.conv2d(x, weight, bias, padding=1, groups=groups, residual=residual,
                            activation="relu")
        alone = tilewise.conv2d(x, weight, padding=1, groups=groups)
        check(alone, F.conv2d(x, weight, None, 1, 1, 1, groups), dtype)
    check(y, want, dtype)


@pytest.mark.usefixtures("by_our_kernels")
@ours
@pytest.mark.parametrize("dtype", TYPES)
def test_they_run_by_our_kernels_and_weights_are_prepared_once(dtype: torch.dtype) -> None:
    from tilewise.runtime import weights

    x, weight = draw(1, 64, 28, 28), draw(64, 64, 3, 3)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        (plan,) = ran(lambda: tilewise.conv2d(x, weight, padding=1))
        before = weights.made_here
        tilewise.conv2d(x, weight, padding=1)
    assert plan.algorithm.startswith("cpu_")
    assert plan.problem.dtype == element_of(dtype)
    assert weights.made_here == before


@types
def test_a_changed_weight_is_noticed(dtype: torch.dtype) -> None:
    x, weight, bias = draw(1, 8, 9, 9), draw(6, 8, 3, 3), draw(6)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        for tensor in (weight, weight, bias):
            check(tilewise.conv2d(x, weight, bias), F.conv2d(x, weight, bias), dtype)
            tensor.data.view(-1)[-1] += 50.0
        check(tilewise.conv2d(x, weight, bias), F.conv2d(x, weight, bias), dtype)


def test_after_an_evaluation_a_frozen_weight_trains_what_is_before_it() -> None:
    x, weight = torch.randn(1, 8, 6, 6), torch.randn(8, 8, 3, 3)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        tilewise.conv2d(x, weight)
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        tilewise.conv2d(x, weight).float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_functions_of_torch_transform_them() -> None:
    x, weight, change = torch.randn(1, 8, 6, 6), torch.randn(8, 8, 3, 3), torch.randn(8, 8, 3, 3)

    def transformed(conv: Any) -> list[Tensor]:
        tangent = torch.func.jvp(lambda w: conv(x, w), (weight,), (change,))[1]
        with fwAD.dual_level():
            dual = fwAD.unpack_dual(conv(x, fwAD.make_dual(weight, change))).tangent
        return [tangent, dual, torch.func.vmap(lambda w: conv(x, w))(torch.stack([weight, change])),
                torch.func.grad(lambda x: conv(x, weight).float().sum())(x)]

    with torch.autocast("cpu", torch.bfloat16):
        for mine, theirs in zip(transformed(tilewise.conv2d), transformed(F.conv2d), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_a_compiler_follows_them() -> None:
    compiled = torch.compile(tilewise.conv2d, backend="eager", fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = compiled(torch.randn(1, 8, 6, 6), torch.randn(8, 8, 3, 3))
    assert y.dtype == torch.bfloat16


@pytest.mark.parametrize("name, sides", [("conv2d", (6, 6)), ("conv3d", (4, 6, 6))])
def test_a_bias_of_another_type_is_cast(name: str, sides: tuple[int, ...]) -> None:
    x, weight = torch.randn(1, 8, *sides), torch.randn(8, 8, *(3 for _ in sides))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.profiler.profile():
        for conv in (getattr(tilewise, name), getattr(F, name)):
            y = conv(x.bfloat16(), weight.bfloat16(), torch.randn(8))
            assert y.dtype == torch.bfloat16


def test_what_autocast_leaves_alone() -> None:
    x, weight = draw(1, 8, 9, 9), draw(6, 8, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            assert tilewise.conv2d(x, weight).dtype == torch.float32
        for run in (tilewise.conv2d, F.conv2d):
            with pytest.raises(RuntimeError):  # float64 images, and a weight that is cast
                run(x.double(), weight)
    with torch.autocast("cuda", torch.float16, enabled=False):
        assert tilewise.conv2d(x, weight).dtype == torch.float32


@types
def test_gradients_are_those_of_torch(dtype: torch.dtype) -> None:
    found = []
    for run in (tilewise.conv2d, F.conv2d):
        x, weight, bias = (t.requires_grad_() for t in (draw(2, 8, 10, 10), draw(12, 8, 3, 3),
                                                        draw(12)))
        with torch.autocast("cpu", dtype):
            y = run(x, weight, bias, padding=1)
        y.float().square().mean().backward()
        found.append((x.grad, weight.grad, bias.grad))
    for grad, want in zip(*found, strict=True):
        check(grad, want, dtype, 8.0)


class Net(nn.Module):
    """A block with a residual, a sum in place and a norm without a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.alone = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.slope, self.last = nn.PReLU(16), nn.Conv2d(16, 8, 1)
        self.linear = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.relu(self.norm(self.first(x)))
        z = self.second(y)
        z += y.float()
        z = self.slope(self.last.weight.new_ones(()) * self.alone(z))
        w = self.last(F.max_pool2d(z, 2))
        return z, w, self.linear(w.mean((2, 3)))


@types
@pytest.mark.parametrize("learns", [False, True])
def test_optimised_models(learns: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Net().train(learns)
    for norm in (model.norm, model.alone):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    fast, x = tilewise.optimize(copy.deepcopy(model)), draw(2, 3, 16, 16)
    for _ in range(4):  # graphs, programs, and what was remembered without autocast
        with torch.set_grad_enabled(learns):
            fast(x)
            with torch.autocast("cpu", dtype):
                want, found = copy.deepcopy(model)(x), fast(x)
        for a, b in zip(found, want, strict=True):
            check(a, b, dtype, 12.0)


@ours
@pytest.mark.parametrize("dtype", TYPES)
def test_convolutions_of_models_are_ours(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
                          nn.Conv2d(64, 64, 3, padding=1)).eval()
    fast, x = tilewise.optimize(model), draw(1, 16, 28, 28)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        fast(x)
        plans = ran(lambda: fast(x))
    assert [(plan.algorithm[:4], plan.problem.dtype) for plan in plans] == [
        ("cpu_", element_of(dtype))] * 2


def test_compiled_models() -> None:
    """Dynamo's graph as the backend rewrites it, with autocast around and inside."""
    torch.manual_seed(0)
    dtype = torch.bfloat16
    model, x = Net().eval(), draw(2, 3, 16, 16)
    inside = copy.deepcopy(model)
    inside.forward = torch.autocast("cpu", dtype)(model.forward)  # type: ignore[method-assign]

    def backend(graph: Any, inputs: Any) -> Any:
        rewrite(graph)
        return graph.forward

    with torch.no_grad():
        with torch.autocast("cpu", dtype):
            want = model(x)
            found = torch.compile(model, backend=backend)(x)
        for result in (found, torch.compile(inside, backend=backend)(x)):
            for a, b in zip(result, want, strict=True):
                check(a, b, dtype, 12.0)


class Added(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.conv, self.in_place = nn.Conv2d(8, 8, 3, padding=1), in_place

    def forward(self, x: Tensor) -> Tensor:
        y = torch.conv2d(x, self.conv.weight, self.conv.bias, padding=1)
        return torch.relu(y.add_(x) if self.in_place else y + x)


@types
@pytest.mark.parametrize("in_place", [True, False])
def test_sums_with_the_images_have_torchs_type(in_place: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Added(in_place).eval(), draw(1, 8, 9, 9)
    graph = torch.fx.symbolic_trace(model)
    rewrite(graph)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        for run in (tilewise.optimize(model), graph):
            check(run(x), model(x), dtype)

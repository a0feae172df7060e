"""Gradients of tilewise.conv2d: near float64, by their identities, and as autograd has them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from support import harness
from support.convolutions import LAST, PLANES, draw, relative, rms, theirs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise
from tilewise.core import InvalidProblem, Problem
from tilewise.model import dynamo
from tilewise.tools.sharing import noted

ADMITTED = 2e-5  # the error that plans may have by default
CLOSE = 1e-3  # decisions of ReLU and pooling nearer than this are not compared
RANDOM = harness.sample(60, 30)
TAILS: list[tuple[str | None, int]] = [(None, 1), ("relu", 1), ("relu", 2), (None, 2)]


def options_of(p: Problem) -> dict[str, Any]:
    return {"stride": p.stride, "padding": p.padding, "dilation": p.dilation, "groups": p.groups}


def gradients(function: Callable[..., Tensor], leaves: dict[str, Tensor], grad: Tensor,
              **options: Any) -> dict[str, Tensor]:
    """Of all leaves that want one."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    y = function(**leaves, **options)
    found = torch.autograd.grad(y, list(leaves.values()), grad.to(y.dtype))
    return dict(zip(leaves, found))


def leaves_of(p: Problem, layout: torch.memory_format, seed: int) -> dict[str, Tensor]:
    o = harness.operands(p, "floats", seed)
    found = {"x": o.x.contiguous(memory_format=layout), "weight": o.weight, "bias": o.bias,
             "residual": o.residual}
    return {name: leaf for name, leaf in found.items() if leaf is not None}


def random_problems(name: str) -> Iterator[tuple[int, Problem]]:
    """Small ones with images in them."""
    rng = random.Random(name)
    for seed in range(RANDOM):
        p = harness.random_problem(rng, flops=5e5)
        if p.epilogue.has_slopes:  # which are another operand
            p = p.with_(epilogue=replace(p.epilogue, activation="leaky_relu"))
        yield seed, p.with_(n=rng.randint(1, 3))


def decided(p: Problem, leaves: dict[str, Tensor], grad: Tensor) -> Tensor:
    """The gradient, zero where float32 may decide ReLU or pooling otherwise than float64."""
    wide = {name: leaf.double() for name, leaf in leaves.items()}
    sums = theirs(**wide, **options_of(p))
    keep = torch.ones_like(sums, dtype=torch.bool)
    if p.epilogue.activation:  # relu or relu6
        keep &= (sums.abs() > CLOSE) & ((sums - 6).abs() > CLOSE)
    if p.epilogue.pool > 1:
        size = p.epilogue.pool
        windows = sums.unfold(2, size, size).unfold(3, size, size).flatten(4)
        first, second = windows.topk(2, dim=4).values.unbind(4)
        kept = keep.unfold(2, size, size).unfold(3, size, size).flatten(4).all(4)
        return grad * ((first - second > CLOSE) & kept)
    return grad * keep


# against float64


@pytest.mark.slow
def test_random_gradients_are_near_float64() -> None:
    for seed, p in random_problems("near float64"):
        layout = (PLANES, LAST)[seed % 2]
        leaves = leaves_of(p, layout, seed)
        tail = {"activation": p.epilogue.activation, "pool": p.epilogue.pool}
        grad = decided(p, leaves, draw(p.n, p.k, p.out_h, p.out_w, seed=seed))
        grad = grad.contiguous(memory_format=layout)
        found = gradients(tilewise.conv2d, leaves, grad, **options_of(p), **tail)
        wide = {name: leaf.double() for name, leaf in leaves.items()}
        expected = gradients(theirs, wide, grad.double(), **options_of(p), **tail)
        sizes = scales(p, wide, expected)
        for name, value in found.items():
            assert value.shape == leaves[name].shape, (str(p), name)
            error = rms(value.double() - expected[name])
            assert error <= ADMITTED * max(rms(expected[name]), sizes[name], 1e-30), (str(p), name)


def scales(p: Problem, wide: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Rms size of gradients whose terms do not cancel."""
    passed = expected.get("residual")
    squares = {"x": wide["x"].square(), "weight": wide["weight"].square()}
    if passed is None:  # as many terms, none of them cut off
        passed = torch.ones(p.n, p.k, p.conv_h, p.conv_w, dtype=torch.float64)
    sums = gradients(theirs, squares, passed.square(), **options_of(p))
    sums["bias"] = passed.square().sum((0, 2, 3))
    sums["residual"] = passed.square()
    return {name: rms(value.sqrt()) for name, value in sums.items()}


@pytest.mark.slow
def test_gradients_are_adjoint() -> None:
    """<conv(x, w), g> = <x, gradient of x> = <w, gradient of w>."""
    for seed, p in random_problems("adjoint"):
        leaves = {name: leaf.requires_grad_() for name, leaf in
                  leaves_of(p, (PLANES, LAST)[seed % 2], seed).items() if name in ("x", "weight")}
        y = tilewise.conv2d(**leaves, **options_of(p))
        grad = draw(*y.shape, seed=seed + 1)
        dx, dw = torch.autograd.grad(y, list(leaves.values()), grad)
        forward, data, weight = (float((a.double() * b.double()).sum()) for a, b in (
            (y.detach(), grad), (leaves["x"].detach(), dx), (leaves["weight"].detach(), dw)))
        size = float(y.detach().double().norm() * grad.double().norm())
        assert abs(forward - data) <= ADMITTED * size, str(p)
        assert abs(forward - weight) <= ADMITTED * size, str(p)


@pytest.mark.parametrize("activation", ["silu", "gelu", "sigmoid", "tanh", None])
@pytest.mark.parametrize("layout", [PLANES, LAST])
def test_finite_differences(activation: str | None, layout: torch.memory_format) -> None:
    leaves = {"x": draw(2, 7, 9, 11).contiguous(memory_format=layout),
              "weight": draw(10, 7, 3, 3, seed=1) / 8, "bias": draw(10, seed=2),
              "residual": draw(2, 10, 9, 11, seed=3)}
    options: dict[str, Any] = {"padding": 1, "activation": activation}
    grad = draw(2, 10, 9, 11, seed=4)
    found = gradients(tilewise.conv2d, leaves, grad, **options)
    step = 1e-2
    for number, name in enumerate(leaves):
        direction = draw(*leaves[name].shape, seed=10 + number)
        ahead, behind = (
            float((tilewise.conv2d(**{**leaves, name: leaves[name] + sign * step * direction},
                                   **options).double() * grad).sum()) for sign in (1, -1))
        slope = float((found[name].double() * direction).sum())
        size = float(found[name].norm() * direction.norm()) / found[name].numel()**0.5
        assert abs((ahead - behind) / (2 * step) - slope) <= 2e-2 * size, name


@pytest.mark.parametrize("activation, pool", TAILS)
@pytest.mark.parametrize("layout", [PLANES, LAST])
def test_gradcheck(activation: str | None, pool: int, layout: torch.memory_format) -> None:
    """In float64, which torch computes underneath."""
    leaves = [draw(2, 3, 5, 7).double().contiguous(memory_format=layout),
              draw(4, 3, 3, 2, seed=1).double(), draw(4, seed=2).double(),
              draw(2, 4, 5, 8, seed=3).double()]
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def run(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return tilewise.conv2d(x, weight, bias, padding=1, residual=residual,
                               activation=activation, pool=pool)

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


# where gradients go


@pytest.mark.parametrize("activation, pool", TAILS[1:])
@pytest.mark.parametrize("size", [(8, 10), (9, 11), (7, 8)])
@pytest.mark.parametrize("algorithm", ["cpu_direct", "cpu_pointwise", "cpu_winograd", "vendor"])
def test_ties_go_where_torch_sends_them(activation: str | None, pool: int, size: tuple[int, int],
                                        algorithm: str) -> None:
    """Small integers have many; the gradient of the residual shows what passed."""
    taps = 1 if algorithm == "cpu_pointwise" else 3
    x = draw(2, 1, *size, integers=True).contiguous(memory_format=LAST)
    weight = torch.zeros(21, 1, taps, taps)  # in the Winograd domain only zero stays exact
    weight[:, :, taps // 2, taps // 2] = float(algorithm != "cpu_winograd")
    leaves = {"x": x, "weight": weight, "bias": draw(21, seed=2, integers=True),
              "residual": draw(2, 21, *size, seed=3, integers=True)}
    options = {"padding": taps // 2, "activation": activation, "pool": pool}
    grad = draw(2, 21, size[0] // pool, size[1] // pool, seed=4, integers=True)
    found = gradients(tilewise.conv2d, leaves, grad, algorithm=algorithm, **options)
    expected = gradients(theirs, leaves, grad, **options)
    assert torch.equal(found["residual"], expected["residual"])
    assert torch.equal(found["bias"], expected["bias"])


@pytest.mark.parametrize("activation, pool", TAILS[1:])
def test_gradients_pass_nan_as_in_torch(activation: str | None, pool: int) -> None:
    x, weight = draw(1, 3, 8, 8).contiguous(memory_format=LAST), draw(5, 3, 1, 1, seed=1)
    x[0, 1, 3, 4] = float("nan")
    residual, grad = draw(1, 5, 8, 8, seed=2), draw(1, 5, 8 // pool, 8 // pool, seed=3)
    options = {"activation": activation, "pool": pool}
    leaves = {"x": x, "weight": weight, "residual": residual}
    y, expected_y = (function(**leaves, **options) for function in (tilewise.conv2d, theirs))
    assert torch.equal(y.isnan(), expected_y.isnan())
    found, expected = (gradients(function, leaves, grad, **options)["residual"]
                       for function in (tilewise.conv2d, theirs))
    assert torch.equal(found, expected)


def test_another_default_dtype_changes_nothing() -> None:
    leaves = {"x": draw(1, 6, 8, 8).contiguous(memory_format=LAST),
              "weight": draw(12, 6, 3, 3, seed=1), "bias": draw(12, seed=2)}
    options = {"padding": 1, "activation": "relu", "pool": 2}
    grad = draw(1, 12, 4, 4, seed=3)
    expected = gradients(tilewise.conv2d, leaves, grad, **options)
    torch.set_default_dtype(torch.float64)
    try:
        found = gradients(tilewise.conv2d, leaves, grad, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.usefixtures("by_our_kernels")
def test_a_bound_of_zero_is_a_bound() -> None:
    leaves = {"x": draw(1, 16, 14, 14).contiguous(memory_format=LAST),
              "weight": draw(16, 16, 3, 3, seed=1)}
    grad = draw(1, 16, 14, 14, seed=2)
    names = []
    for max_error in (None, 0.0):
        with noted() as plans:
            gradients(tilewise.conv2d, leaves, grad, padding=1, max_error=max_error)
        names.append({plan.algorithm for plan in plans})
    assert names[1] == {"vendor"} != names[0]


def test_the_operator_refuses_tails_it_cannot_differentiate() -> None:
    x, weight = draw(1, 4, 6, 6).requires_grad_(), draw(4, 4, 3, 3, seed=1)
    with pytest.raises(InvalidProblem, match="activation is gelu and pool is 1, needs relu"):
        torch.ops.tilewise.conv2d(x, weight, None, None, [1, 1], [0] * 4, [1, 1], 1, "gelu", 1,
                                  None, None)


@pytest.mark.parametrize("wanted", [names for names in product((False, True), repeat=4)
                                    if any(names)])
@pytest.mark.parametrize("activation, pool", [(None, 1), ("relu", 2)])
@pytest.mark.parametrize("layout", [PLANES, LAST])
def test_only_what_is_wanted(wanted: tuple[bool, ...], activation: str | None, pool: int,
                             layout: torch.memory_format) -> None:
    leaves = [draw(2, 6, 8, 9).contiguous(memory_format=layout), draw(12, 6, 3, 3, seed=1),
              draw(12, seed=2), draw(2, 12, 8, 9, seed=3)]
    grad = draw(2, 12, 8 // pool, 9 // pool, seed=4)

    def run(function: Callable[..., Tensor]) -> list[Tensor | None]:
        given = [leaf.clone().requires_grad_(want) for leaf, want in zip(leaves, wanted)]
        x, weight, bias, residual = given
        function(x, weight, bias, padding=1, residual=residual, activation=activation,
                 pool=pool).backward(grad)
        return [leaf.grad for leaf in given]

    for ours, torchs in zip(run(tilewise.conv2d), run(theirs)):
        if torchs is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("x_layout, weight_layout, grad_layout",
                         list(product((PLANES, LAST), repeat=3)))
def test_layouts(x_layout: Any, weight_layout: Any, grad_layout: Any) -> None:
    leaves = {"x": draw(2, 19, 9, 8).contiguous(memory_format=x_layout),
              "weight": draw(20, 19, 3, 3, seed=1).contiguous(memory_format=weight_layout),
              "bias": draw(20, seed=2)}
    grad = draw(2, 20, 4, 4, seed=3).contiguous(memory_format=grad_layout)
    options = {"padding": 1, "activation": "relu", "pool": 2}
    found, expected = (gradients(function, leaves, grad, **options)
                       for function in (tilewise.conv2d, theirs))
    for name in leaves:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-3)


def test_gradients_of_no_images() -> None:
    for layout, (activation, pool) in product((PLANES, LAST), TAILS):
        leaves = {"x": draw(0, 6, 8, 9).contiguous(memory_format=layout),
                  "weight": draw(12, 6, 3, 3), "bias": draw(12)}
        found = gradients(tilewise.conv2d, leaves, torch.zeros(0, 12, 8 // pool, 9 // pool),
                          padding=1, activation=activation, pool=pool)
        assert found["x"].shape == leaves["x"].shape
        assert not found["weight"].any()
        assert not found["bias"].any()


# gradients of gradients


@pytest.mark.parametrize("layout", [LAST, PLANES])
@pytest.mark.parametrize(("stride", "padding"), [(2, 0), ((2, 3), (1, 2, 0, 3))])
def test_double_backward_of_strided_1x1_filters(layout: Any, stride: Any, padding: Any) -> None:
    """Torch never sees the stride: it would write beyond its memory in the weight's gradient."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 8).contiguous(memory_format=layout)
    weight = torch.randn(5, 3, 1, 1).contiguous(memory_format=layout)
    seen, found = [], []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (),
                               kwargs: Any = None) -> Any:
            if function is torch.ops.aten.convolution_backward.default:
                seen.append((tuple(args[2].shape[2:]), tuple(args[4])))
            return function(*args, **(kwargs or {}))

    def padded(x: Tensor, weight: Tensor) -> Tensor:
        wide = F.pad(x, (*padding[2:], *padding[:2])) if padding else x
        return F.conv2d(wide, weight, None, stride)

    def mine(x: Tensor, weight: Tensor) -> Tensor:
        return tilewise.conv2d(x, weight, stride=stride, padding=padding)

    for dtype, function, mode in ((torch.float32, mine, Watched()),
                                  (torch.float64, padded, nullcontext())):
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight)]
        y = function(*leaves)
        with mode:
            first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        found.append([g.detach() for g in (*first, *second)])
    assert seen == [((1, 1), (1, 1))]
    assert all(relative(one, other) < ADMITTED for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("activation, pool", TAILS)
@pytest.mark.parametrize("layout", [PLANES, LAST])
@pytest.mark.parametrize("padding", [1, (0, 1, 2, 0)])
def test_double_backward(activation: str | None, pool: int, layout: Any, padding: Any) -> None:
    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [draw(2, 5, 9, 8).contiguous(memory_format=layout), draw(12, 5, 3, 3, seed=1),
                  draw(12, seed=2)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        y = function(*leaves, padding=padding, activation=activation, pool=pool)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        penalty = sum((grad.square().mean() for grad in first), torch.zeros(()))
        return [*first, *torch.autograd.grad(penalty, leaves)]

    for ours, torchs in zip(run(tilewise.conv2d), run(theirs)):
        assert relative(ours.detach(), torchs.detach().double()) < 1e-4


# the operators


@pytest.mark.parametrize("activation, pool", TAILS)
@pytest.mark.parametrize("with_residual", [False, True])
def test_opcheck(activation: str | None, pool: int, with_residual: bool) -> None:
    x = draw(2, 5, 9, 8).contiguous(memory_format=LAST).requires_grad_()
    weight, bias = draw(12, 5, 3, 3, seed=1).requires_grad_(), draw(12, seed=2).requires_grad_()
    residual = draw(2, 12, 9, 8, seed=3).contiguous(memory_format=LAST).requires_grad_()
    geometry = ([1, 1], [1, 1, 1, 1], [1, 1], 1)
    args = (x, weight, bias, residual if with_residual else None, *geometry, activation, pool,
            None, None)
    ops = torch.ops.tilewise
    if (activation, pool) == (None, 1):
        torch.library.opcheck(ops.conv2d.default, args)
        mask = None
    else:
        torch.library.opcheck(ops.conv2d_masked.default, args)
        mask = ops.conv2d_masked(*args)[1].detach()
    grad = draw(2, 12, 9 // pool, 8 // pool, seed=4).contiguous(memory_format=LAST)
    wants = [True, True, True, with_residual and mask is not None]
    torch.library.opcheck(ops.conv2d_backward.default, (
        grad, x.detach(), weight.detach(), mask, *geometry, activation, pool, wants, None))


class Net(nn.Module):
    """A few kinds of layer, with all that is fused behind them."""

    def __init__(self, convolve: Callable[..., Tensor] = tilewise.conv2d) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.convolve = convolve
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.third, self.last = nn.Conv2d(16, 20, 1), nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        run = self.convolve
        x = run(x, self.first.weight, self.first.bias, padding=1, activation="relu", pool=2)
        y = run(x, self.second.weight, self.second.bias, padding=1, residual=x,
                activation="relu")
        y = run(y, self.depthwise.weight, self.depthwise.bias, padding=1, groups=16)
        y = run(y, self.third.weight, self.third.bias, activation="gelu")
        return self.last(y.mean((2, 3)))


def parameter_gradients(net: nn.Module, run: Callable[..., Tensor],
                        x: Tensor) -> dict[str, Tensor]:
    net.zero_grad()
    F.cross_entropy(run(x), torch.arange(len(x)) % 5).backward()
    return {name: value.grad.clone() for name, value in net.named_parameters()}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled, and no Inductor, which takes long and is not what is tested."""
    monkeypatch.setattr(dynamo, "has_compiler", lambda: False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("layout", [PLANES, LAST])
@pytest.mark.parametrize("backend", ["aot_eager", "tilewise"])
def test_a_compiled_training_step(backend: str, layout: torch.memory_format) -> None:
    net, x = Net(), draw(4, 3, 12, 14).contiguous(memory_format=layout)
    expected = parameter_gradients(net, net, x)
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    for name, found in parameter_gradients(net, compiled, x).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.usefixtures("fresh")
def test_a_compiled_training_step_of_torchs_own_layers() -> None:
    """The backend finds them and fuses what follows them."""
    torch.manual_seed(4)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                        nn.Conv2d(16, 20, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))
    x = draw(4, 3, 12, 14)
    expected = parameter_gradients(net, net, x)
    found = parameter_gradients(net, torch.compile(net, fullgraph=True, backend="tilewise"), x)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5, msg=name)


# training


@pytest.mark.parametrize("threads", [1, 2])
def test_runs_are_equal_bit_for_bit(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        net, x = Net(), draw(5, 3, 30, 34).contiguous(memory_format=LAST)
        first, *others = [parameter_gradients(net, net, x) for _ in range(4)]
    finally:
        torch.set_num_threads(before)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("layout", [PLANES, LAST])
def test_weights_changed_in_place_are_seen(layout: torch.memory_format) -> None:
    """By the forward and by the backward pass: else the nets would part."""
    ours, torchs = Net(), Net(theirs)
    torchs.load_state_dict(copy.deepcopy(ours.state_dict()))
    optimisers = [torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
                  for net in (ours, torchs)]
    start = copy.deepcopy(ours.state_dict())
    for step in range(4):
        x = draw(4, 3, 12, 14, seed=step).contiguous(memory_format=layout)
        found, expected = (parameter_gradients(net, net, x) for net in (ours, torchs))
        for name in found:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-4,
                                       msg=f"{name} in step {step}")
        for optimiser in optimisers:
            optimiser.step()
    assert all(relative(ours.state_dict()[name], start[name].double()) > 1e-3 for name in start)


@pytest.mark.parametrize("channels, size", [(64, 56), (16, 112)])
def test_weight_gradients_err_little_more_than_torchs(channels: int, size: int) -> None:
    x = draw(4, channels, size, size).relu().contiguous(memory_format=LAST)
    grad = draw(4, channels, size, size, seed=1).contiguous(memory_format=LAST)
    leaves = {"weight": draw(channels, channels, 3, 3, seed=2)}

    def run(function: Callable[..., Tensor], x: Tensor, leaves: Any, grad: Tensor) -> Tensor:
        return gradients(lambda weight: function(x, weight, padding=1), leaves, grad)["weight"]

    expected = run(theirs, x.double(), {"weight": leaves["weight"].double()}, grad.double())
    ours, torchs = (relative(run(function, x, leaves, grad), expected)
                    for function in (tilewise.conv2d, theirs))
    assert ours <= 3 * torchs

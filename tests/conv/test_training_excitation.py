"""Squeeze and excitation with gradients: torch's results and gradients, and when it is torch's."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from support.harness import sample
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise
from tilewise.conv import excitation
from tilewise.conv.running import ENGINE
from tilewise.kernels.cpu import memory

LAST = torch.channels_last
empty = memory.empty


@pytest.fixture(autouse=True)
def full_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "empty", lambda *shape, **k: empty(*shape, **k).fill_(torch.nan))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes whose gradients a kernel of ours computed."""
    found: list[tuple[int, ...]] = []
    kernel = excitation.kernels.backward

    def backward(grad: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        found.append(tuple(x.shape))
        return kernel(grad, x, scale)

    monkeypatch.setattr(excitation.kernels, "backward", backward)
    return found


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=LAST).requires_grad_()


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / (expected.norm() + 1e-9))


def doubled(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors]


def test_random_products(calls: list[tuple[int, ...]]) -> None:
    rng, count = random.Random(0), sample(500, 40)
    torch.manual_seed(0)
    for number in range(count):
        n, c, h, w = (rng.randint(1, most) for most in (5, 70, 30, 30))
        x, scale = drawn(n, c, h + 1, w), torch.randn(n, c, 1, 1, requires_grad=True)
        y = excitation.scaled(*((x, scale) if number % 2 else (scale, x)))
        assert y is not None
        grad = torch.randn(y.shape)
        if number % 3:
            grad = grad.contiguous(memory_format=LAST)
        if number % 5 == 0:
            grad = grad[:, :1, :1, :1].expand(y.shape)
        others = doubled(x, scale)
        expected = others[0] * others[1]
        assert apart(y.detach(), expected.detach()) < 1e-7
        for one, other in zip(torch.autograd.grad(y, (x, scale), grad),
                              torch.autograd.grad(expected, others, grad.double()), strict=True):
            assert one.shape == other.shape
            assert apart(one, other) < 1e-6
    assert len(calls) == count


def test_means() -> None:
    torch.manual_seed(0)
    for shape in ((2, 17, 9, 11), (1, 64, 1, 1), (5, 3, 40, 2)):
        x = drawn(*shape)
        (other,) = doubled(x)
        y, expected = excitation.averaged(x), other.mean((2, 3), keepdim=True)
        assert y is not None
        assert apart(y.detach(), expected.detach()) < 1e-6
        grad = torch.randn(y.shape)
        (one,) = torch.autograd.grad(y, x, grad)
        assert apart(one, torch.autograd.grad(expected, other, grad.double())[0]) < 1e-6


def test_one_gradient_alone() -> None:
    x, scale = drawn(2, 8, 5, 5), torch.randn(2, 8, 1, 1, requires_grad=True)
    others = doubled(x, scale)
    expected = torch.autograd.grad((others[0] * others[1]).square().sum(), others)
    for i, given in enumerate(((x, scale.detach()), (x.detach(), scale))):
        y = excitation.scaled(*given)
        assert y is not None
        (found,) = torch.autograd.grad(y.square().sum(), given[i])
        assert apart(found, expected[i]) < 1e-6


def penalty(model: Any, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(grad.square().sum(), x)
    return found


def test_gradients_of_gradients() -> None:
    x, scale = drawn(2, 4, 5, 3), torch.randn(2, 4, 1, 1)
    (other,) = doubled(x)
    found = penalty(lambda x: excitation.scaled(x, scale * excitation.averaged(x)), x)
    expected = penalty(lambda x: x * (scale.double() * x.mean((2, 3), keepdim=True)), other)
    assert apart(found, expected) < 1e-5


def test_a_result_may_be_changed_in_place() -> None:
    x, scale = drawn(2, 4, 5, 3), torch.randn(2, 4, 1, 1, requires_grad=True)
    y = excitation.scaled(x, scale)
    assert y is not None
    y.add_(1).mul_(2)
    (found,) = torch.autograd.grad(y.sum(), scale)
    assert apart(found, 2 * x.detach().double().sum((2, 3), keepdim=True)) < 1e-6


def test_an_operand_that_was_changed_is_noticed() -> None:
    x, scale = drawn(2, 4, 5, 3), torch.randn(2, 4, 1, 1, requires_grad=True)
    inner = x * 1
    y = excitation.scaled(inner, scale)
    assert y is not None
    inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_only_what_is_needed_is_saved() -> None:
    """What is not may change, as with torch."""
    for learns in (0, 1):
        saved: list[tuple[int, ...]] = []
        given = [drawn(2, 4, 5, 3), torch.randn(2, 4, 1, 1, requires_grad=True)]
        given[1 - learns] = given[1 - learns].detach()

        def note(t: Tensor, saved: list[tuple[int, ...]] = saved) -> Tensor:
            saved.append(tuple(t.shape))
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            y = excitation.scaled(*given)
        assert y is not None
        assert saved == [tuple(given[1 - learns].shape)]
        expected = given[1 - learns].double().clone()
        if learns == 1:
            expected = expected.sum((2, 3), keepdim=True)
        (found,) = torch.autograd.grad(y.sum(), given[learns])
        assert apart(found, expected.expand(found.shape)) < 1e-6


HOOKS: dict[str, Any] = {
    "in planes": lambda t: t.contiguous(), "in bfloat16": lambda t: t.bfloat16(),
    "in float64": lambda t: t.double(), "the same": lambda t: t,
    "every second": lambda t: torch.stack((t, t), -1)[..., 0]}


@pytest.mark.parametrize("name", HOOKS)
def test_what_hooks_saved_otherwise(name: str) -> None:
    change = HOOKS[name]
    x, scale = drawn(2, 20, 5, 3), torch.randn(2, 20, 1, 1, requires_grad=True)
    others = doubled(x, scale)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: change(t.detach()), lambda t: t):
        y = excitation.scaled(x, scale)
    assert y is not None
    error = 1e-2 if name == "in bfloat16" else 1e-6
    for one, other in zip(torch.autograd.grad(y.sum(), (x, scale)),
                          torch.autograd.grad((others[0] * others[1]).sum(), others), strict=True):
        assert apart(one, other) < error


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_whatever_torch_makes_by_default(dtype: torch.dtype) -> None:
    x, scale = drawn(2, 20, 5, 3), torch.randn(2, 20, 1, 1, requires_grad=True)
    others = doubled(x, scale)
    torch.set_default_dtype(dtype)
    try:
        y = excitation.scaled(x, scale)
        assert y is not None
        found = torch.autograd.grad(y, (x, scale), torch.ones(y.shape, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, torch.autograd.grad((others[0] * others[1]).sum(), others),
                          strict=True):
        assert one.dtype == torch.float32
        assert apart(one, other) < 1e-6


def test_the_gradient_of_a_mean_may_be_changed_in_place() -> None:
    x = drawn(2, 4, 5, 3)
    x.register_hook(lambda grad: grad.mul_(2))
    y = excitation.averaged(x)
    assert y is not None
    (found,) = torch.autograd.grad(y.sum(), x)
    assert apart(found, torch.full(x.shape, 2 / 15).double()) < 1e-6
    assert found.is_contiguous(memory_format=LAST)


def test_steps_that_were_saved_before_there_were_such_gradients() -> None:
    model = tilewise.optimize(Excited(0))
    x = torch.randn(3, 3, 14, 10)
    expected = model(x)
    steps = [step for captures in model.__dict__["forward"].captures.values()
             for capture in captures for step in capture.steps.values() if hasattr(step, "_learn")]
    assert steps
    for step in steps:
        step.__dict__.pop("_learn")
        step._run.__dict__.pop("_learns", None)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("given", [
    (torch.randn(2, 4, 5, 3, requires_grad=True), torch.randn(2, 4, 1, 1)),  # in planes
    (drawn(2, 4, 5, 3), torch.randn(1, 4, 1, 1)), (drawn(2, 4, 5, 3), torch.randn(2, 1, 5, 3)),
    (drawn(2, 4, 5, 3).double(), torch.randn(2, 4, 1, 1).double()),
    (drawn(2, 4, 5, 3), torch.randn(2, 8, 1, 1)[:, ::2]), (drawn(2, 4, 5, 3), 2.0),
    (drawn(2, 4, 5, 3).detach(), torch.randn(2, 4, 1, 1)),  # nothing to learn
    (drawn(0, 4, 5, 3), torch.randn(0, 4, 1, 1))])
def test_others_are_torchs(given: tuple[Any, Any]) -> None:
    assert excitation.scaled(*given) is None
    assert excitation.scaled(*reversed(given)) is None


def test_modes_are_torchs() -> None:
    x, scale = drawn(2, 4, 5, 3), torch.randn(2, 4, 1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert excitation.scaled(x, scale) is None
        assert excitation.averaged(x) is None
    with torch.no_grad():
        assert excitation.averaged(x) is None
    with torch.profiler.profile():
        assert excitation.scaled(x, scale) is None


class Excited(nn.Module):
    """As in EfficientNet, MobileNetV3 and SENet."""

    def __init__(self, how: int) -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Conv2d(3, 24, 3, padding=1), nn.Conv2d(24, 8, 1)
        self.squeeze, self.excite = nn.Conv2d(24, 6, 1), nn.Conv2d(6, 24, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.first(x))
        mean = (self.pool(x) if self.how == 0 else x.mean((2, 3), keepdim=True) if self.how == 1
                else F.adaptive_avg_pool2d(x, (1, 1)))
        scale = torch.sigmoid(self.excite(F.relu(self.squeeze(mean))))
        return self.last(x * scale if self.how else scale * x)


@pytest.mark.parametrize("how", range(3))
def test_models(how: int, calls: list[tuple[int, ...]]) -> None:
    torch.manual_seed(how)
    net = Excited(how)
    model, exact = tilewise.optimize(copy.deepcopy(net)), copy.deepcopy(net).double()
    x = torch.randn(3, 3, 14, 10)
    for _ in range(2):
        for one, images in ((model, x), (exact, x.double())):
            one.zero_grad()
            one(images).square().mean().backward()
        for a, b in zip(model.parameters(), exact.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert apart(a.grad, b.grad) < 1e-5
    assert calls == [(3, 24, 14, 10)] * 2
    with torch.inference_mode():
        torch.testing.assert_close(model(x), exact(x.double()).float(), rtol=1e-4, atol=1e-4)
    assert len(calls) == 2


@pytest.mark.parametrize("shape, ours", [((4, 16, 1, 1), False), ((4, 16, 3, 3), True),
                                         ((80, 16, 1, 1), True)])
def test_few_images_of_one_pixel_are_torchs_while_they_learn(
        shape: tuple[int, ...], ours: bool) -> None:
    """To prepare the weight anew in every step would take longer."""
    seen: list[Any] = []
    x = torch.randn(shape, requires_grad=True)
    weight = torch.randn(8, 16, 1, 1, requires_grad=True)
    ENGINE.observers.append(seen.append)
    try:
        y = tilewise.conv2d(x, weight, activation="relu")
        found = torch.autograd.grad(y.sum(), (x, weight))
    finally:
        ENGINE.observers.remove(seen.append)
    assert bool(seen) == ours
    others = doubled(x, weight)
    expected = F.relu(F.conv2d(*others))
    assert apart(y.detach(), expected.detach()) < 1e-6
    for one, other in zip(found, torch.autograd.grad(expected.sum(), others), strict=True):
        assert apart(one, other) < 1e-6
    with torch.no_grad():
        assert apart(tilewise.conv2d(x, weight, activation="relu"), expected.detach()) < 1e-6

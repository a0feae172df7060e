"""Batch norms that learn and that a module calls as a function: with their convolution, as torch's.

timm writes its models so: a norm with its activation, which counts the batches itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise
from tilewise.conv import batch_norm, learned
from tilewise.conv.batch_norm import CalledNorm


class NormAct(nn.BatchNorm2d):
    """A norm with the activation behind it, written as torch writes its own."""

    def __init__(self, channels: int, act: nn.Module, **options: Any) -> None:
        super().__init__(channels, **options)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, "expected images")
        share = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                share = 1.0 / float(self.num_batches_tracked)
        own = not self.training or self.track_running_stats
        y = F.batch_norm(x, self.running_mean if own else None, self.running_var if own else None,
                         self.weight, self.bias,
                         self.training or (self.running_mean is None and self.running_var is None),
                         share, self.eps)
        return self.act(self.drop(y))


class Read(NormAct):
    """What it moves is read before the activation."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True,
                         self.momentum, self.eps)
        return self.act(y) * self.running_mean.sum()


def model_of(norm: Callable[..., nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), norm(8, nn.ReLU(inplace=True), **options),
        nn.Conv2d(8, 8, 3, padding=1), norm(8, nn.SiLU(inplace=True), **options),
        nn.Conv2d(8, 16, 1, bias=False), norm(16, nn.Identity(), **options),
        nn.Dropout(0.0), nn.Flatten(), nn.Linear(16 * 64, 5))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether norms were called with their convolution, or alone, by us."""
    found: list[bool] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            y = function(*args)
            found.append(y is not None)
            return y
        return call

    monkeypatch.setattr("tilewise.model.nn.trained", watched(learned.trained))
    monkeypatch.setattr("tilewise.model.nn.normalised", watched(batch_norm.normalised))
    return found


def compare(theirs: nn.Module, steps: int = 4) -> None:
    """So many steps of ours and of torch's in float64: losses, gradients, numbers of norms."""
    x, labels = torch.randn(6, 3, 10, 10), torch.randint(5, (6,))
    ours, theirs = tilewise.optimize(copy.deepcopy(theirs)), theirs.double()
    optimizers = [torch.optim.SGD(model.parameters(), 0.05, 0.9) for model in (ours, theirs)]
    for _ in range(steps):
        losses = []
        for model, optimizer, image in zip((ours, theirs), optimizers, (x, x.double()),
                                           strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(image), labels)
            loss.backward()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) < 1e-4
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(one.grad.double(), other.grad, atol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
    for name, buffer in ours.named_buffers():
        right = theirs.get_buffer(name)
        assert torch.allclose(buffer.double(), right.double(), atol=1e-4), name
        assert buffer.dtype == right.dtype or buffer.is_floating_point()


@pytest.mark.parametrize("options", [
    {}, {"momentum": 0.3, "eps": 1e-3}, {"affine": False}, {"track_running_stats": False}],
    ids=str)
def test_they_learn_as_torchs(calls: list[bool], options: dict[str, Any]) -> None:
    compare(model_of(NormAct, **options))
    assert calls
    assert all(calls)


@pytest.mark.parametrize(("norm", "options"), [(Read, {}), (NormAct, {"momentum": None})],
                         ids=["read", "a mean of all batches"])
def test_what_is_torchs(calls: list[bool], norm: Any, options: dict[str, Any]) -> None:
    compare(model_of(norm, **options))
    assert not calls


def test_without_gradients_statistics_move(calls: list[bool]) -> None:
    theirs = model_of(NormAct)
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(4, 3, 10, 10)
    with torch.no_grad():
        for _ in range(5):
            assert torch.allclose(ours(x), theirs(x), atol=1e-4)
    for name, buffer in ours.named_buffers():
        assert torch.allclose(buffer, theirs.get_buffer(name), atol=1e-5), name
    assert theirs[1].num_batches_tracked == 5
    assert calls


def test_modes_take_turns() -> None:
    theirs = model_of(NormAct)
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(4, 3, 10, 10)
    for mode in (True, False, True, True, False):
        assert torch.allclose(ours.train(mode)(x), theirs.train(mode)(x), atol=1e-4)


def test_a_norm_follows_what_becomes_of_its_module(calls: list[bool]) -> None:
    """Parameters that are replaced, frozen or gone, statistics that are replaced."""
    theirs = model_of(NormAct)
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(4, 3, 10, 10)
    changes: list[Callable[[Any], Any]] = [
        lambda norm: setattr(norm, "weight", nn.Parameter(torch.full((8,), 0.5))),
        lambda norm: norm.bias.requires_grad_(False),
        lambda norm: setattr(norm, "running_mean", torch.ones(8)),
        lambda norm: setattr(norm, "eps", 0.1),
        lambda norm: setattr(norm, "momentum", 0.9),
        lambda norm: setattr(norm, "act", nn.Hardswish()),
        lambda norm: norm.train(False)]
    for change in changes:
        for model in (ours, theirs):
            change(model[1])
            model.zero_grad()
            model(x).square().sum().backward()
        for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), name
            assert one.grad is None or torch.allclose(one.grad, other.grad, atol=2e-2,
                                                      rtol=1e-3), name
        for name, buffer in ours.named_buffers():
            assert torch.allclose(buffer, theirs.get_buffer(name), atol=1e-4), name
    assert all(calls)


def test_a_norm_that_is_called_twice() -> None:
    """Its statistics are moved in the order of its calls."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
            self.norm = NormAct(8, nn.ReLU())
            self.last = nn.Linear(8 * 64, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.last((self.norm(self.a(x)) + self.norm(self.b(x) * 3)).flatten(1))

    torch.manual_seed(0)
    compare(Twice())


def test_it_is_in_the_mode_of_the_call_and_counts_nothing() -> None:
    module = NormAct(8, nn.ReLU()).eval()
    norm = CalledNorm(module, True, 0.1, 1e-5)
    assert norm.train(False).training
    x = torch.randn(2, 8, 4, 4)
    y = norm(x)
    assert module.num_batches_tracked == 0
    assert torch.allclose(y, F.batch_norm(x, None, None, training=True))
    assert not torch.equal(module.running_mean, torch.zeros(8))


class Function(nn.Module):
    """A convolution and a function, with the numbers of a module in some mode and order."""

    def __init__(self, training: bool | None, swapped: bool = False) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        self.mode, self.swapped = training, swapped

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        affine = (norm.bias, norm.weight) if self.swapped else (norm.weight, norm.bias)
        mode = self.training if self.mode is None else self.mode
        return F.relu(F.batch_norm(self.conv(x), norm.running_mean, norm.running_var, *affine,
                                   mode, 0.1, 1e-5))


class Frozen(NormAct):
    """Running statistics, whatever the mode."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(F.batch_norm(x, self.running_mean, self.running_var, self.weight,
                                     self.bias, False, self.momentum, self.eps))


class Always(NormAct):
    """The batch's own statistics, whatever the mode."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(F.batch_norm(x, self.running_mean, self.running_var, self.weight,
                                     self.bias, True, self.momentum, self.eps))


@pytest.mark.parametrize("make", [
    lambda: Function(False), lambda: Function(None, swapped=True), lambda: model_of(Frozen),
    lambda: model_of(Always)], ids=["eval", "swapped", "frozen", "always"])
@pytest.mark.parametrize("mode", [True, False])
def test_the_call_says_how(make: Callable[[], nn.Module], mode: bool) -> None:
    torch.manual_seed(0)
    theirs = make().train(mode)
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(4, 3, 10, 10)
    for eps in (1e-5, 0.5):  # the module's, which not all calls take
        for model in (ours, theirs):
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eps = eps
            model.zero_grad()
            model(x).square().sum().backward()
        assert torch.allclose(ours(x), theirs(x), atol=1e-4)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(one.grad, other.grad, atol=2e-2, rtol=1e-3)
        for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
            assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(("norm", "options"), [
    (NormAct, {"track_running_stats": False}), (Always, {})], ids=["untracked", "always"])
def test_a_batchs_own_statistics_are_not_folded(norm: Any, options: dict[str, Any]) -> None:
    theirs = model_of(norm, **options).eval()
    ours, x = tilewise.optimize(copy.deepcopy(theirs), keep_original=False), torch.randn(
        4, 3, 10, 10)
    assert torch.allclose(ours(x), theirs(x), atol=1e-4)


@pytest.mark.parametrize("change", [
    lambda norm: norm.__dict__.update(_parameters=dict(norm._parameters) | {
        "weight": nn.Parameter(torch.full((8,), 3.0))}),
    lambda norm: norm._buffers.update(running_mean=torch.ones(8))], ids=["dict", "buffer"])
def test_tensors_are_those_that_the_module_has_now(change: Callable[[Any], Any]) -> None:
    theirs = model_of(NormAct)
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(4, 3, 10, 10)
    for _ in range(2):
        assert torch.allclose(ours(x), theirs(x), atol=1e-4)
        for model in (ours, theirs):
            change(model[1])
    for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_weights_that_are_plain_tensors() -> None:
    """As fast weights are, which are replaced in every step."""
    theirs = model_of(NormAct)
    x = torch.randn(4, 3, 10, 10)
    ours = tilewise.optimize(copy.deepcopy(theirs))
    found = []
    for model in (ours, theirs):
        del model[1].weight
        own = [torch.full((8,), value, requires_grad=True) for value in (0.5, 2.0)]
        for weight in own:
            model[1].weight = weight
            y = model(x)
        found.append((y, torch.autograd.grad(y.square().sum(), own[1])[0]))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-4)
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-3)


class Counted(nn.Module):
    """A sum with a counter, which is counted up before the activation."""

    def __init__(self, given: bool) -> None:
        super().__init__()
        self.conv, self.given = nn.Conv2d(3, 8, 3), given
        self.register_buffer("counter", torch.tensor(1))
        self.register_buffer("twin", self.counter)

    def forward(self, x: Tensor, counter: Tensor) -> Tensor:
        y = self.conv(x) + (counter if self.given else self.twin)
        self.counter.add_(5)
        return F.relu(y)


@pytest.mark.parametrize("given", [False, True])
def test_a_counter_that_is_read(given: bool) -> None:
    theirs = Counted(given)
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(2, 3, 9, 9)
    for _ in range(3):
        assert torch.allclose(ours(x, ours.counter), theirs(x, theirs.counter), atol=1e-4)
    assert ours.counter == 16


class WrittenSum(nn.Module):
    """What a sum has read is written to before the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        r = self.b(x)
        y = self.a(x) + r
        r.add_(5)
        return F.relu(y), r


@pytest.mark.parametrize("backend", [False, True])
def test_a_residual_that_is_written_to_behind_the_sum(backend: bool) -> None:
    theirs = WrittenSum()
    ours: Any = torch.compile(theirs, backend="tilewise") if backend else tilewise.optimize(
        copy.deepcopy(theirs))
    x = torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        for one, other in zip(ours(x), theirs(x), strict=True):
            assert torch.allclose(one, other, atol=1e-4)


class Opaque(nn.Module):
    """Reads the statistics of a norm from Python."""

    def __init__(self, norm: list[nn.Module]) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:  # no tracer goes on from here
            return x
        return self.norm[0].running_mean.detach().sum()


@pytest.mark.parametrize("act", [True, False])
def test_statistics_have_moved_when_they_are_read(act: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.norm = NormAct(8, nn.Identity()) if act else nn.BatchNorm2d(8)
            self.opaque = Opaque([self.norm])

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(x))
            share = self.opaque(x)
            return F.silu(y) * share

    theirs = Net()
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(4, 3, 9, 9) + 3
    for _ in range(3):
        assert torch.allclose(ours(x), theirs(x), atol=1e-4)


# dropouts that drop nothing


@pytest.mark.parametrize("drop", [nn.Dropout(0.0), nn.Dropout2d(0), nn.AlphaDropout(0.0)], ids=str)
def test_a_dropout_of_nothing_is_left_out_until_it_drops(drop: nn.Module) -> None:
    theirs = nn.Sequential(nn.Conv2d(3, 8, 3), drop, nn.Conv2d(8, 8, 3), copy.deepcopy(drop))
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(2, 3, 9, 9)
    for p in (0.0, 0.5, 0.0):
        for model in (ours, theirs):
            model[1].p = p
        found = []
        for model in (ours, theirs):
            torch.manual_seed(1)
            found.append((model(x), torch.rand(1)))
        assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
        assert found[0][1] == found[1][1]  # as many numbers were drawn


@pytest.mark.parametrize("drop", [F.dropout, F.dropout2d, F.alpha_dropout])
def test_a_call_that_drops_nothing(drop: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.p = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), 0.0

        def forward(self, x: Tensor) -> Tensor:
            return self.b(drop(self.a(x), self.p, True))

    theirs = Net()
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(2, 3, 9, 9)
    for p in (0.0, 0.5, 0.0):
        found = []
        for model in (ours, theirs):
            model.p = p
            torch.manual_seed(1)
            found.append((model(x), torch.rand(1)))
        assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
        assert found[0][1] == found[1][1]


# norms that no convolution does


class Before(nn.Module):
    """Norms before convolutions, as DenseNet has them: with an activation, alone, called."""

    def __init__(self, called: bool) -> None:
        super().__init__()
        kind = (lambda c: NormAct(c, nn.Identity())) if called else nn.BatchNorm2d
        self.first, self.norms = nn.Conv2d(3, 8, 3), nn.ModuleList([kind(8), kind(16), kind(16)])
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.last = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.first(x), 2)
        x = torch.cat([x, self.a(F.relu(self.norms[0](x)))], 1)
        x = self.b(F.silu(self.norms[1](x)))
        return self.last((self.norms[2](x * 2) * 0.5).mean((2, 3)))


@pytest.mark.parametrize("called", [False, True])
def test_norms_before_convolutions_learn(called: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def watched(norm: Any, x: Tensor, residual: Any, activation: Any) -> Tensor | None:
        found.append((activation, type(norm)))
        return batch_norm.normalised(norm, x, residual, activation)

    monkeypatch.setattr("tilewise.model.chains.normalised", watched)
    torch.manual_seed(0)
    compare(Before(called))
    assert {activation for activation, _ in found} == {"relu", "silu", None}
    assert len(found) == 3 * 4


def test_they_are_as_exact_as_torch_in_planes() -> None:
    """PyTorch's own norm of channels-last images is off by a hundred times as much."""
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 8, 1), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.norm(F.max_pool2d(self.a(x), 2) * 0.01 + 5))

    torch.manual_seed(0)
    theirs = Net()
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(2, 3, 32, 32)
    right = copy.deepcopy(theirs).double()(x.double())
    error, torchs = ((y - right).norm() / right.norm() for y in (ours(x), theirs(x)))
    assert error < 3 * torchs


@pytest.mark.parametrize("first", [True, False])
def test_their_modes_take_turns(first: bool) -> None:
    torch.manual_seed(0)
    theirs = Before(False)
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(4, 3, 12, 12)
    for grad in (True, False):
        for mode in (first, not first, first, True, False, True):
            with torch.set_grad_enabled(grad):
                assert torch.allclose(ours.train(mode)(x), theirs.train(mode)(x), atol=1e-4)
    for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)

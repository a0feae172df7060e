"""Batch norms that learn, behind convolutions: torch's results, statistics and gradients."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise.conv import batch_norm, learned
from tilewise.conv.running import ENGINE
from tilewise.core.errors import InvalidProblem
from tilewise.kernels.cpu import memory
from tilewise.model.nn import Block

LAST = torch.channels_last
ACTIVATIONS: dict[str | None, Any] = {
    None: lambda x: x, "relu": F.relu, "relu6": F.relu6, "silu": F.silu, "gelu": F.gelu,
    "hardswish": F.hardswish, "leaky_relu:0.1": lambda x: F.leaky_relu(x, 0.1)}
empty = memory.empty


@pytest.fixture(autouse=True)
def full_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "empty", lambda *shape, **k: empty(*shape, **k).fill_(torch.nan))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of a norm was ours, with its convolution or alone."""
    found: list[bool] = []

    def trained(*args: Any) -> Tensor | None:
        y = learned.trained(*args)
        found.extend([True] * (y is not None))
        return y

    def normalised(*args: Any) -> Tensor | None:
        y = batch_norm.normalised(*args)
        found.append(y is not None)
        return y

    monkeypatch.setattr("tilewise.model.nn.trained", trained)
    monkeypatch.setattr("tilewise.model.nn.normalised", normalised)
    return found


def images(*shape: int, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=made).contiguous(memory_format=LAST)


def apart(found: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return float((found.double() - expected).norm() / (expected.norm() + 1e-9))


def block(norm: nn.Module, activation: str | None = None, c: int = 8, pool: int = 1) -> Block:
    torch.manual_seed(1)
    return Block(nn.Conv2d(c, norm.num_features, 3, padding=1), norm, activation, pool)


def run(mine: Block, x: Tensor, residual: Tensor | None, grad_of: Tensor) -> dict[str, Tensor]:
    """All that a step makes, by name."""
    conv, norm = mine.parts
    leaves = {"x": x, **({} if residual is None else {"residual": residual}),
              **{f"conv.{k}": p for k, p in conv.named_parameters()},
              **{f"norm.{k}": p for k, p in norm.named_parameters()}}
    y = mine(x) if residual is None else mine(x, residual)
    found = torch.autograd.grad(y, list(leaves.values()), grad_of)
    return {"y": y, **dict(zip(leaves, found, strict=True)),
            **{f"buffer.{k}": b.clone() for k, b in norm.named_buffers()}}


def expected_of(mine: Block, activation: str | None, x: Tensor, residual: Tensor | None,
                grad: Tensor) -> dict[str, Tensor]:
    conv, norm = (copy.deepcopy(part).double() for part in mine.parts)
    x, residual = (None if t is None else t.detach().double().requires_grad_()
                   for t in (x, residual))
    leaves = {"x": x, **({} if residual is None else {"residual": residual}),
              **{f"conv.{k}": p for k, p in conv.named_parameters()},
              **{f"norm.{k}": p for k, p in norm.named_parameters()}}
    y = norm(conv(x))
    y = ACTIVATIONS[activation](y if residual is None else y + residual)
    y = y if mine.pool == 1 else F.max_pool2d(y, mine.pool)
    found = torch.autograd.grad(y, list(leaves.values()), grad.double())
    return {"y": y, **dict(zip(leaves, found, strict=True)),
            **{f"buffer.{k}": b for k, b in norm.named_buffers()}}


def require_same_step(mine: Block, activation: str | None, x: Tensor,
                      residual: Tensor | None) -> None:
    shape = (len(x), mine.parts[0].out_channels, x.shape[2] // mine.pool, x.shape[3] // mine.pool)
    grad = images(*shape, seed=9)
    expected = expected_of(mine, activation, x, residual, grad)
    found = run(mine, x.requires_grad_(), None if residual is None else residual.requires_grad_(),
                grad)
    assert found.keys() == expected.keys()
    # a bias before a norm has no gradient but rounding
    for name in found.keys() - {"conv.bias"}:
        assert apart(found[name].detach(), expected[name].detach()) < 5e-5, name


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_step(calls: list[bool], activation: str | None) -> None:
    require_same_step(block(nn.BatchNorm2d(12), activation), activation, images(3, 8, 9, 11), None)
    assert calls == [activation != "gelu"]


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_a_step_with_a_residual(calls: list[bool], activation: str | None) -> None:
    require_same_step(block(nn.BatchNorm2d(12), activation), activation, images(3, 8, 9, 11),
                      images(3, 12, 9, 11, seed=4))
    assert calls == [activation != "silu"]


@pytest.mark.parametrize("options", [
    {"affine": False}, {"momentum": None}, {"momentum": 0.5}, {"track_running_stats": False},
    {"eps": 0.1}, {"affine": False, "track_running_stats": False}])
def test_options(calls: list[bool], options: dict[str, Any]) -> None:
    mine = block(nn.BatchNorm2d(12, **options), "relu")
    for seed in range(3):  # a cumulative average knows how many came before
        require_same_step(mine, "relu", images(2, 8, 7, 7, seed=seed), None)
    assert calls == [True] * 3


def test_pooling_behind_it(calls: list[bool]) -> None:
    require_same_step(block(nn.BatchNorm2d(12), "relu", pool=2), "relu", images(2, 8, 8, 8), None)
    assert calls == [True]


@pytest.mark.parametrize("seed", range(3))
def test_random_blocks(calls: list[bool], seed: int) -> None:
    rng = random.Random(seed)
    for i in range(12):
        c, k = rng.choice((1, 3, 8, 17)), rng.choice((1, 2, 16, 33, 64))
        activation, residual = rng.choice(tuple(ACTIVATIONS)), rng.random() < .4
        n, h, w = rng.randint(1, 4), rng.randint(1, 12), rng.randint(2, 12)
        mine = block(nn.BatchNorm2d(k, affine=rng.random() < .8), activation, c)
        require_same_step(mine, activation, images(n, c, h, w, seed=i),
                          images(n, k, h, w, seed=i + 50) if residual else None)
    assert sum(calls) >= 4


def test_gradients_of_gradients() -> None:
    norm = nn.BatchNorm2d(4)
    x, residual = images(3, 4, 5, 5), images(3, 4, 5, 5, seed=2)

    def penalty(norm: Any, x: Tensor, residual: Tensor | None, ours: bool) -> Tensor:
        x = x.clone(memory_format=torch.preserve_format).requires_grad_()
        if ours:
            y = batch_norm.normalised(norm, x, residual, "relu")
        else:
            y = F.relu(norm(x) if residual is None else norm(x) + residual)
        assert y is not None
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    for more in (None, residual):
        expected = penalty(copy.deepcopy(norm).double(), x.double(),
                           None if more is None else more.double(), False)
        assert apart(penalty(copy.deepcopy(norm), x, more, True), expected) < 1e-4


def test_what_is_torchs() -> None:
    """Hooks, other layouts and types, one value a channel, subclasses, modes of torch."""
    def ours(norm: Any, x: Tensor) -> bool:
        return batch_norm.normalised(norm.train(), x, None, "relu") is not None

    x = images(2, 4, 5, 5)
    assert ours(nn.BatchNorm2d(4), x)
    hooked = nn.BatchNorm2d(4)
    hooked.register_forward_hook(lambda *_: None)

    class Mine(nn.BatchNorm2d):
        pass

    assert not ours(hooked, x)
    assert not ours(Mine(4), x)
    assert not ours(nn.SyncBatchNorm(4), x)
    assert not ours(nn.BatchNorm2d(4), x.contiguous())
    assert not ours(nn.BatchNorm2d(4).double(), x.double())
    assert not ours(nn.BatchNorm2d(4), x[:, :, ::2])
    assert not ours(nn.BatchNorm2d(4), images(1, 4, 1, 1))
    assert not ours(nn.BatchNorm2d(5), x)
    with torch.autocast("cpu"):
        assert not ours(nn.BatchNorm2d(4), x)
    with torch.autograd.profiler.profile():
        assert not ours(nn.BatchNorm2d(4), x)


def test_frozen_parameters_have_no_gradient() -> None:
    norm, x = nn.BatchNorm2d(4), images(2, 4, 5, 5).requires_grad_()
    norm.weight.requires_grad_(False)
    y = batch_norm.normalised(norm, x, None, "relu")
    assert y is not None
    y.sum().backward()
    assert norm.weight.grad is None
    assert norm.bias.grad is not None
    assert x.grad is not None


def test_without_gradients_statistics_move() -> None:
    mine, theirs = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    x = images(2, 4, 5, 5)
    with torch.no_grad():
        y = batch_norm.normalised(mine, x, None, "relu")
        assert y is not None
        assert torch.allclose(y, F.relu(theirs(x)), atol=1e-6)
    assert torch.allclose(mine.running_var, theirs.running_var)
    assert int(mine.num_batches_tracked) == 1


def test_the_same_bits_in_every_run() -> None:
    x, grad = images(4, 32, 20, 20), images(4, 32, 20, 20, seed=3)

    def step() -> list[Tensor]:
        norm, mine = nn.BatchNorm2d(32), x.clone(memory_format=torch.preserve_format)
        y = batch_norm.normalised(norm, mine.requires_grad_(), None, "silu")
        assert y is not None
        return [y.detach(), *torch.autograd.grad(y, [mine, norm.weight, norm.bias], grad)]

    first = step()
    for _ in range(3):
        assert all(map(torch.equal, step(), first))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1)
        self.n, self.m = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.m(self.b(F.relu(self.n(self.a(x))))) + x)


def test_a_model_learns_as_torchs(calls: list[bool]) -> None:
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Conv2d(3, 8, 3), Residual(), Residual(), nn.Flatten(),
                           nn.Linear(8 * 36, 5))
    ours, x = tilewise.optimize(copy.deepcopy(theirs)), torch.randn(6, 3, 8, 8)
    labels, theirs = torch.randint(5, (6,)), theirs.double()
    optimizers = [torch.optim.SGD(model.parameters(), 0.05, 0.9) for model in (ours, theirs)]
    for _ in range(5):
        losses = []
        for model, optimizer, image in zip((ours, theirs), optimizers, (x, x.double()),
                                           strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(image), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) < 1e-4
    assert calls
    assert all(calls)
    for name, buffer in ours.named_buffers():
        assert torch.allclose(buffer.double(), theirs.get_buffer(name).double(), atol=1e-4), name


# what a review found


def test_results_may_be_changed_in_place() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.CELU(inplace=True))
    x, theirs = images(2, 8, 6, 6).requires_grad_(), copy.deepcopy(model)
    y, expected = tilewise.optimize(model)(x), theirs(x)
    assert torch.allclose(y, expected, atol=1e-5)
    assert torch.allclose(*(torch.autograd.grad(z.sum(), x)[0] for z in (y, expected)), atol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "relu6", "silu", "hardswish", "leaky_relu:0.1"])
def test_a_norm_that_is_used_twice(activation: str) -> None:
    """Also with hooks, and where gradients are to be differentiated."""
    norm, x, by = nn.BatchNorm2d(6), images(2, 6, 5, 5).requires_grad_(), images(2, 6, 5, 5, seed=1)
    nn.init.uniform_(norm.weight)
    nn.init.uniform_(norm.bias)
    norm.weight.register_hook(lambda grad: grad * 2)

    def ours() -> Tensor:
        once = batch_norm.normalised(norm, x, None, activation)
        twice = None if once is None else batch_norm.normalised(norm, once, None, activation)
        assert twice is not None
        return twice

    def theirs() -> Tensor:
        act = ACTIVATIONS[activation]
        result: Tensor = act(norm(act(norm(x))))
        return result

    for create in (False, True):
        found, expected = (torch.autograd.grad((run() * by).sum(), [norm.weight, norm.bias, x],
                                               create_graph=create) for run in (ours, theirs))
        for a, b in zip(found, expected, strict=True):
            assert apart(a.detach(), b.detach()) < 1e-4
    found, expected = (torch.autograd.grad(torch.autograd.grad(
        (run() * by).sum(), x, create_graph=True)[0].square().sum(), x)[0]
        for run in (ours, theirs))
    assert apart(found, expected.double()) < 1e-3


def test_only_the_residual_wants_a_gradient() -> None:
    residual = images(2, 8, 4, 4, seed=3).requires_grad_()
    y = batch_norm.normalised(nn.BatchNorm2d(8, affine=False), images(2, 8, 4, 4), residual, "relu")
    assert y is not None
    for create in (False, True):
        (grad,) = torch.autograd.grad(y.sum(), residual, create_graph=create, retain_graph=True)
        assert torch.equal(grad, (y > 0).float())


@pytest.mark.parametrize("activation", ["relu", "silu", None])
def test_many_gradients_at_once(activation: str | None) -> None:
    mine, x = block(nn.BatchNorm2d(5), activation, c=4), images(2, 4, 6, 6).requires_grad_()
    y = mine(x).sum((0, 2, 3))
    leaves = [mine.parts[1].weight, mine.parts[0].weight, x]
    found = torch.autograd.grad(y.square(), leaves, torch.eye(5), is_grads_batched=True,
                                retain_graph=True)
    for i, row in enumerate(torch.eye(5)):
        expected = torch.autograd.grad(y.square(), leaves, row, retain_graph=True)
        for many, one in zip(found, expected, strict=True):
            assert torch.allclose(many[i], one, atol=1e-4)


def test_a_bias_may_change_before_the_backward_pass() -> None:
    norm, x = nn.BatchNorm2d(4), images(2, 4, 5, 5).requires_grad_()
    y = batch_norm.normalised(norm, x, None, "relu")
    with torch.no_grad():
        norm.bias.add_(1)
    assert y is not None
    y.sum().backward()
    y = batch_norm.normalised(norm, x, None, "relu")
    with torch.no_grad():
        norm.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_steps_by_torch_and_by_us_in_one_graph() -> None:
    """Torch keeps running statistics for its gradient; moving them must not spoil it."""
    norm, x = nn.BatchNorm2d(4), images(2, 4, 5, 5).requires_grad_()
    first, second = norm(x), batch_norm.normalised(norm, x, None, "relu")
    assert second is not None
    (first.sum() + second.sum()).backward()
    assert norm.weight.grad is not None


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("change", [lambda t: t.contiguous(), lambda t: t.double(),
                                    lambda t: torch.stack((t, t), -1)[..., 0]])
def test_what_hooks_saved_otherwise(residual: bool, change: Any) -> None:
    norm = nn.BatchNorm2d(20).train()
    x, more = (images(2, 20, 5, 3, seed=i).requires_grad_() for i in range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: change(t.detach()), lambda t: t):
        y = batch_norm.normalised(norm, x, more if residual else None, "relu")
    assert y is not None
    exact = copy.deepcopy(norm).double()
    others = [t.detach().double().requires_grad_() for t in (x, more)]
    expected = F.relu(exact(others[0]) + (others[1] if residual else 0))
    grad = images(2, 20, 5, 3, seed=5)
    for one, other in zip(
            torch.autograd.grad(y, (x, norm.weight, norm.bias), grad),
            torch.autograd.grad(expected, (others[0], exact.weight, exact.bias), grad.double()),
            strict=True):
        assert apart(one, other) < 1e-5


# a step with its convolution, whose call is remembered


@pytest.mark.parametrize("activation", ["relu", "relu6", "silu", "hardswish", None])
@pytest.mark.parametrize("added", [False, True])
def test_second_gradients_of_a_block(activation: str | None, added: bool) -> None:
    if added and activation not in (None, "relu"):
        pytest.skip("steps of torch's")
    mine = block(nn.BatchNorm2d(12), activation)
    residual = images(2, 12, 7, 7, seed=4) if added else None

    def penalty(run: Any, leaves: list[Tensor], *more: Any) -> tuple[Tensor, ...]:
        y = run(*more)
        loss = (y * images(*y.shape, seed=5).to(y.dtype)).square().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(part.square().sum() for part in first), leaves)

    def theirs(conv: Any, norm: Any, x: Tensor, more: Tensor | None) -> Tensor:
        y = norm(conv(x))
        result: Tensor = ACTIVATIONS[activation](y if more is None else y + more)
        return result

    conv, norm = (copy.deepcopy(part).double() for part in mine.parts)
    x = images(2, 8, 7, 7).requires_grad_()
    wide = x.detach().double().requires_grad_()
    found = penalty(mine, [x, mine.parts[0].weight, mine.parts[1].weight], x, residual)
    expected = penalty(theirs, [wide, conv.weight, norm.weight], conv, norm, wide,
                       None if residual is None else residual.double())
    for one, other in zip(found, expected, strict=True):
        assert apart(one, other) < 1e-3


def test_a_remembered_step_follows_its_modules(calls: list[bool]) -> None:
    """Values, tensors, layouts, settings and modes may change between calls."""
    mine = block(nn.BatchNorm2d(12), "relu")
    conv, norm = mine.parts

    def step(*shape: int, seed: int = 0) -> None:
        require_same_step(mine, "relu", images(*shape, seed=seed), None)

    step(3, 8, 9, 11)
    with torch.no_grad():
        conv.weight.mul_(2)
    step(3, 8, 9, 11, seed=1)
    conv.weight = nn.Parameter(torch.randn(12, 8, 3, 3))
    step(3, 8, 9, 11, seed=2)
    conv.weight.data = conv.weight.data.contiguous(memory_format=LAST)
    step(3, 8, 9, 11, seed=3)
    step(2, 8, 5, 6)
    norm.eps, norm.momentum = 0.1, None
    step(3, 8, 9, 11, seed=4)
    conv.bias = None
    norm.affine, norm.weight, norm.bias = False, None, None
    step(3, 8, 9, 11, seed=5)
    norm.track_running_stats = False
    step(3, 8, 9, 11, seed=6)
    assert calls == [True] * 8


def test_what_a_remembered_step_leaves_to_torch(calls: list[bool]) -> None:
    """Though the call before was ours."""
    mine = block(nn.BatchNorm2d(12), "relu")
    x, seen = images(3, 8, 9, 11), []
    mine(x)
    assert calls == [True]
    handle = mine.parts[1].register_forward_hook(lambda *_: seen.append(True))
    mine(x)
    assert seen
    handle.remove()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine(x)
    for part in mine.parts:
        part.to(torch.float64)
    assert mine(x.double()).dtype == torch.float64
    assert calls.count(True) == 1


def test_a_remembered_step_leaves_forward_gradients_to_torch() -> None:
    mine = block(nn.BatchNorm2d(12, track_running_stats=False), "relu")
    conv, norm = mine.parts
    x, tangent = images(3, 8, 9, 11), images(3, 8, 9, 11, seed=1)
    mine(x)
    found = torch.func.jvp(mine, (x,), (tangent,))[1]
    expected = torch.func.jvp(lambda x: F.relu(norm(conv(x))), (x,), (tangent,))[1]
    assert apart(found, expected) < 1e-4


@pytest.mark.parametrize("frozen", ["conv", "norm", "both"])
def test_frozen_parts(frozen: str) -> None:
    mine = block(nn.BatchNorm2d(12), "relu")
    for name, part in zip(("conv", "norm"), mine.parts, strict=True):
        part.requires_grad_(frozen not in (name, "both"))
    twin = [copy.deepcopy(part) for part in mine.parts]
    x = images(3, 8, 9, 11)
    for wanted in (False, True):
        x = x.detach().requires_grad_(wanted)
        y, expected = mine(x), F.relu(twin[1](twin[0](x)))
        assert y.requires_grad == expected.requires_grad
        leaves = [t for part in mine.parts for t in part.parameters() if t.requires_grad]
        others = [t for part in twin for t in part.parameters() if t.requires_grad]
        if not (wanted or leaves):
            continue
        found = torch.autograd.grad(y.square().sum(), [x] * wanted + leaves)
        theirs = torch.autograd.grad(expected.square().sum(), [x] * wanted + others)
        for one, other in zip(found, theirs, strict=True):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-3)


# what the key of a remembered call does not see


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))
    return net, tilewise.optimize(copy.deepcopy(net))


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.weight", "1.bias", "3.bias"])
def test_a_parameter_that_is_a_plain_attribute_now_is_used(name: str, training: bool,
                                                           learns: bool) -> None:
    net, ours = (one.train(training) for one in pair())
    x = images(4, 8, 14, 14)
    with torch.set_grad_enabled(learns):
        for model in (net, ours):
            for _ in range(3):
                model(x)  # so that calls are remembered
            part, attribute = model[int(name[0])], name[2:]
            value = 3 * getattr(part, attribute).detach() + 1
            delattr(part, attribute)
            setattr(part, attribute, value)
        for _ in range(3):
            assert apart(ours(x), net(x)) < 1e-5
    assert apart(ours[1].running_mean, net[1].running_mean) < 1e-5


def test_shapes_that_are_wrong_are_told_in_the_words_of_a_convolution() -> None:
    _, ours = pair()
    with pytest.raises(InvalidProblem, match=r"input has shape \(8, 14, 14\), needs"):
        ours(images(1, 8, 14, 14)[0])
    ours[0].bias = nn.Parameter(torch.zeros(1))
    with pytest.raises(InvalidProblem, match=r"bias has shape \(1,\), needs \(16,\)"):
        ours(images(4, 8, 14, 14))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_images_that_hooks_save_in_another_type_are_read_as_floats(dtype: torch.dtype) -> None:
    x, found = images(4, 8, 14, 14), []
    # torch refuses them in another type
    for model, unpack in zip(pair(), (Tensor.float, lambda t: t), strict=True):
        with torch.autograd.graph.saved_tensors_hooks(
                lambda t: t.to(dtype) if t.shape == x.shape else t, unpack):
            y = model(x)
        y.sum().backward()
        found.append(model[0].weight.grad)
    assert apart(found[1], found[0]) < 1e-4


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_running_statistics_move_under_checkpoints_as_those_of_torch(
        calls: list[bool], reentrant: bool, alone: bool) -> None:
    net, mine = nn.BatchNorm2d(12), block(nn.BatchNorm2d(12))
    _, ours = mine.parts

    def run(x: Tensor) -> Tensor:
        if not alone:
            return mine(x)
        y = batch_norm.normalised(ours, x, None, None)
        assert y is not None
        return y

    for model, x in ((net, images(4, 12, 14, 14)), (run, images(4, 12 if alone else 8, 14, 14))):
        checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).sum().backward()
    assert ours.num_batches_tracked == net.num_batches_tracked == 2
    if alone:
        assert apart(ours.running_mean, net.running_mean) < 1e-5
    else:
        assert set(calls) == {True}  # a checkpoint ends the second one where it saves


# what a step keeps for its gradient


def learning(c: int = 8, **options: Any) -> Block:
    torch.manual_seed(1)
    return Block(nn.Conv2d(c, 16, 1, **options), nn.BatchNorm2d(16), "relu")


def test_a_convolutions_bias_may_change_before_the_backward_pass(calls: list[bool]) -> None:
    mine = learning()
    y = mine(images(4, 8, 14, 14))
    with torch.no_grad():
        mine.parts[0].bias.add_(1)
    y.sum().backward()
    assert calls == [True]


@pytest.mark.parametrize("frozen", [True, False])
def test_images_may_change_where_the_convolution_is_frozen(calls: list[bool],
                                                           frozen: bool) -> None:
    mine, x = learning(), images(4, 8, 14, 14)
    expected = torch.autograd.grad(mine(x).square().sum(), mine.parts[1].weight)[0]
    mine.parts[0].requires_grad_(not frozen)
    y = mine(x)
    x.zero_()
    if not frozen:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.square().sum().backward()
        return
    with torch.no_grad():
        mine.parts[0].weight.zero_()
    y.square().sum().backward()
    assert torch.equal(mine.parts[1].weight.grad, expected)
    assert calls == [True] * 2


def test_images_of_inference_mode_where_the_convolution_is_frozen(calls: list[bool]) -> None:
    mine = learning()
    mine.parts[0].requires_grad_(False)
    with torch.inference_mode():
        x = images(4, 8, 14, 14)
    mine(x).sum().backward()
    assert mine.parts[1].bias.grad is not None
    assert calls == [True]


@pytest.mark.parametrize("cast", [True, False])
def test_second_gradients_of_a_strided_filter_of_one_tap(
        calls: list[bool], monkeypatch: pytest.MonkeyPatch, cast: bool) -> None:
    """Torch sees it as a dense one: it corrupts its heap otherwise. Autocast does not reach it."""
    strides, conv2d = [], F.conv2d

    def seen(x: Tensor, weight: Tensor, bias: Any, stride: Any, *others: Any) -> Tensor:
        strides.append(stride)
        return conv2d(x, weight, bias, stride, *others)

    def penalty(run: Any, weight: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        y = run(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast and x.dtype == torch.float32):
            (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), (x, weight))

    mine, x = learning(stride=2), images(4, 8, 14, 14).requires_grad_()
    exact = nn.Sequential(*(copy.deepcopy(part).double() for part in mine.parts), nn.ReLU())
    expected = penalty(exact, exact[0].weight, x.detach().double().requires_grad_())
    with monkeypatch.context() as patch:
        patch.setattr("tilewise.conv.learned.F.conv2d", seen)
        found = penalty(mine, mine.parts[0].weight, x)
    for one, other in zip(found, expected, strict=True):
        assert apart(one, other) < (2e-2 if cast else 1e-3)  # torch's second gradients are cast
    assert calls == [True]
    assert strides == [(1, 1)]


def test_a_step_whose_executable_is_gone_is_found_anew(calls: list[bool]) -> None:
    one, other, x = learning(), learning(bias=False), images(4, 8, 14, 14)
    limit = ENGINE.executables.limit
    try:
        tilewise.set_cache_limit(executables=1)
        run = nn.Sequential(one, Block(nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8)), other)
        for _ in range(2):
            checkpoint(run, x.requires_grad_(), use_reentrant=False).sum().backward()
    finally:
        tilewise.set_cache_limit(executables=limit)
    assert set(calls) == {True}


def test_images_that_are_too_small_are_told() -> None:
    mine = block(nn.BatchNorm2d(12))
    mine.parts[0].padding = (0, 0)
    again = Block(*mine.parts)
    with pytest.raises(InvalidProblem):
        again(images(4, 8, 1, 14))


ENDS: dict[str, Any] = {
    "clamp": lambda x: torch.clamp(x, 0, 1), "an open side": lambda x: x.clamp(min=0),
    "clip": lambda x: x.clip(-1, 0), "hardtanh": lambda x: F.hardtanh(x, 0, 1), "relu6": F.relu6,
    "relu": F.relu, "as relu6": lambda x: x.clamp(0, 6), "nothing between": lambda x: x.clamp(0, 0)}


class Zeros(nn.Module):
    """Begins with zeros, as a last layer of a residual branch often does."""

    def __init__(self, ends: str, norm: bool, residual: bool) -> None:
        super().__init__()
        self.conv, self.ends, self.residual = nn.Conv2d(8, 8, 3, padding=1), ENDS[ends], residual
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()
        last = self.norm if norm else self.conv
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.first = nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(self.first(x)))
        return self.ends(y + x if self.residual else y)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_gradients_where_values_are_at_an_end(ends: str, norm: bool, residual: bool) -> None:
    """torch.clamp passes them, hardtanh does not: a layer of zeros would never learn."""
    torch.manual_seed(0)
    model = Zeros(ends, norm, residual)
    x = torch.randint(-1, 2, (2, 8, 6, 6)).float()
    fast = tilewise.optimize(copy.deepcopy(model), x)
    for one in (model, fast):
        one(x).square().add(one(x)).sum().backward()
    for (name, theirs), ours in zip(model.named_parameters(), fast.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-3, msg=name)

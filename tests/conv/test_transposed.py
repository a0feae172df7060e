"""Transposed convolutions: drop-ins for torch's, their gradients, models with them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.harness import sample
from torch import nn
from torch.nn import functional as F

import tilewise
from tilewise.core import InvalidProblem
from tilewise.model.captured import blocks
from tilewise.model.nn import (
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    TransposedBlock,
)

ACTIVATIONS: dict[str | None, Any] = {None: lambda x: x, "relu": F.relu, "silu": F.silu}


def drawn(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """An input, a weight, and options that torch takes."""
    while True:
        groups, k = rng.choice((1, 1, 2)), rng.choice((3, 8, 17))
        stride, dilation = ((rng.randint(1, 3), rng.randint(1, 3)) for _ in range(2))
        options = {"stride": stride, "padding": (rng.randint(0, 2), rng.randint(0, 2)),
                   "output_padding": tuple(rng.randrange(max(s, d))
                                           for s, d in zip(stride, dilation, strict=True)),
                   "groups": groups, "dilation": dilation}
        x = torch.randn(rng.randint(0, 2), groups * k, rng.randint(1, 9), rng.randint(1, 9))
        weight = torch.randn(groups * k, rng.randint(1, 18), rng.randint(1, 5), rng.randint(1, 5))
        if rng.random() < .6:
            x = x.contiguous(memory_format=torch.channels_last)
        try:
            F.conv_transpose2d(x.double(), weight.double(), **options)
        except RuntimeError:
            continue
        return x, weight, options


def error(y: torch.Tensor, expected: torch.Tensor) -> float:
    y, expected = y.detach().double(), expected.detach()
    return float((y - expected).norm() / max(1e-20, float(expected.norm())))


@pytest.mark.parametrize("seed", range(4))
def test_random_calls(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(sample(250, 25)):
        x, weight, options = drawn(rng)
        bias = torch.randn(weight.shape[1] * options["groups"]) if rng.random() < .5 else None
        y = F.conv_transpose2d(x.double(), weight.double(),
                               None if bias is None else bias.double(), **options)
        residual = torch.randn(y.shape) if rng.random() < .4 else None
        activation = rng.choice(tuple(ACTIVATIONS))
        expected = ACTIVATIONS[activation](y if residual is None else y + residual.double())
        found = tilewise.conv_transpose2d(x, weight, bias, **options, activation=activation,
                                          residual=residual)
        assert found.shape == expected.shape
        assert error(found, expected) < 2e-6, (x.shape, weight.shape, options)


@pytest.mark.parametrize("seed", range(2))
def test_gradients(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(12):
        x, weight, options = drawn(rng)
        if not len(x):
            continue
        bias = torch.randn(weight.shape[1] * options["groups"])
        activation = rng.choice(("relu", "silu"))
        ours = [t.clone().requires_grad_() for t in (x, weight, bias)]
        theirs = [t.double().requires_grad_() for t in (x, weight, bias)]
        y = tilewise.conv_transpose2d(*ours, **options, activation=activation)
        expected = ACTIVATIONS[activation](F.conv_transpose2d(*theirs, **options))
        grad = torch.randn(y.shape)
        for one, other in zip(torch.autograd.grad(y, ours, grad),
                              torch.autograd.grad(expected, theirs, grad.double()), strict=True):
            assert error(one, other) < 1e-5, (x.shape, weight.shape, options)


def test_gradients_of_gradients() -> None:
    x, weight = (torch.randn(*shape, dtype=torch.float32, requires_grad=True)
                 for shape in ((1, 3, 4, 5), (3, 2, 3, 3)))

    def penalty(run: Any, x: Any, weight: Any) -> torch.Tensor:
        y = run(x, weight, None, 2, 1)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    expected = penalty(F.conv_transpose2d, x.double(), weight.double())
    assert error(penalty(tilewise.conv_transpose2d, x, weight), expected.double()) < 1e-5


def test_one_axis() -> None:
    x, weight, bias = torch.randn(2, 8, 50), torch.randn(8, 6, 8), torch.randn(6)
    for options in ({"stride": 4, "padding": 2, "output_padding": 1}, {}, {"dilation": 3},
                    {"stride": (2,), "padding": (3,)}):
        y = tilewise.conv_transpose1d(x, weight, bias, **options, activation="relu")
        expected = F.relu(F.conv_transpose1d(x.double(), weight.double(), bias.double(), **options))
        assert y.shape == expected.shape
        assert error(y, expected) < 2e-6
    assert tilewise.conv_transpose1d(x[0], weight).shape == F.conv_transpose1d(x[0], weight).shape


def test_one_image_without_a_batch() -> None:
    x, weight = torch.randn(8, 5, 6), torch.randn(8, 4, 2, 2)
    assert torch.allclose(tilewise.conv_transpose2d(x, weight, stride=2),
                          F.conv_transpose2d(x, weight, stride=2), atol=1e-5)


@pytest.mark.usefixtures("by_our_kernels")
def test_phases_serve_it() -> None:
    x = torch.randn(1, 64, 24, 24).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(64, 64, 4, 4)
    with torch.inference_mode():
        found = tilewise.explain("n1c64h48w48k64r4s4u2p1_f32_backward_data+bias+relu")
        assert found.plan.algorithm.startswith("cpu_phases")
        y = tilewise.conv_transpose2d(x, weight, torch.zeros(64), 2, 1, activation="relu")
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("change", "says"), [
    ({"weight": torch.randn(5, 4, 3, 3)}, "input has 8 channels, needs 5"),
    ({"bias": torch.randn(3)}, r"bias has shape \(3,\), needs \(4,\)"),
    ({"residual": torch.randn(1, 4, 2, 2)}, "residual has shape"),
    ({"activation": "prelu"}, "activation is 'prelu'"),
    ({"weight": torch.randn(8, 4, 3, 3, dtype=torch.float64)}, "need one dtype"),
    ({"stride": (1, 2, 3)}, "stride is"),
    ({"padding": "same"}, "padding has 's'"),
])
def test_complaints(change: dict[str, Any], says: str) -> None:
    given = {"x": torch.randn(1, 8, 6, 6), "weight": torch.randn(8, 4, 3, 3), **change}
    with pytest.raises(InvalidProblem, match=says):
        tilewise.conv_transpose2d(**given)


@pytest.mark.parametrize("module", [ConvTranspose2d(6, 5, 3, 2, 1, 1), ConvTranspose1d(6, 5, 4, 2),
                                    ConvTranspose3d(6, 5, 3, 2, 1, 1)])
def test_modules(module: Any) -> None:
    axes = len(module.kernel_size)
    x = torch.randn(1, 6, *(9,) * axes)
    theirs = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[axes].forward
    for size in ([], [[20] * axes] if axes == 1 else [[18] * axes]):
        assert torch.allclose(module(x, *size), theirs(module, x, *size), atol=1e-5)


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.up = nn.Conv2d(3, 16, 3, padding=1), nn.ConvTranspose2d(16, 8, 2, 2)
        self.then = nn.ConvTranspose2d(8, 8, 4, 2, 1, groups=2, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(.5, 2)
        self.slopes = nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.slopes(self.norm(self.then(self.up(self.first(x)).relu())))


@pytest.mark.parametrize("keep", [True, False])
def test_in_models(keep: bool) -> None:
    torch.manual_seed(0)
    model, x = Up().eval(), torch.randn(2, 3, 11, 14)
    with torch.inference_mode():
        expected = model.double()(x.double())
        model.float()
        fast = tilewise.optimize(model, x, keep_original=keep)
        found = [block for block in blocks(fast) if isinstance(block, TransposedBlock)]
        assert [block.activation for block in found] == ["relu", None]
        assert [block._parts[1] is not None for block in found] == [False, keep]
        assert error(fast(x), expected) < 1e-5
        assert error(fast(x[..., :7]), model.double()(x[..., :7].double())) < 1e-5


def test_a_compiled_model() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(8, 4, 4, 4), torch.randn(1, 8, 6, 6, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        return tilewise.conv_transpose2d(x, weight, stride=2, padding=1, activation="relu")

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), run(x))
    first, second = (torch.autograd.grad(f(x).sum(), x)[0] for f in (compiled, run))
    assert torch.allclose(first, second)


def test_a_norm_behind_it_is_trained() -> None:
    """In training mode its statistics move; with gradients, torch's norm is called."""
    torch.manual_seed(0)
    ours = tilewise.optimize(Up())
    theirs = Up().double()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 8, 8)
    for mode in (True, False):
        found, expected = ours.train(mode)(x), theirs.train(mode)(x.double())
        assert error(found, expected) < 1e-5
        found.sum().backward()
        expected.sum().backward()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert error(one.grad, other.grad) < 1e-4
    assert error(ours.norm.running_mean, theirs.norm.running_mean) < 1e-5


def test_a_changed_norm_counts() -> None:
    model, x = Up().eval(), torch.randn(1, 3, 8, 8)
    fast = tilewise.optimize(model)
    with torch.inference_mode():
        fast(x)
        fast.norm.weight.mul_(3)
        assert error(fast(x), _plain(fast, x)) < 1e-5


def _plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    fresh = Up().eval().double()
    fresh.load_state_dict(model.state_dict())
    return fresh(x.double())


def test_the_backend_finds_it() -> None:
    from tilewise.model.dynamo import rewrite, transpose

    torch.manual_seed(0)
    model, x = Up().eval(), torch.randn(1, 3, 8, 8)
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        assert rewrite(graph) == 3
        seen.extend(node.kwargs["activation"] for node in graph.graph.nodes
                    if node.target is transpose)
        return graph.forward

    with torch.inference_mode():
        found = torch.compile(model, backend=backend)(x)
    assert seen == ["relu", None]
    assert error(found, _plain(model, x)) < 1e-5


@pytest.mark.parametrize("change", [
    {"bias": torch.zeros(1)}, {"bias": torch.zeros(64, dtype=torch.float64)},
    {"residual": torch.zeros(1, 64, 48, 48, dtype=torch.float16)},
    {"bias": torch.zeros(64, device="meta")}])
def test_every_call_is_checked(change: dict[str, Any]) -> None:
    """Also one whose plan is known: kernels look at nothing but addresses."""
    given = {"x": torch.randn(1, 64, 24, 24), "weight": torch.randn(64, 64, 4, 4), "stride": 2,
             "padding": 1, "bias": torch.zeros(64), "residual": torch.zeros(1, 64, 48, 48)}
    with torch.inference_mode():
        tilewise.conv_transpose2d(**given)
        with pytest.raises(InvalidProblem):
            tilewise.conv_transpose2d(**{**given, **change})


@pytest.mark.parametrize("conv", [nn.Conv1d(8, 6, 3), nn.ConvTranspose1d(8, 6, 3, 2)])
def test_signals_can_be_viewed(conv: nn.Module) -> None:
    """Tokens, turned: torch's result is contiguous."""
    fast = tilewise.optimize(nn.Sequential(conv, nn.ReLU()).eval())
    x = torch.randn(2, 20, 8).transpose(1, 2)
    with torch.inference_mode():
        y = fast(x)
        assert y.stride() == conv(x).stride()
        y.view(2, -1)


def test_a_norm_wants_a_batch() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 2, 2), nn.BatchNorm2d(6)).eval()
    with pytest.raises(ValueError, match="expected 4D input"):
        tilewise.optimize(model)(torch.randn(4, 3, 3))


def test_the_operator_is_as_it_says() -> None:
    args = (torch.randn(1, 8, 6, 6), torch.randn(8, 4, 4, 4), torch.randn(4), None, [2, 2], [1, 1],
            [0, 0], 1, [1, 1])
    torch.library.opcheck(torch.ops.tilewise.conv_transpose2d.default, args,
                          test_utils=("test_schema", "test_faketensor"))
    last = [args[0].contiguous(memory_format=torch.channels_last), *args[1:]]
    torch.library.opcheck(torch.ops.tilewise.conv_transpose2d.default, tuple(last),
                          test_utils=("test_schema", "test_faketensor"))

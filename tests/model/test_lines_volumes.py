"""Models with convolutions of one and of three axes: optimize, explain and the Dynamo backend."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.convolutions import assert_close, draw
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise
from tilewise.conv import slices, volumes
from tilewise.conv.running import ENGINE
from tilewise.model import dynamo
from tilewise.model.captured import blocks

CONVOLUTION: Any = {1: nn.Conv1d, 3: nn.Conv3d}
NORM: Any = {1: nn.BatchNorm1d, 3: nn.BatchNorm3d}
POOL: Any = {1: nn.MaxPool1d, 3: nn.MaxPool3d}
SIZES = {1: (30,), 3: (6, 8, 8)}


@pytest.fixture(autouse=True)
def by_slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch is never faster with a whole volume."""
    ENGINE.executables.clear()
    monkeypatch.setattr(slices, "pays", lambda *_: True)
    yield
    ENGINE.executables.clear()


class Net(nn.Module):
    """A residual block, a pool and a convolution without a norm."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        conv, norm = CONVOLUTION[axes], NORM[axes]
        self.first, self.norm = conv(4, 8, 3, padding=1), norm(8)
        self.second, self.other = conv(8, 8, 3, padding="same", bias=False), norm(8)
        self.pool, self.last = POOL[axes](2), conv(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = torch.relu(self.other(self.second(x)) + x)
        return F.gelu(self.last(self.pool(x)))


def net(axes: int) -> nn.Module:
    torch.manual_seed(axes)
    model = Net(axes)
    for module in model.modules():
        if isinstance(module, NORM[axes]):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model.eval()


def images(axes: int, batch: int = 2) -> Tensor:
    return draw(batch, 4, *SIZES[axes])


@pytest.mark.parametrize("axes", [1, 3])
def test_chains_become_blocks(axes: int) -> None:
    model, x = net(axes), images(axes)
    fast = tilewise.optimize(model, x)
    with torch.inference_mode():
        y = fast(x)
    assert [(block.axes, block.activation) for block in blocks(fast)] == [
        (axes, "relu"), (axes, "relu"), (axes, "gelu")]
    assert [block._parts[1] is not None for block in blocks(fast)] == [True, True, False]
    assert y.is_contiguous()
    assert_close(y.double(), copy.deepcopy(model).double()(x.double()))
    assert fast.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("axes", [1, 3])
def test_explain_names_the_layers(axes: int) -> None:
    found = tilewise.explain(tilewise.optimize(net(axes)), images(axes))
    assert list(dict.fromkeys(name for name, _ in found.layers)) == ["first", "second", "last"]
    steps = {str(one.problem.epilogue) for name, one in found.layers if name == "first"}
    assert steps == ({"+bias+relu"} if axes == 1 else {"+bias", "+residual", "+residual+relu"})


@pytest.mark.parametrize("axes", [1, 3])
def test_norms_and_weights_are_followed(axes: int) -> None:
    model, x = net(axes), images(axes)
    fast = tilewise.optimize(model)
    with torch.no_grad():
        fast(x)
        model.norm.running_var.mul_(3)
        model.second.weight[0].add_(1)
        y = fast(x)
        assert_close(y.double(), copy.deepcopy(model).double()(x.double()))


@pytest.mark.parametrize("axes", [1, 3])
def test_training_is_the_same(axes: int) -> None:
    model, x = net(axes).train(), images(axes)
    other = copy.deepcopy(model)
    fast = tilewise.optimize(other)
    fast(x).square().sum().backward()
    model(x).square().sum().backward()
    wanted = dict(model.named_parameters())
    for name, one in other.named_parameters():
        if name != "first.bias":  # which the norm takes away: noise alone
            assert_close(one.grad, wanted[name].grad, 1e-4)
    assert_close(other.norm.running_mean, model.norm.running_mean)


@pytest.mark.parametrize("axes", [1, 3])
def test_what_is_released(axes: int) -> None:
    model, x = net(axes), images(axes)
    fast = tilewise.optimize(model, x, keep_original=False)
    with torch.inference_mode():
        assert_close(fast(x), model(x))
        with pytest.raises(ValueError, match=f"expected {axes + 2}D input"):
            fast(x[0])


@pytest.mark.parametrize("axes", [1, 3])
def test_inputs_without_a_batch(axes: int) -> None:
    conv = CONVOLUTION[axes](4, 8, 3)
    model, x = nn.Sequential(conv, nn.PReLU()).eval(), images(axes)[0]
    with torch.no_grad():
        assert_close(tilewise.optimize(model)(x), model(x))
    normed = nn.Sequential(conv, NORM[axes](8)).eval()
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError)):  # as torch's
        tilewise.optimize(normed)(x)


def test_a_norm_of_another_axis_is_torchs() -> None:
    """Without a batch, (K, L) is for BatchNorm1d a batch of K with L channels."""
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8)).eval()
    model[1].running_mean.normal_()
    x = draw(4, 10)
    with torch.no_grad():
        assert_close(tilewise.optimize(model)(x), model(x))


def test_a_pool_of_images_behind_signals_is_torchs() -> None:
    """(N, K, L) is for max_pool2d an image without a batch."""
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.MaxPool2d(2)).eval()
    x = draw(2, 4, 10)
    with torch.no_grad():
        y = tilewise.optimize(model)(x)
        assert_close(y, model(x))
    assert y.shape == (2, 4, 4)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_volumes_stay_channels_last_between_blocks(layout: torch.memory_format,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net(3), images(3).contiguous(memory_format=layout)
    fast, seen = tilewise.optimize(model), []

    def noted(call: Any) -> Any:
        seen.append(call.x.is_contiguous(memory_format=torch.channels_last_3d))
        return slices.volume_of(call)

    monkeypatch.setattr(volumes, "volume_of", noted)
    with torch.inference_mode():
        assert fast(x).stride() == model(x).stride()
    assert seen == [True] * 3


def test_dropout_draws_the_same_numbers() -> None:
    model = nn.Sequential(nn.Conv3d(4, 8, 3, padding=1), nn.Dropout(), nn.Conv3d(8, 4, 3)).train()
    x, fast = images(3), tilewise.optimize(model)
    torch.manual_seed(3)
    wanted = model(x)
    torch.manual_seed(3)
    assert_close(fast(x), wanted)


@pytest.mark.parametrize("axes", [1, 3])
def test_the_backend(axes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "has_compiler", lambda: False)
    torch._dynamo.reset()
    model, x, counts = net(axes), images(axes), []

    def backend(graph: Any, inputs: Any) -> Any:
        counts.append(dynamo.rewrite(graph))
        left = [node for node in graph.graph.nodes if node.target in (F.batch_norm, F.gelu)]
        assert not left
        return graph.forward

    with torch.no_grad():
        assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert counts == [3]


class Padded(nn.Module):
    def __init__(self, axes: int) -> None:
        super().__init__()
        self.conv, self.sides = CONVOLUTION[axes](4, 8, 3), list(range(1, 2 * axes + 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, self.sides))


@pytest.mark.parametrize("axes", [1, 3])
def test_the_backend_takes_paddings_in(axes: int) -> None:
    torch._dynamo.reset()
    model, x, targets = Padded(axes).eval(), images(axes), []

    def backend(graph: Any, inputs: Any) -> Any:
        dynamo.rewrite(graph)
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    with torch.no_grad():
        assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert dynamo.convolve in targets
    assert not {F.pad, torch._C._nn.pad} & set(targets)


@pytest.mark.parametrize("axes", [1, 3])
def test_modules(axes: int) -> None:
    kind: Any = {1: tilewise.nn.Conv1d, 3: tilewise.nn.Conv3d}[axes]
    for mode in ("zeros", "circular"):
        ours = kind(4, 8, 3, padding=1, padding_mode=mode)
        theirs = CONVOLUTION[axes](4, 8, 3, padding=1, padding_mode=mode)
        theirs.load_state_dict(ours.state_dict())
        assert_close(ours(images(axes)), theirs(images(axes)))

"""Operations between convolutions: kernels of ours take torch's place, results stay the same."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tilewise
from tilewise.model import chains
from tilewise.model.captured import all_captured
from tilewise.model.effects import name_of
from tilewise.model.native import Native

pytestmark = pytest.mark.usefixtures("by_our_kernels")


class Between(nn.Module):
    """Two convolutions, and something between them."""

    def __init__(self, middle, channels=12, more=None) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 12, 3, padding=1)
        self.b = nn.Conv2d(channels, 4, 3, padding=1)
        self.middle = middle
        self.norm = nn.BatchNorm2d(12)
        for tensor in (self.norm.running_mean, self.norm.running_var, self.norm.weight,
                       self.norm.bias):
            nn.init.uniform_(tensor, 0.5, 1.5)
        self.gamma = nn.Parameter(torch.rand(12, 1, 1))
        self.extra = more

    def forward(self, x):
        x = self.a(x)
        return self.b(self.middle(self, x, torch.sigmoid))


def squeeze(net, x, sigmoid):
    return x * sigmoid(F.adaptive_avg_pool2d(x, 1))


MIDDLES = {
    "silu of a sum": lambda net, x, f: F.silu(x + x * 2),
    "norm and relu": lambda net, x, f: F.relu(net.norm(torch.cat((x[:, :6], x[:, 6:]), 1))),
    "functional norm": lambda net, x, f: F.batch_norm(
        x * 2, net.norm.running_mean, net.norm.running_var, net.norm.weight, net.norm.bias,
        False, 0.1, net.norm.eps),
    "squeeze and excitation": squeeze,
    "by channel": lambda net, x, f: (x * net.gamma + x) / 3,
    "from a number": lambda net, x, f: 1 - x.tanh() * 0.5,
    "cat": lambda net, x, f: torch.cat([x.relu(), F.gelu(x)[:, 3:6], x], dim=1)[:, :12],
    "max pool": lambda net, x, f: F.max_pool2d(x, 3, 2, 1),
    "average pool": lambda net, x, f: F.avg_pool2d(x, 3, stride=2, padding=1),
    "adaptive": lambda net, x, f: F.adaptive_avg_pool2d(x, (6, 4)),
    "nearest": lambda net, x, f: F.interpolate(x, scale_factor=2),
    "bilinear by size": lambda net, x, f: F.interpolate(
        x, size=(x.shape[2] * 2, x.shape[-1] + 3), mode="bilinear", align_corners=False),
    "chunk": lambda net, x, f: torch.cat([part.relu() * 2 for part in x.chunk(3, 1)], 1),
    "mean": lambda net, x, f: x - x.mean((2, 3), keepdim=True),
    "sum in place": lambda net, x, f: F.relu(net.norm(x * 2).add_(x * 3), inplace=True),
    "written twice": lambda net, x, f: (x * 2).add_(1).mul_(x.sigmoid()).relu_(),
    "maximum of pools": lambda net, x, f: F.max_pool2d(x, 5, 1, 2) + F.max_pool2d(x, 3, 1, 1),
}


def steps_of(model):
    return [step for captured in all_captured(model) for captures in captured.captures.values()
            for capture in captures for step in capture.steps.values()]


def programs_of(model):
    return [bound.program for captured in all_captured(model)
            for captures in captured.captures.values()
            for capture in captures for bound in capture.programs.bound]


@pytest.mark.parametrize("shape", [(1, 3, 24, 20), (2, 3, 17, 9)])
@pytest.mark.parametrize("name", MIDDLES)
def test_results_are_torchs_and_no_step_is(name, shape):
    torch.manual_seed(0)
    net = Between(MIDDLES[name]).eval()
    model = tilewise.optimize(net)
    x = torch.randn(shape)
    with torch.inference_mode():
        expected = copy.deepcopy(net).double()(x.double())
        for _ in range(3):
            found = model(x)
            assert found.shape == expected.shape
            assert (found - expected).norm() <= 3e-6 * expected.norm()
    assert any(isinstance(step, Native) for step in steps_of(model))
    (program,) = programs_of(model)
    assert program.steps_of_torch == 0


def test_what_is_written_in_place_and_read_again_stays_torchs():
    def middle(net, x, f):
        y = x.relu_()
        x += 1
        return y * x

    net = Between(middle).eval()
    model = tilewise.optimize(net)
    x = torch.randn(1, 3, 20, 20)
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(model(x), net(x))


def test_a_chain_is_cut_where_an_operand_is_written():
    def middle(net, x, f):
        y = x * 2
        z = y + 1
        w = z.clone()
        x.mul_(0)
        return w.sigmoid() * z + x

    net = Between(middle).eval()
    model = tilewise.optimize(net)
    x = torch.randn(1, 3, 20, 20)
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(model(x), net(x))


def test_gradients_go_through_what_torch_had():
    net = Between(MIDDLES["norm and relu"]).eval()
    model = tilewise.optimize(net)
    x = torch.randn(1, 3, 20, 20)
    model(x).sum().backward()
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    net(x).sum().backward()
    expected = [p.grad for p in net.parameters() if p.grad is not None]
    assert len(found) == len(expected) > 4
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


class Modules(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3), nn.MaxPool2d(3, 2, 1), nn.BatchNorm2d(8), nn.SiLU(),
                         nn.Upsample(scale_factor=2), nn.AvgPool2d(2), nn.Conv2d(8, 8, 1),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_modules_are_rows_too():
    net = Modules().eval()
    model = tilewise.optimize(net)
    x = torch.randn(2, 3, 30, 30)
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(model(x), net(x))
    (program,) = programs_of(model)
    assert program.steps_of_torch == 0


@pytest.mark.parametrize("change", [
    lambda m: setattr(m[1], "kernel_size", 5), lambda m: setattr(m[1], "stride", 1),
    lambda m: setattr(m[4], "mode", "bilinear"), lambda m: setattr(m[2], "eps", 1.0),
    lambda m: m[2].train(), lambda m: setattr(m[5], "count_include_pad", False),
    lambda m: m[2].running_mean.fill_(3), lambda m: m[2].weight.data.fill_(3),
    lambda m: setattr(m[2], "weight", nn.Parameter(torch.rand(8)))])
def test_changes_of_modules_are_followed(change):
    torch.manual_seed(0)
    net = Modules().eval()
    net[5].padding = 1
    model = tilewise.optimize(net)
    x = torch.randn(2, 3, 30, 30)
    with torch.inference_mode():
        for _ in range(3):
            model(x)
    other = copy.deepcopy(net)
    torch.manual_seed(1)
    change(other)
    torch.manual_seed(1)
    with torch.no_grad():
        change(model)
        for _ in range(3):
            torch.testing.assert_close(model(x), other(x))


def names(model):
    return [name_of(node) for node in model.body.graph.nodes]


def test_a_released_model_is_saved_with_its_operations():
    net = Modules().eval()
    model = tilewise.optimize(net, torch.randn(1, 3, 30, 30), keep_original=False)
    x = torch.randn(2, 3, 30, 30)
    with torch.inference_mode():
        loaded = pickle.loads(pickle.dumps(model))
        for again in (model, loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(loaded))):
            for _ in range(3):
                torch.testing.assert_close(again(x), net(x))
            assert names(again) == names(model)
            (bound,) = again.whole.programs.bound
            assert bound.program.steps_of_torch == 0
    assert "8 steps" in str(tilewise.profile(model, x))


@torch.inference_mode()
def test_programs_of_a_released_model_follow_it():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.PReLU(8), nn.MaxPool2d(3), nn.Conv2d(8, 4, 3)).eval()
    x = torch.randn(1, 3, 20, 20)
    model = tilewise.optimize(net, x, keep_original=False)
    for _ in range(4):
        model(x)
    assert model.whole.programs.bound
    before = model(x)
    for parameter in model.parameters():
        parameter.mul_(2)
    changed = model(x)
    torch.testing.assert_close(changed, model.body(x)[0])
    assert not torch.allclose(before, changed, rtol=0.1)
    last = list(model.body.children())[-1]
    for change in (lambda: setattr(last, "activation", "tanh"),
                   lambda: setattr(last, "forward", lambda x: x * 2)):
        for _ in range(3):
            model(x)
        change()
        for _ in range(3):
            torch.testing.assert_close(model(x), model.body(x)[0])
    del last.forward
    calls = []
    for _ in range(3):
        model(x)
    last.register_forward_hook(lambda *args: calls.append(1))
    model(x)
    assert calls


def test_a_released_model_that_was_never_called_is_compiled_and_exported():
    net = Modules().eval()
    x = torch.randn(1, 3, 30, 30)
    model = tilewise.optimize(net, x, keep_original=False)
    with torch.no_grad():
        found = torch.compile(model, backend="eager", fullgraph=True)(x)
        exported = torch.export.export(copy.deepcopy(model), (x,), strict=True)
        torch.testing.assert_close(found, net(x))
        torch.testing.assert_close(exported.module()(x), net(x))


@torch.inference_mode()
def test_a_released_model_owns_its_norms():
    net = Modules().eval()
    x = torch.randn(1, 3, 30, 30)
    expected = net(x)
    model = tilewise.optimize(net, x, keep_original=False)
    assert len(model.state_dict()) > 4
    torch.testing.assert_close(model.double()(x.double()).float(), expected)
    torch.testing.assert_close(net(x), expected)  # which is still of floats


def test_loading_leaves_nothing_behind():
    model = tilewise.optimize(Modules().eval(), torch.randn(1, 3, 30, 30), keep_original=False)
    before = len(torch.fx._symbolic_trace._wrapped_fns_to_patch)
    copy.deepcopy(pickle.loads(pickle.dumps(model)))
    assert len(torch.fx._symbolic_trace._wrapped_fns_to_patch) == before


def test_the_tests_notice_a_wrong_chain(monkeypatch):
    right = chains._scale

    def wrong(*args):
        scale, shift = right(*args)
        return scale, shift * 1.001

    monkeypatch.setattr(chains, "_scale", wrong)
    with pytest.raises(AssertionError):
        test_results_are_torchs_and_no_step_is("norm and relu", (1, 3, 24, 20))

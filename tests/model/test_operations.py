"""Operations between convolutions: torch's results, by kernels alone, also when tensors change."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tilewise
from tilewise.model.captured import all_captured
from tilewise.model.native import Native


def captures_of(model):
    return [capture for captured in all_captured(model) for captures in captured.captures.values()
            for capture in captures]


def names_of(model):
    return [step.name for capture in captures_of(model) for step in capture.steps.values()
            if isinstance(step, Native)]


def check(net, x, by_kernels=True):
    """The model, after three calls: torch's results, by kernels alone or not."""
    net, x = net.eval(), x.contiguous(memory_format=torch.channels_last)  # nothing is turned
    model = tilewise.optimize(net)
    with torch.inference_mode():
        expected = net(x)
        for _ in range(3):
            torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    (bound,) = [bound for capture in captures_of(model) for bound in capture.programs.bound]
    assert (bound.program.steps_of_torch == 0) == by_kernels
    return model


class Between(nn.Module):
    """Something between two convolutions."""

    def __init__(self, between, channels=24, after=None):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, channels, 3), nn.Conv2d(after or channels, 5, 1)
        self.between = between

    def forward(self, x):
        return self.b(self.between(self.a(x)))


class Call(nn.Module):
    """A function of torch's, and tensors of a module of its own."""

    def __init__(self, function, channels=24):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(channels)), nn.Parameter(
            torch.rand(channels))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight, self.bias)


class Permuted(nn.Module):
    """A norm of channels, as images that are channels-last in their sizes have it."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def affine(norm):
    """With a weight and a bias that make a difference."""
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.bias.uniform_(-1, 1)
    return norm


def layer_function(x, weight, bias):
    return F.layer_norm(x.permute(0, 2, 3, 1), (24,), weight, bias, 1e-6).permute(0, 3, 1, 2)


def responses(x, weight, bias):
    """Global response norm, as ConvNeXtV2 has it."""
    length = x.norm(p=2, dim=(2, 3), keepdim=True)
    share = length / (length.mean(dim=1, keepdim=True) + 1e-6)
    return x + torch.addcmul(bias.view(1, -1, 1, 1), weight.view(1, -1, 1, 1), x * share)


def responses_last(x, weight, bias):
    """The same of images that are channels-last in their sizes."""
    x = x.permute(0, 2, 3, 1)
    length = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    share = length / (length.mean(dim=-1, keepdim=True) + 1e-6)
    return (x + torch.addcmul(bias, weight, x * share)).permute(0, 3, 1, 2)


def split_attention(x, weight, bias):
    """The sum of two halves by their shares, as ResNeSt has it."""
    n, c, h, w = x.shape
    halves = x.reshape(n, 2, c // 2, h, w)
    share = halves.sum(dim=1).mean((2, 3), keepdim=True).sigmoid()
    both = torch.cat([share, 1 - share], 1).reshape(n, 2, c // 2, 1, 1)
    return (halves * both).sum(dim=1).contiguous()


def added_to_a_slice(x, weight, bias):
    """In place, to a view of what nobody else reads, as GhostNet has it."""
    y = torch.cat([x, x * 2], 1)[:, :24]
    y += x
    return y


CASES = {
    "mean of channels": (lambda: Call(lambda x, w, b: x - x.mean(1, keepdim=True)), "mean"),
    "largest of channels": (lambda: Call(lambda x, w, b: x - x.amax(1, keepdim=True)), "amax"),
    "largest of pixels": (lambda: Call(lambda x, w, b: x - torch.amax(x, (2, 3), True)), "amax"),
    "sum of pixels": (lambda: Call(lambda x, w, b: x - torch.sum(x, [2, 3], keepdim=True)), "sum"),
    "length": (lambda: Call(lambda x, w, b: x / torch.norm(x, dim=1, keepdim=True)), "norm"),
    "response norm": (lambda: Call(responses), "mul fma add"),
    "response norm, channels last": (lambda: Call(responses_last), "mul fma add"),
    "added to a slice": (lambda: Call(added_to_a_slice), "add"),
    "dropout that drops nothing": (
        lambda: Call(lambda x, w, b: F.dropout(x, 0.2, training=False).mean(1, True) + x), "add"),
    "layer norm": (lambda: Permuted(affine(nn.LayerNorm(24))), "layer norm"),
    "layer norm, plain": (lambda: Permuted(nn.LayerNorm(24, elementwise_affine=False)),
                          "layer norm"),
    "layer norm, a function": (lambda: Call(layer_function), "layer norm"),
    "group norm": (lambda: affine(nn.GroupNorm(4, 24)), "group norm"),
    "group norm, a function": (lambda: Call(lambda x, w, b: F.group_norm(x, 3, w, b, 1e-3)),
                               "group norm"),
    "group norm, SiLU": (lambda: nn.Sequential(affine(nn.GroupNorm(4, 24)), nn.SiLU()),
                         "group norm silu"),
    "instance norm": (lambda: nn.InstanceNorm2d(24), "instance norm"),
    "instance norm, LeakyReLU in place": (
        lambda: nn.Sequential(affine(nn.InstanceNorm2d(24, affine=True)),
                              nn.LeakyReLU(0.2, inplace=True)), "instance norm leaky_relu:0.2"),
    "instance norm, a function": (
        lambda: Call(lambda x, w, b: F.instance_norm(x, None, None, w, b, momentum=0.3)),
        "instance norm"),
    "softmax": (lambda: nn.Softmax(1), "softmax"),
    "softmax, a function": (lambda: Call(lambda x, w, b: F.softmax(x, dim=1)), "softmax"),
    "softmax, a method": (lambda: Call(lambda x, w, b: x.softmax(1)), "softmax"),
    "softmax of images": (lambda: nn.Softmax2d(), "softmax"),
    "channel shuffle": (lambda: nn.ChannelShuffle(3), "channel shuffle"),
    "channel shuffle, a function": (lambda: Call(lambda x, w, b: F.channel_shuffle(x, 4)),
                                    "channel shuffle"),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_run_it(name):
    torch.manual_seed(0)
    make, called = CASES[name]
    assert called in names_of(check(Between(make()), torch.randn(2, 3, 13, 12)))


def test_split_attention():
    torch.manual_seed(0)
    model = check(Between(Call(split_attention), after=12), torch.randn(2, 3, 13, 12))
    assert {"sum", "mul", "mean"} <= set(names_of(model))


def test_softmax_of_the_last_axis():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 20, 1)

        def forward(self, x):
            return torch.softmax(self.b(self.a(x)).mean((2, 3)), -1)

    torch.manual_seed(0)
    assert "softmax" in names_of(check(Net(), torch.randn(2, 3, 13, 12)))


# channel shuffles that are views


def by_torchvision(x, groups=2):
    n, c, h, w = x.size()
    x = x.view(n, groups, c // groups, h, w)
    return torch.transpose(x, 1, 2).contiguous().view(n, c, h, w)


def with_unknown_sizes(x, groups=3):
    n, _, h, w = x.shape
    return x.reshape(n, groups, -1, h, w).transpose(1, 2).reshape(n, -1, h, w)


def by_permutation(x, groups=4):
    n, c, h, w = x.shape
    return x.reshape(n, groups, c // groups, h, w).permute(0, 2, 1, 3, 4).flatten(1, 2)


@pytest.mark.parametrize("shuffle", [by_torchvision, with_unknown_sizes, by_permutation])
def test_views_that_shuffle_channels(shuffle):
    torch.manual_seed(0)
    net = Between(Call(lambda x, w, b: shuffle(x)))
    assert "channel shuffle" in names_of(check(net, torch.randn(2, 3, 13, 12)))


def to_other_sizes(x):
    """The same nodes, but what comes out is no shuffle of channels."""
    n, c, h, w = x.shape
    return x.reshape(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c // 2, 2 * h, w)


def over_images(x):
    n, c, h, w = x.shape
    return x.reshape(1, n, c, h, w).transpose(1, 2).reshape(n, c, h, w)


def test_views_that_only_look_like_it():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 13, 12)
    check(Between(Call(lambda x, w, b: to_other_sizes(x)), after=12), x, by_kernels=False)
    check(Between(Call(lambda x, w, b: over_images(x))), x, by_kernels=False)


def test_what_is_read_in_between_stays():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 20, 1)

        def forward(self, x):
            n, c, h, w = (x := self.a(x)).shape
            view = x.reshape(n, 2, c // 2, h, w)
            return self.b(view.transpose(1, 2).reshape(n, c, h, w)), view * 2

    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(2, 3, 13, 12)
    model = tilewise.optimize(net)
    with torch.inference_mode():
        for _ in range(4):
            for found, expected in zip(model(x), net(x), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# changes


def change_weight(norm):
    norm.weight.data.mul_(3)


def replace_weight(norm):
    norm.weight = nn.Parameter(torch.randn_like(norm.weight))


def change_bias(norm):
    norm.bias.add_(1)


def change_eps(norm):
    norm.eps = 2.0


CHANGES = [change_weight, replace_weight, change_bias, change_eps]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("make", [lambda: nn.GroupNorm(4, 24), lambda: nn.GroupNorm(24, 24),
                                  lambda: nn.InstanceNorm2d(24, affine=True),
                                  lambda: nn.LayerNorm(24)])
def test_changes_are_followed(make, change):
    torch.manual_seed(0)
    norm = affine(make())
    net = Between(Permuted(norm) if isinstance(norm, nn.LayerNorm) else norm)
    x = torch.randn(1, 3, 20, 22)
    model = check(net, x)
    before = net(x)
    with torch.no_grad():
        change(norm)
        for module in model.modules():
            if type(module) is type(norm):
                module.weight, module.bias, module.eps = norm.weight, norm.bias, norm.eps
    with torch.inference_mode():
        after = net(x)
        assert not torch.allclose(before, after, atol=1e-3)
        for _ in range(4):
            torch.testing.assert_close(model(x), after, rtol=1e-4, atol=1e-4)


def test_other_groups_are_followed():
    torch.manual_seed(0)
    net, x = Between(affine(nn.GroupNorm(4, 24))), torch.randn(1, 3, 20, 22)
    model = check(net, x)
    for other in (net, model):
        other.between.num_groups = 2
    with torch.inference_mode():
        for _ in range(4):
            torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-4)


def test_running_statistics_are_torchs():
    torch.manual_seed(0)
    norm = nn.InstanceNorm2d(24, track_running_stats=True)
    norm.running_mean.uniform_(-1, 1)
    net, x = Between(norm).eval(), torch.randn(2, 3, 13, 12)
    model = tilewise.optimize(net)
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-4)
    assert "instance norm" not in names_of(model)


@pytest.mark.parametrize("name", ["group norm, SiLU", "instance norm", "channel shuffle"])
def test_gradients_are_torchs(name):
    torch.manual_seed(0)
    net, x = Between(CASES[name][0]()).eval(), torch.randn(2, 3, 13, 12)
    model = check(net, x)
    found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(found).square().sum().backward()
    net(expected).square().sum().backward()
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-3)


def test_a_view_behind_one_convolution_is_still_possible():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Conv2d(3, 8, 3)

        def forward(self, x):
            return F.softmax(self.a(x), dim=1).view(x.shape[0], -1)

    torch.manual_seed(0)
    net = Net().eval()
    model = tilewise.optimize(net)
    x = torch.randn(2, 3, 13, 12).contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-4)

"""Convolutions of every kind, modules or functions, with what may follow them."""

import torch
from torch import nn
from torch.nn import functional as F

from .case import conv, forward, image, norm, script


def layer(make, *after):
    return lambda: nn.Sequential(make(), *[part() for part in after])


def two_calls(model):
    x = image()
    return model(x), model(image(2)), x


def plain(name, make, *after):
    """A case: one layer, with what follows it."""
    def run(model):
        return two_calls(model)
    run.__name__ = name
    script(layer(make, *after))(run)


for name, options in {
        "depthwise": {"groups": 8}, "grouped": {"groups": 2}, "dilated": {"dilation": 2},
        "strided": {"stride": 2}, "stride_by_axis": {"stride": (1, 2)}, "no_bias": {"bias": False},
        "padding_same": {"padding": "same"}, "padding_valid": {"padding": "valid"},
        "padding_by_axis": {"padding": (0, 1)}, "wide_padding": {"padding": 4},
        "reflect": {"padding_mode": "reflect"}, "circular": {"padding_mode": "circular"}}.items():
    plain(name, lambda options=options: conv(**options), norm, nn.ReLU)

plain("pointwise", lambda: nn.Conv2d(8, 8, 1), norm, nn.ReLU)
plain("one_sided_filter", lambda: nn.Conv2d(8, 8, (1, 3), padding=(0, 1)), nn.ReLU)
plain("other_channels", lambda: nn.Conv2d(8, 3, 3), lambda: nn.ReLU6(), lambda: nn.MaxPool2d(2))
plain("transposed", conv, lambda: nn.ConvTranspose2d(8, 8, 2, 2), nn.ReLU, conv)


def lazy():
    """With the weights of its first call, which draws them."""
    made = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU())
    made(torch.randn(1, 8, 9, 9))
    return made


plain("lazy", lazy)


class Scaled(nn.Conv2d):
    """A subclass that standardises its weight."""

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class Padded(nn.Conv2d):
    """A subclass that changes only how it convolves."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x * 2, weight, bias)


plain("subclass_with_its_forward", lambda: Scaled(8, 8, 3, padding=1), norm, nn.ReLU)
plain("subclass_with_its_convolution", lambda: Padded(8, 8, 3, padding=1), norm, nn.ReLU)


class MyNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + 1


class MyReLU(nn.ReLU):
    def forward(self, x):
        return super().forward(x) * 2


plain("subclass_of_norm", conv, lambda: MyNorm(8), nn.ReLU)
plain("subclass_of_relu", conv, norm, MyReLU)


@script(lambda: nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU()),
        example=lambda: torch.randn(1, 8, 9))
def one_dimension(model):
    return model(torch.randn(1, 8, 9)), model(torch.randn(2, 8, 11))


@script(lambda: nn.Sequential(nn.Conv3d(2, 2, 3, padding=1), nn.BatchNorm3d(2), nn.ReLU()),
        example=lambda: torch.randn(1, 2, 4, 5, 6))
def three_dimensions(model):
    return model(torch.randn(1, 2, 4, 5, 6))


@forward()
def function_with_own_weight(self, x):
    return F.relu(F.conv2d(x, self.c.weight, self.c.bias, padding=1))


@forward()
def function_with_computed_weight(self, x):
    weight = self.c.weight / self.c.weight.norm()
    return F.relu(F.conv2d(x, weight, padding=1) + x)


@forward()
def function_with_weight_from_data(self, x):
    weight = x.mean((0, 2, 3)).view(8, 1, 1, 1).expand(8, 1, 3, 3)
    return F.conv2d(x, weight, padding=1, groups=8)


@forward()
def function_with_names(self, x):
    return F.relu(F.conv2d(weight=self.c.weight, input=x, stride=(1, 1), padding="same"))


@forward()
def torch_conv2d(self, x):
    return torch.conv2d(x, self.c.weight, self.c.bias, 1, 1), torch.convolution(
        x, self.d.weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


@forward(parts=lambda: {"kernel": nn.Buffer(torch.ones(8, 1, 3, 3) / 9)})
def blur_with_a_buffer(self, x):
    return self.c(F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), self.kernel, groups=8))


@forward()
def zero_padded_before(self, x):
    y = F.conv2d(F.pad(x, (0, 1, 2, 1)), self.c.weight)
    return self.relu(y), self.c(F.pad(x, (1, 0, 0, 0)))


@forward()
def padded_with_ones_before(self, x):
    return F.conv2d(F.pad(x, (1, 1, 1, 1), value=1.0), self.c.weight), F.pad(self.c(x), (-1, -1))


@forward(parts=lambda: {"pad": nn.ZeroPad2d(1), "e": conv(padding=0)})
def zero_pad_module(self, x):
    p = self.pad(x)
    return self.relu(self.bn(self.e(p))), p


@forward(parts=lambda: {"weights": nn.Parameter(torch.randn(2, 8, 8, 3, 3))})
def mixture_of_weights(self, x):
    weight = (self.weights * x.mean().sigmoid()).sum(0)
    return self.relu(F.conv2d(x, weight, padding=1))


@forward(parts=lambda: {"act": nn.PReLU(8)})
def learned_activation(self, x):
    return self.act(self.bn(self.c(x)))


ACTIVATIONS = (F.gelu, F.silu, F.hardswish, F.elu, F.softplus, torch.tanh, F.leaky_relu, F.mish)


@forward()
def many_activations(self, x):
    y = self.c(x)
    return [f(y) for f in ACTIVATIONS], F.hardtanh(self.c(x), 0, 6), F.hardtanh(self.c(x), -1, 6)


@forward()
def relu6_and_clamps(self, x):
    return F.relu6(4 * self.c(x)), self.c(x).clamp(min=0), self.c(x).clamp(0, 6), F.threshold(
        self.c(x), 0.1, 0)


@forward()
def not_a_number(self, x):
    y = self.c(x.masked_fill(x > 2, float("nan")))
    return self.relu(y), self.pool(y), F.relu6(y)


@forward()
def infinite(self, x):
    y = self.c(torch.full_like(x, float("inf")))
    return self.relu(y), self.bn(y)


@forward(parts=lambda: {"c": nn.utils.parametrizations.weight_norm(conv())})
def weight_norm_from_the_start(self, x):
    return self.relu(self.bn(self.c(x)))


@forward(parts=lambda: {"c": nn.utils.parametrizations.spectral_norm(conv())})
def spectral_norm_from_the_start(self, x):
    return self.relu(self.c(x))


@forward(parts=lambda: {"c": nn.utils.weight_norm(conv())})
def old_weight_norm_from_the_start(self, x):
    return self.relu(self.bn(self.c(x)))


@forward(parts=lambda: {"c": nn.utils.prune.l1_unstructured(conv(), "weight", 0.5)})
def pruned_from_the_start(self, x):
    return self.relu(self.bn(self.c(x)))

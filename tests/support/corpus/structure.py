"""Graphs of modules: sharing, recursion, containers, residuals."""

import torch
from torch import nn
from torch.nn import functional as F

from .case import Net, conv, forward, image, norm, row, script


@forward()
def conv_called_twice(self, x):
    return self.c(self.relu(self.c(x)))


@forward(parts=lambda: {"bn": norm()})
def norm_called_twice(self, x):
    return self.relu(self.bn(self.d(self.relu(self.bn(self.c(x))))))


@forward()
def two_consumers(self, x):
    y = self.c(x)
    return self.relu(y) + self.d(y)


@forward()
def norm_and_relu_of_the_same(self, x):
    y = self.c(x)
    return self.bn(y), self.relu(y)


@forward()
def residual_is_the_input(self, x):
    return self.relu(self.c(x) + x)


@forward()
def residual_from_the_left(self, x):
    return self.relu(x + self.bn(self.c(x)))


@forward()
def residual_is_a_conv(self, x):
    return self.relu(self.c(x) + self.bn(self.d(x)))


@forward()
def twice_itself(self, x):
    y = self.c(x)
    return self.relu(y + y)


@forward()
def itself_and_its_relu(self, x):
    y = self.c(x)
    return y + self.relu(y)


@forward()
def residual_broadcasts(self, x):
    return self.relu(self.c(x) + x.mean((2, 3), keepdim=True)), self.c(x) + x[:, :1]


@forward()
def result_broadcasts(self, x):
    return self.relu(self.c(x[:1]) + torch.ones(3, 8, 9, 9)), self.c(x) + torch.ones(2, 1, 8, 9, 9)


@forward()
def residual_of_other_type(self, x):
    return self.c(x) + x.double(), self.relu(self.d(x) + x.int()), self.c(x) + (x > 0)


@forward()
def residual_is_a_number(self, x):
    return self.relu(self.c(x) + 1), 2 + self.c(x), self.relu(torch.add(self.c(x), 3))


@forward()
def weighted_sum(self, x):
    return self.relu(torch.add(self.c(x), x, alpha=0.5)), self.d(x).add(x, alpha=-2)


@forward()
def subtracted(self, x):
    return self.relu(self.c(x) - x), x - self.d(x), self.c(x).mul(x)


@forward(parts=lambda: {"gamma": nn.Parameter(torch.rand(8, 1, 1))})
def scaled_residual(self, x):
    return self.relu(self.c(x) * self.gamma + x)


@forward(parts=lambda: {"shift": nn.Parameter(torch.rand(1, 8, 9, 9))})
def residual_is_a_parameter(self, x):
    return self.relu(self.c(x) + self.shift)


def tied():
    model = nn.Sequential(conv(), nn.ReLU(), conv(), norm())
    model[2].weight = model[0].weight
    return model


@script(tied, released=False)
def tied_weights(model):
    x = image()
    return model(x), model.state_dict().keys() is not None, len(list(model.parameters()))


@script(tied, edits=True)
def tied_weights_changed(model):
    x = image()
    first = model(x)
    with torch.no_grad():
        next(model.parameters()).add_(0.1)
    return first, model(x), len(list(model.parameters()))


def shared_layer():
    layer = conv()
    return nn.Sequential(layer, nn.ReLU(), layer, norm(), layer)


@script(shared_layer, released=False)
def same_layer_three_times(model):
    return model(image()), len(list(model.parameters()))


class Recursive(Net):
    def forward(self, x, depth=2):
        y = self.relu(self.c(x))
        return y if depth == 0 else y + self(x, depth - 1)


@script(Recursive)
def recursion(model):
    return model(image()), model(image(), 0), model(image(), depth=1)


class Tree(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.layer = conv()
        self.branches = nn.ModuleList(Tree(depth - 1) for _ in range(2 if depth else 0))

    def forward(self, x):
        y = F.relu(self.layer(x))
        return y if not self.branches else y + sum(branch(y) for branch in self.branches)


@script(Tree, released=False)
def tree(model):
    return model(image()), len(list(model.modules()))


@script(lambda: nn.Sequential(nn.Sequential(conv(), norm()), nn.Sequential(nn.ReLU(), row())),
        released=False)
def nested_sequentials(model):
    return model(image()), getattr(model, "0")(image())


class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.paths = nn.ModuleDict({"conv": conv(), "norm": norm(), "both": row()})
        self.weights = nn.ParameterList([torch.rand(8, 1, 1), torch.rand(1)])
        self.named = nn.ParameterDict({"shift": torch.rand(1)})

    def forward(self, x, names=("conv",)):
        for name in names:
            x = self.paths[name](x)
        for weight in self.weights:
            x = x * weight
        return x + self.named["shift"]


@script(Choice)
def module_dict_and_parameter_list(model):
    x = image()
    return model(x), model(x, ("norm", "both")), model(x, ()), "conv" in model.paths


@script(nn.Sequential, released=False)
def nothing_at_all(model):
    x = image()
    return model(x) is x, model(None) is None


@script(lambda: nn.Sequential(nn.Flatten(), nn.Linear(648, 4), nn.ReLU()))
def no_convolution(model):
    return model(image()), model(image(2))


@forward()
def unused_layers(self, x):
    self.bn(self.d(x))
    return self.relu(self.c(x))


@forward()
def dense_connections(self, x):
    features = [x]
    for layer in (self.c, self.d):
        features.append(self.relu(layer(sum(features))))
    return torch.cat(features, 1)


@forward()
def squeeze_and_excite(self, x):
    y = self.relu(self.bn(self.c(x)))
    gate = self.fc(y.mean((2, 3))).repeat(1, 2).sigmoid()
    return self.relu(y * gate[:, :, None, None] + x)


@forward()
def pool_between(self, x):
    return self.relu(self.d(self.pool(self.relu(self.bn(self.c(x))))))


@forward()
def pool_before_relu(self, x):
    return self.relu(self.pool(self.c(x))), self.pool(self.c(x) + x)


@forward(parts=lambda: {"pool": nn.MaxPool2d(2, 2, ceil_mode=True)})
def pool_rounds_up(self, x):
    return self.pool(self.relu(self.c(x)))


@forward(parts=lambda: {"pool": nn.MaxPool2d(3, 2, 1)})
def pool_overlaps(self, x):
    return self.pool(self.relu(self.bn(self.c(x))))


@forward(parts=lambda: {"pool": nn.AvgPool2d(2), "lp": nn.LPPool2d(2, 2)})
def other_pools(self, x):
    y = self.relu(self.c(x))
    return self.pool(y), self.lp(y), F.max_pool2d(y, (2, 1)), F.max_pool2d(y, 2, dilation=2)


@forward(parts=lambda: {"pool": nn.MaxPool2d(2, return_indices=True), "un": nn.MaxUnpool2d(2)})
def unpooled(self, x):
    y, where = self.pool(self.relu(self.c(x)))
    return self.un(y, where, output_size=x.shape), where


@forward(parts=lambda: {"attention": nn.MultiheadAttention(8, 2, batch_first=True)})
def attention_between(self, x):
    tokens = self.c(x).flatten(2).transpose(1, 2)
    y, weights = self.attention(tokens, tokens, tokens)
    return self.relu(self.d(y.transpose(1, 2).reshape(x.shape)) + x), weights


@forward()
def matmul_of_results(self, x):
    a, b = self.c(x), self.relu(self.d(x))
    return a @ b, torch.einsum("nchw,ndhw->ncd", a, b), a.flatten(2).bmm(b.flatten(2).mT)


@forward(parts=lambda: {"ln": nn.LayerNorm(8)})
def permuted_norm(self, x):
    y = self.ln(self.c(x).permute(0, 2, 3, 1))
    return (F.gelu(y).permute(0, 3, 1, 2) + x).contiguous()


@forward()
def windows(self, x):
    y = self.c(x)[:, :, :8, :8]
    y = y.reshape(-1, 8, 2, 4, 2, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, 8)
    return self.relu(y), F.unfold(self.c(x), 3), F.pixel_unshuffle(x[:, :, :8, :8], 2)

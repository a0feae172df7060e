"""Training flags of single modules, set before or after the model was optimised."""

import torch
from torch import nn
from torch.nn import functional as F

from .case import Chain, Features, Net, conv, gradients, image, row, script
from .flags import modes


def as_it_is(model):
    """Calls without touching any flag."""
    x = image(2)
    return model(x), model(x), x


class Frozen(Features):
    """Its norm stays in eval mode whatever is asked for."""

    def train(self, mode=True):
        super().train(mode)
        self.bn.eval()
        return self


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.c = inner, conv()

    def forward(self, x):
        return F.relu(self.c(self.inner(x)))


@script(Frozen)
def train_is_overridden(model):
    return modes(model)


@script(lambda: Outer(Frozen()), released=False)
def train_of_a_child_is_overridden(model):
    return modes(model), model.inner.bn.training


def frozen_norm():
    model = Features().train()
    model.bn.eval()
    return model


class Flagged(nn.Module):
    """Holds a model whose flags were set one by one; train() is not passed on to it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def train(self, mode=True):
        self.training = mode
        return self

    def forward(self, x):
        return self.model(x)


@script(lambda: Flagged(frozen_norm()))
def norm_frozen_before(model):
    return as_it_is(model)


def awake_norm():
    model = Features().eval()
    model.bn.train()
    return model


@script(lambda: Flagged(awake_norm()))
def norm_training_in_eval_model(model):
    return as_it_is(model)


def awake_dropout():
    model = nn.Sequential(conv(), nn.ReLU(), nn.Dropout(0.5), conv()).eval()
    model[2].train()
    return model


@script(lambda: Flagged(awake_dropout()))
def dropout_awake_in_eval_model(model):
    return as_it_is(model)


@script(awake_dropout, edits=True, released=False, compiled=False)
def dropout_woken_afterwards(model):
    x = image()
    model.eval()
    first = model(x)
    model[2].train()
    return first, model(x), model(x), model.training


@script(Features, train=True, edits=True, released=False)
def norm_frozen_afterwards(model):
    model.train()
    x = image(2)
    first = model(x)
    model.bn.eval()
    return first, model(x), model(x)


@script(Features, edits=True, released=False)
def norm_woken_afterwards(model):
    x = image(2)
    first = model(x)
    model.bn.train()
    return first, model(x), model.bn.running_mean.clone(), model.eval()(x)


@script(Chain, edits=True, released=False)
def every_norm_frozen_by_a_loop(model):
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
            module.weight.requires_grad_(False)
    x = image(2)
    return model(x), model(x), model.training, model.bn.training


@script(row, edits=True, released=False, compiled=False)
def last_layers_in_training(model):
    model.eval()
    model[1].train()
    x = image(2)
    return model(x), model(x), [layer.training for layer in model]


@script(Features, released=False, compiled=False)
def statistics_are_shared(model, original):
    x = image(2)
    model.train()
    model(x)
    facts = [a is b for a, b in zip(model.buffers(), original.buffers())]
    model.eval()
    original.eval()
    return facts, model(x), original(x), list(original.buffers())


@script(lambda: Outer(Net()), released=False)
def flags_of_all_modules(model):
    """Names and flags, before and after a round trip."""
    before = {name: module.training for name, module in model.named_modules()}
    model.train()
    during = {name: module.training for name, module in model.named_modules()}
    model.eval()
    return before, during, all(not module.training for module in model.modules())


@script(Chain, edits=True, grad=True)
def frozen_weights(model):
    """A part of the model asks for no gradient."""
    model.c.requires_grad_(False)
    model.bn.requires_grad_(False)
    y = model(image(2))
    y.sum().backward()
    return y, gradients(model)


@script(Chain, edits=True, grad=True)
def nothing_asks_for_gradients(model):
    model.requires_grad_(False)
    y = model(image())
    return y.requires_grad, y.grad_fn is None, y


@script(Chain, train=True, grad=True)
def inference_mode_between_steps(model):
    x = image(2)
    model(x).sum().backward()
    model.eval()
    with torch.inference_mode():
        y = model(x)
    model.train()
    z = model(x)
    z.sum().backward()
    return y.is_inference(), y.sum().item(), z, gradients(model)

"""Modules that are replaced, added and removed after a model was optimised."""

import torch
from torch import nn

from .case import Chain, Features, attempt, conv, image, norm, row, script


class Lora(nn.Module):
    """A small correction beside a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def before_and_after(change, make=Features, **flags):
    """A case: two results, around a change of the model."""
    def note(function):
        def run(model):
            x = image()
            first = model(x)
            change(model)
            return first, model(x), model(image()), x
        run.__name__, run.__module__ = function.__name__, function.__module__
        return script(make, edits=True, **flags)(run)
    return note


def edit(function):
    """The decorated function changes a conv, a norm and a ReLU."""
    return before_and_after(function)(function)


def edit_row(function):
    """The decorated function changes a Sequential."""
    return before_and_after(function, row, compiled=False)(function)


@edit
def lora(model):
    model.c = Lora(model.c)


@edit
def other_conv(model):
    model.c = conv()


@edit
def other_stride(model):
    model.c = conv(stride=2)


@edit
def norm_to_identity(model):
    model.bn = nn.Identity()


@edit
def relu_to_gelu(model):
    model.relu = nn.GELU()


@edit
def relu_to_function(model):
    del model.relu
    model.relu = torch.tanh


@edit
def norm_replaced(model):
    model.bn = norm()


@edit
def setattr_by_path(model):
    parent, _, name = "c".rpartition(".")
    setattr(model.get_submodule(parent), name, nn.Sequential(model.c, nn.Tanh()))


@edit_row
def item_replaced(model):
    model[2] = nn.Sigmoid()


@edit_row
def conv_item_replaced(model):
    model[3] = nn.Conv2d(8, 8, 3, padding=1)


@edit_row
def appended(model):
    model.append(nn.Tanh())


@edit_row
def deleted(model):
    del model[1]


@edit_row
def inserted(model):
    model.insert(1, nn.Tanh())


@edit_row
def added_by_name(model):
    model.add_module("more", nn.Softmax(1))


@edit
def forward_of_instance(model):
    model.forward = lambda x: x * 7


@edit
def forward_of_child(model):
    plain = model.c.forward
    model.c.forward = lambda x: plain(x) + 1


@edit
def forward_of_relu(model):
    model.relu.forward = torch.sin


@edit
def class_of_child(model):
    model.c.__class__ = Shifted


class Shifted(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) + 1


@script(Chain, edits=True)
def method_of_class(model):
    x, plain = image(), Chain.forward
    first = model(x)
    Chain.forward = lambda self, x: plain(self, x) * 2
    try:
        return first, model(x)
    finally:
        Chain.forward = plain


@script(Features, edits=True)
def method_of_a_layers_class(model):
    x, plain = image(), nn.ReLU.forward
    first = model(x)
    nn.ReLU.forward = lambda self, x: plain(self, x) + 1
    try:
        return first, model(x)
    finally:
        nn.ReLU.forward = plain


@script(Features, edits=True)
def undone(model):
    """Changed and changed back."""
    x, kept = image(), model.relu
    first = model(x)
    model.relu = nn.Tanh()
    second = model(x)
    model.relu = kept
    return first, second, model(x)


@script(row, edits=True, compiled=False)
def cut_off(model):
    """A part of a model is a model."""
    x = image()
    return model(x), model[:2](x), model[3](x), nn.Sequential(*list(model.children())[:3])(x)


@script(Features, edits=True)
def deleted_layer_is_missed(model):
    x = image()
    first = model(x)
    del model.bn
    return first, attempt(model, x)

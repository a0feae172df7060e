"""Attributes that forward reads and somebody changes later."""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from .case import Net, attempt, calls, conv, forward, image, row, script


def then_set(name, *values):
    """A script that calls the model once for each value of an attribute."""
    def run(model):
        seen = [model(image())]
        for value in values:
            setattr(model, name, value)
            seen.append(model(image()))
        return seen
    return run


def edited(script, **parts):
    """Flags of a case that edits attributes."""
    return {"script": script, "parts": lambda: {k: v() if callable(v) else v
                                                for k, v in parts.items()},
            "edits": True}


@forward(**edited(then_set("scale", 3.0, -1.0), scale=1.0))
def number(self, x):
    return self.relu(self.c(x) * self.scale)


@forward(**edited(then_set("mode", "relu", "none"), mode="gelu"))
def string(self, x):
    y = self.c(x)
    if self.mode == "gelu":
        return F.gelu(y)
    return F.relu(y) if self.mode == "relu" else y


@forward(**edited(then_set("steps", 3, 0), steps=1))
def loop_count(self, x):
    for _ in range(self.steps):
        x = self.relu(self.c(x))
    return x


@forward(**edited(then_set("order", [1, 0], [0, 0, 1], []), order=lambda: [0, 1]))
def list_of_indices(self, x):
    for i in self.order:
        x = (self.c, self.d)[i](x)
    return x


@forward(**edited(then_set("use_norm", True, False), use_norm=False))
def flag(self, x):
    y = self.c(x)
    return self.relu(self.bn(y) if self.use_norm else y)


@forward(**edited(then_set("bias", torch.ones(8, 1, 1), None), bias=None))
def optional_tensor(self, x):
    y = self.c(x)
    return self.relu(y if self.bias is None else y + self.bias)


@forward(**edited(then_set("act", torch.sigmoid, F.relu), act=lambda: torch.tanh))
def function(self, x):
    return self.act(self.c(x))


@forward(**edited(then_set("size", (3, 3), None), size=(5, 5)))
def size(self, x):
    y = self.c(x)
    return y if self.size is None else F.interpolate(y, self.size)


@dataclass
class Config:
    scale: float = 1.0
    names: list = field(default_factory=lambda: ["c"])


class Configured(Net):
    def __init__(self):
        super().__init__()
        self.config, self.options = Config(), {"repeat": 1, "deep": {"shift": 0.0}}

    def forward(self, x):
        for name in self.config.names:
            x = getattr(self, name)(x)
        for _ in range(self.options["repeat"]):
            x = self.relu(x)
        return x * self.config.scale + self.options["deep"]["shift"]


@script(Configured, edits=True)
def dataclass_field(model):
    x = image()
    first = model(x)
    model.config.scale = 2.5
    return first, model(x)


@script(Configured, edits=True)
def list_in_a_dataclass(model):
    x = image()
    first = model(x)
    model.config.names.append("d")
    second = model(x)
    model.config.names[:] = ["bn"]
    return first, second, model(x)


@script(Configured, edits=True)
def nested_dict(model):
    x = image()
    first = model(x)
    model.options["repeat"] = 0
    model.options["deep"]["shift"] = 1.0
    return first, model(x)


class Classy(Net):
    factor = 1.0
    table = {"a": 1.0}

    def forward(self, x):
        return self.relu(self.c(x)) * self.factor + self.table["a"]

    @property
    def strength(self):
        return self._strength if hasattr(self, "_strength") else 1.0


@script(Classy, edits=True)
def class_attribute(model):
    x, kind = image(), Classy
    first = model(x)
    kind.factor, kind.table["a"] = 4.0, -1.0
    try:
        return first, model(x)
    finally:
        kind.factor, kind.table["a"] = 1.0, 1.0


@script(Classy, edits=True)
def instance_hides_class_attribute(model):
    x = image()
    first = model(x)
    model.factor = 5.0
    second = model(x)
    del model.factor
    return first, second, model(x)


class Strong(Classy):
    def forward(self, x):
        return self.relu(self.c(x) * self.strength)


@script(Strong, edits=True)
def property_of_an_attribute(model):
    x = image()
    first = model(x)
    model._strength = 3.0
    return first, model(x), model.strength


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([conv(), nn.ReLU()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x / len(self.layers)


@script(Layers, edits=True)
def appended_layer(model):
    x = image()
    first = model(x)
    model.layers.append(nn.Conv2d(8, 8, 3, padding=1))
    return first, model(x), len(model.layers)


@script(Layers, edits=True)
def removed_layer(model):
    x = image()
    first = model(x)
    del model.layers[1]
    return first, model(x), len(list(model.layers))


class Named(Net):
    def forward(self, x):
        return getattr(self, f"{self.which}_branch")(x)

    which = "a"

    def a_branch(self, x):
        return self.relu(self.c(x))

    def b_branch(self, x):
        return self.d(x)


@script(Named, edits=True)
def name_made_at_run_time(model):
    x = image()
    first = model(x)
    model.which = "b"
    second = model(x)
    model.which = "missing"
    return first, second, attempt(model, x)


def closing_over(state):
    class Closure(Net):
        def forward(self, x):
            return self.relu(self.c(x) + state["shift"])
    model = Closure()
    object.__setattr__(model, "shared_state", lambda: state)
    return model


STATE = {"shift": 0.0}


@script(lambda: closing_over(STATE))
def closure(model):
    seen = []
    for STATE["shift"] in (0.0, 2.0, 0.0):
        seen.append(model(image()))
    return seen


@script(lambda: Thresholded(), edits=True)
def threshold_of_an_activation(model):
    x = image()
    first = model(x)
    model.act.negative_slope = 0.9
    model.drop.p = 0.0
    model.train()
    return first, model(x)


class Thresholded(Net):
    def __init__(self):
        super().__init__()
        self.act = nn.LeakyReLU(0.1)

    def forward(self, x):
        return self.drop(self.act(self.c(x)))


@script(row, edits=True)
def new_attribute_is_kept(model):
    model.note, model.table = "mine", {"a": 1}
    model(image())
    return model.note, model.table, attempt(getattr, model, "unknown")


@forward(lambda model: (calls(model), model.training, model.c.stride, model.bn.eps,
                        model.fc.out_features), parts=lambda: {"title": "net"}, released=False)
def attributes_of_modules_read(self, x):
    return self.c(x) * self.c.stride[0] + len(self.title)

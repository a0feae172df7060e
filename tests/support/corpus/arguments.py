"""What forward is called with, and by whom."""

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .case import Net, attempt, conv, forward, image, script

Pair = namedtuple("Pair", "image scale")


@dataclass
class Batch:
    image: Tensor
    scale: float = 2.0


def optional(model):
    """With and without, in any order."""
    x, skip = image(), image()
    return [model(x), model(x, skip), model(x), model(x, skip=None), model(x=x, skip=skip),
            model(skip=skip, x=x), x, skip]


@forward(optional)
def skip_or_none(self, x, skip=None):
    y = self.c(x)
    if skip is not None:
        y = y + skip
    return self.relu(y)


@forward(lambda model: optional(model)[::-1], example=lambda: (image(), image()))
def skip_given_in_example(self, x, skip=None):
    return F.relu(self.c(x) + (0 if skip is None else skip))


@forward(optional)
def skip_with_truth(self, x, skip=None):
    return self.c(x) if skip is None else self.relu(self.bn(self.d(x)) + self.c(skip))


@forward(lambda model: [model(image(), flag) for flag in (True, False, True)] + [model(image())])
def flag(self, x, activate=True):
    y = self.c(x)
    return self.relu(y) if activate else y


@forward(lambda model: [attempt(model, image(), mode=m) for m in ("sum", "max", "other", "sum")])
def mode_string(self, x, *, mode="sum"):
    y = self.relu(self.c(x))
    if mode not in ("sum", "max"):
        raise KeyError(mode)
    return y.sum((2, 3)) if mode == "sum" else y.amax((2, 3))


@forward(lambda model: [model(image(), n) for n in (1, 3, 0, 1)])
def repeat_count(self, x, n=1):
    for _ in range(n):
        x = self.relu(self.c(x))
    return x


@forward(lambda model: [model(image(), s) for s in (1.0, 2.5, 0, -1)])
def number(self, x, scale=1.0):
    return self.relu(self.c(x) * scale)


@forward(lambda model: [model(image()), model(image(), 2.0, True), model(image(), scale=0.5),
                        model(image(), relu=True), attempt(model),
                        attempt(model, image(), 1, 2, 3)])
def positional_and_named(self, x, scale=1.0, relu=False):
    y = self.c(x) * scale
    return self.relu(y) if relu else y


@forward(lambda model: [model(image()), model(image(), image()), model(*[image()] * 4)])
def any_number(self, *images):
    return self.relu(sum(self.c(x) for x in images)), len(images)


@forward(lambda model: [model(x=image()), model(x=image(), y=image()), attempt(model, z=image())],
         example=lambda: ())
def any_names(self, **images):
    y = self.c(images["x"])
    return self.relu(y + images["y"]) if "y" in images else y


@forward(lambda model: [model([image(), image()]), model([image()] * 3)],
         example=lambda: ([image(), image()],))
def list_of_images(self, images):
    return self.relu(torch.stack([self.c(x) for x in images]).sum(0))


@forward(lambda model: [model((image(), image())), model((image(), None))],
         example=lambda: ((image(), image()),))
def pair_of_images(self, pair):
    a, b = pair
    return self.c(a) if b is None else self.relu(self.c(a) + b)


@forward(lambda model: [model({"x": image(), "scale": 2.0}), model({"x": image()})],
         example=lambda: ({"x": image()},))
def dict_of_images(self, batch):
    return self.relu(self.c(batch["x"])) * batch.get("scale", 1.0)


@forward(lambda model: [model(Pair(image(), 2.0)), model(Pair(image(), 3.0))],
         example=lambda: (Pair(image(), 2.0),))
def named_tuple(self, pair):
    return self.relu(self.c(pair.image)) * pair.scale, type(pair) is Pair


@forward(lambda model: [model(Batch(image())), model(Batch(image(), 3.0))],
         example=lambda: (Batch(image()),))
def data_class(self, batch):
    return self.relu(self.c(batch.image)) * batch.scale


def collected(model):
    features = []
    y = model(image(), features)
    z = model(image(), features)
    return y, z, len(features), features


@forward(collected, example=lambda: (image(), []))
def appends_to_a_list(self, x, features):
    features.append(x)
    y = self.relu(self.c(x))
    features.append(y)
    return self.d(y)


def filled(model):
    out = {}
    y = model(image(), out)
    return y, out


@forward(filled, example=lambda: (image(), {}))
def fills_a_dict(self, x, out):
    y = self.relu(self.bn(self.c(x)))
    out["feature"] = y
    out.setdefault("mean", y.mean())
    return self.fc(y.mean((2, 3)))


@forward(lambda model: [model(image(), torch.tensor([0, 3])), model(image(), torch.tensor([7]))],
         example=lambda: (image(), torch.tensor([0, 3])))
def integer_indices(self, x, index):
    return self.relu(self.c(x))[:, index]


@forward(lambda model: [model(image(), torch.rand(1, 8, 9, 9) > 0.5), model(image(), None)],
         example=lambda: (image(), torch.rand(1, 8, 9, 9) > 0.5))
def mask(self, x, mask):
    y = self.c(x)
    return y if mask is None else self.relu(y.masked_fill(mask, -1))


@forward(lambda model: [model(image(), t) for t in (torch.tensor(1), torch.tensor(7))],
         example=lambda: (image(), torch.tensor(1)))
def timestep(self, x, t):
    frequency = torch.exp(-torch.arange(8) / 4)
    return self.relu(self.c(x) + (t * frequency).sin().view(1, -1, 1, 1))


@forward(lambda model: [model(image(), image()), model(image())],
         example=lambda: (image(), image()))
def second_image_changed(self, x, y=None):
    if y is not None:
        y.mul_(2)
    return self.c(x) if y is None else self.relu(self.c(x) + y)


DEFAULT = torch.full((1, 8, 1, 1), 0.5)


@forward(lambda model: [model(image()), model(image(), DEFAULT * 4), model(image()), DEFAULT])
def tensor_as_default(self, x, shift=DEFAULT):
    return self.relu(self.c(x) + shift)


@forward(lambda model: [model(image()), model(image(), [1]), model(image())])
def mutable_default(self, x, seen=[]):  # noqa: B006  that is the point
    y = self.c(x) + len(seen)
    seen = [*seen, 1]
    return y, len(seen)


class Optional(Net):
    """One that no tracer sees through, around a child with an optional argument."""

    def __init__(self):
        super().__init__()
        self.child = Child()

    def forward(self, x, skip=None, times=1):
        if x.sum().item() > 1e9:
            return None
        for _ in range(times):
            x = self.child(x, skip) if skip is not None else self.child(x)
        return x


class Child(Net):
    def forward(self, x, skip=None, *, scale=1.0):
        y = self.c(x)
        if skip is not None:
            y = y + skip
        return self.relu(y) * scale


@script(Optional)
def child_with_optional_argument(model):
    x, skip = image(), image()
    return [model(x), model(x, skip), model(x, times=2), model(x, skip, 2), x, skip,
            model.child(x, scale=3.0)]


class Encoder(Net):
    """More methods than forward."""

    def encode(self, x):
        return self.relu(self.bn(self.c(x)))

    def decode(self, z):
        return self.d(z)

    def forward(self, x):
        return self.decode(self.encode(x))


@script(Encoder, released=False)
def other_methods(model):
    x = image()
    z = model.encode(x)
    return z, model.decode(z), model(x), model.forward(x), x


@script(lambda: conv(stride=1))
def a_single_convolution(model):
    x = image()
    return model(x), model.forward(x), model(input=x), x


@script(Encoder)
def called_with_odd_things(model):
    return [attempt(model, thing) for thing in (None, 3, "x", [image()], image().int())]

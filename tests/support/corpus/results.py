"""What forward returns."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .case import forward, image

Output = namedtuple("Output", "logits feature")


@dataclass
class Result:
    logits: Tensor
    loss: Tensor | None = None


@forward()
def a_tuple(self, x):
    y = self.relu(self.c(x))
    return y, self.d(y)


@forward()
def a_list(self, x):
    return [self.c(x), x, None]


@forward()
def a_dict(self, x):
    y = self.relu(self.bn(self.c(x)))
    return {"y": y, "head": self.fc(y.mean((2, 3)))}


@forward()
def an_ordered_dict(self, x):
    return OrderedDict(out=self.c(x), aux=self.relu(self.d(x)))


@forward()
def a_named_tuple(self, x):
    y = self.c(x)
    return Output(self.relu(y), y)


@forward(lambda model: (model(image()).logits, model(image()).feature))
def fields_of_a_named_tuple(self, x):
    y = self.relu(self.c(x))
    return Output(logits=self.fc(y.mean((2, 3))), feature=y)


@forward()
def a_dataclass(self, x):
    return Result(self.fc(self.relu(self.c(x)).mean((2, 3))))


@forward()
def nothing(self, x):
    self.c(x)


@forward()
def nested(self, x):
    y = self.c(x)
    return {"a": [y, (self.relu(y), {"b": y.mean()})], "n": 3, "s": "text", "none": None}


@forward()
def scalars(self, x):
    y = self.relu(self.c(x))
    return y.mean().item() > 0, y.shape[1], float(y.shape[2]), "done"


@forward()
def zero_dimensions(self, x):
    y = self.c(x)
    return y.mean(), y.sum(), torch.tensor(3)


@forward()
def integers(self, x):
    y = self.relu(self.c(x) + 10 * torch.arange(8.0).view(8, 1, 1))
    return y.argmax(1), y.max(1).indices, y > 5, y.sort(dim=1).indices


@forward()
def max_with_indices(self, x):
    return F.max_pool2d(x, 2, return_indices=True), self.c(x).max(1).values


@forward()
def slices_and_gathers(self, x):
    y = self.relu(self.c(x))
    return y[:, 0], y[..., -1], y[:, :, 1:3], y.select(1, 2), y.narrow(2, 0, 4)


@forward()
def constant(self, x):
    self.relu(self.c(x))
    return torch.ones(2), 5


@forward()
def list_built_in_a_loop(self, x):
    found = []
    for layer in (self.c, self.relu, self.d):
        x = layer(x)
        found.append(x)
    return found[::-1]


@forward(lambda model: list(model(image())))
def generator(self, x):
    for layer in (self.c, self.bn, self.relu):
        x = layer(x)
        yield x


@forward()
def parameters_returned(self, x):
    return self.c(x), self.c.weight, self.bn.running_mean, self.fc.bias is not None


@forward(lambda model: (lambda y: (y, y.numpy(force=True), y.tolist()[0][0][0]))(model(image())))
def taken_to_numpy(self, x):
    return self.relu(self.bn(self.c(x)))


@forward(lambda model: [type(model(image())).__name__, model(image()).grad_fn is None])
def kind_of_result(self, x):
    return self.relu(self.c(x))


@forward()
def closes_over_result(self, x):
    y = self.c(x)
    return (lambda: y)() + 1, [f(y) for f in (torch.relu, torch.neg)]

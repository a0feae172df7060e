"""Random numbers: the same seed gives the same result, and leaves the same stream."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from .case import conv, forward, image, script


@forward()
def rand(self, x):
    return self.relu(self.c(x) + torch.rand(1, 8, 1, 1))


@forward()
def randn(self, x):
    return self.c(x + 0.1 * torch.randn(x.shape))


@forward()
def randn_like(self, x):
    y = self.c(x)
    return y + torch.randn_like(y)


@forward()
def rand_like_of_input(self, x):
    return self.relu(self.c(x)) * torch.rand_like(x)


@forward()
def randint(self, x):
    i = torch.randint(0, 8, (3,))
    return self.c(x)[:, i], i


@forward()
def randperm(self, x):
    return self.relu(self.c(x))[:, torch.randperm(8)]


@forward()
def bernoulli(self, x):
    return self.c(x) * torch.bernoulli(torch.full((8, 1, 1), 0.5))


@forward()
def normal_in_place(self, x):
    return self.c(x) + torch.empty(9).normal_().clamp_(-1, 1)


@forward()
def multinomial(self, x):
    return self.c(x), torch.multinomial(torch.ones(5), 4)


@forward()
def random_module_between(self, x):
    return self.d(F.dropout(self.relu(self.c(x)), 0.5, True))


@forward()
def python_random(self, x):
    return self.c(x) * random.random()


@forward()
def python_choice_of_path(self, x):
    return self.c(x) if random.random() < 0.5 else self.relu(self.d(x))


@forward(script=lambda model: [model(image()) for _ in range(5)])
def numpy_random(self, x):
    return self.c(x) + float(np.random.rand())


@forward()
def own_generator(self, x):
    g = torch.Generator().manual_seed(11)
    return self.c(x) + torch.rand(9, generator=g)


@forward(parts=lambda: {"generator": None})
def kept_generator(self, x):
    if self.generator is None:
        self.generator = torch.Generator().manual_seed(5)
    return self.c(x) * torch.rand(8, 1, 1, generator=self.generator)


@forward()
def seed_set_inside(self, x):
    torch.manual_seed(4)
    return self.c(x) + torch.rand(9)


@forward()
def unused_random_number(self, x):
    torch.rand(3)
    return self.relu(self.c(x))


@forward()
def monte_carlo(self, x):
    return torch.stack([F.dropout(self.c(x), 0.5, True) for _ in range(3)]).var(0)


@script(lambda: nn.Sequential(conv(), nn.Dropout(0.5), conv(), nn.Dropout2d(0.2)), train=True)
def random_stream_of_training(model):
    return [model(image(2)), torch.rand(2), model(image(2)), torch.rand(2)]

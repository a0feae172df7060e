"""The training flag of the model, and everything that reads it."""

import torch
from torch import nn
from torch.nn import functional as F

from .case import attempt, forward, image, norm


def modes(model):
    """Eval, training, eval again, and what the modules think."""
    x, seen = image(2), []
    for training in (False, True, True, False):
        model.train(training)
        seen += [attempt(model, x), model.training]
    return seen


@forward(modes)
def conv_norm_relu(self, x):
    return self.relu(self.bn(self.c(x)))


@forward(modes)
def dropout_module(self, x):
    return self.drop(self.c(x))


@forward(modes)
def dropout_function(self, x):
    return F.dropout(F.relu(self.c(x)), 0.3, self.training)


@forward(modes)
def dropout_function_by_name(self, x):
    return F.dropout2d(self.c(x), p=0.3, training=self.training) + x


@forward(modes)
def dropout_function_always_on(self, x):
    return F.dropout(self.c(x))


@forward(modes)
def alpha_dropout(self, x):
    return F.alpha_dropout(self.c(x), 0.2, training=self.training)


@forward(modes)
def rrelu(self, x):
    return F.rrelu(self.c(x), training=self.training)


@forward(modes)
def norm_function(self, x):
    bn = self.bn
    return F.relu(F.batch_norm(self.c(x), bn.running_mean, bn.running_var, bn.weight, bn.bias,
                               training=self.training))


@forward(modes)
def norm_function_positional(self, x):
    bn = self.bn
    return F.batch_norm(self.c(x), bn.running_mean, bn.running_var, bn.weight, bn.bias,
                        self.training, 0.3, 1e-3)


@forward(modes)
def norm_function_never_training(self, x):
    return F.relu(F.batch_norm(self.c(x), self.bn.running_mean, self.bn.running_var))


@forward(modes)
def norm_function_always_training(self, x):
    return F.batch_norm(self.c(x), None, None, self.bn.weight, training=True)


@forward(modes)
def auxiliary_result(self, x):
    y = self.relu(self.c(x))
    if self.training:
        return y, self.d(y)
    return y


@forward(modes)
def other_structure(self, x):
    y = self.bn(self.c(x))
    return {"loss": y.mean(), "y": y} if self.training else [y]


@forward(modes)
def other_path(self, x):
    return self.d(x) if not self.training else F.relu(self.c(x))


@forward(modes)
def flag_of_a_child(self, x):
    y = self.c(x)
    return y + 1 if self.bn.training else self.relu(y)


@forward(modes)
def flag_as_a_number(self, x):
    return self.c(x) * (1 + self.training)


@forward(modes)
def drop_path(self, x):
    y = self.relu(self.bn(self.c(x)))
    if not self.training:
        return x + y
    keep = torch.rand(x.shape[0], 1, 1, 1) < 0.5
    return x + y * keep / 0.5


@forward(modes)
def noise_in_training(self, x):
    if self.training:
        x = x + 0.1 * torch.randn_like(x)
    return self.relu(self.c(x))


@forward(modes, parts=lambda: {"bn": norm(momentum=None)})
def momentum_none(self, x):
    return self.relu(self.bn(self.c(x)))


@forward(modes, parts=lambda: {"bn": norm(momentum=0.9, eps=0.1)})
def other_momentum_and_eps(self, x):
    return self.relu(self.bn(self.c(x)))


@forward(modes, parts=lambda: {"bn": norm(track_running_stats=False)})
def no_statistics(self, x):
    return self.relu(self.bn(self.c(x)))


@forward(modes, parts=lambda: {"bn": norm(affine=False)})
def no_affine(self, x):
    return self.relu(self.bn(self.c(x)))


@forward(modes, parts=lambda: {"bn": nn.InstanceNorm2d(8, track_running_stats=True)})
def instance_norm(self, x):
    return self.relu(self.bn(self.c(x)))


@forward(modes, parts=lambda: {"bn": nn.GroupNorm(2, 8)})
def group_norm(self, x):
    return self.relu(self.bn(self.c(x)))


@forward(modes, parts=lambda: {"bn": nn.SyncBatchNorm(8)})
def sync_norm(self, x):
    return attempt(lambda: self.relu(self.bn(self.c(x))))

"""Changes in place between the steps that could be one call, and of a model's own tensors."""

import torch
from torch import nn
from torch.nn import functional as F

from .case import attempt, forward, image, norm, script


@forward()
def between_conv_and_norm(self, x):
    y = self.c(x)
    y.add_(1)
    return F.relu(self.bn(y))


@forward()
def between_norm_and_relu(self, x):
    y = self.bn(self.c(x))
    y.sub_(0.3)
    return self.relu(y)


@forward()
def between_conv_and_sum(self, x):
    y = self.c(x)
    y.neg_()
    return F.relu(y + x)


@forward()
def before_pool(self, x):
    y = self.relu(self.c(x))
    y.neg_()
    return self.pool(y)


@forward()
def norm_input_kept(self, x):
    y = self.c(x)
    z = self.bn(y)
    return self.relu_(z), z, y


@forward()
def relu_shared_between_branches(self, x):
    a, b = self.c(x), self.d(x)
    p = self.relu_(a)
    q = self.relu_(b + a)
    return p + q, a, b


@forward()
def relu_twice_in_place(self, x):
    y = self.relu_(self.c(x))
    z = y - 1
    return self.relu_(z) + y


@forward()
def features_changed_later(self, x):
    kept = [self.c(x)]
    kept.append(self.relu_(kept[-1]))
    kept.append(self.d(kept[-1]))
    kept[0] += 1
    return kept


@forward()
def result_returned_twice_and_changed(self, x):
    y = F.relu(self.c(x))
    z = y
    z *= 3
    return {"a": y, "b": z, "same": y is z}


@forward()
def detached_changed(self, x):
    y = self.c(x)
    y.detach().mul_(2)
    return F.relu(y)


@forward()
def changed_without_gradients(self, x):
    y = self.c(x)
    with torch.no_grad():
        y.add_(1)
    return F.relu(y)


@forward()
def data_changed(self, x):
    y = self.c(x)
    y.data.mul_(-1)
    return self.relu(y)


@forward(parts=lambda: {"total": nn.Buffer(torch.zeros(8))})
def buffer_counted(self, x):
    y = self.c(x)
    self.total.add_(y.detach().mean((0, 2, 3)))
    return y + self.total.view(1, -1, 1, 1)


@forward(parts=lambda: {"steps": nn.Buffer(torch.zeros((), dtype=torch.long))})
def integer_buffer_counted(self, x):
    self.steps += 1
    return self.c(x) * self.steps


@forward()
def weight_decays(self, x):
    y = F.relu(self.c(x))
    with torch.no_grad():
        self.c.weight.mul_(0.5)
    return y


@forward()
def statistics_edited_inside(self, x):
    with torch.no_grad():
        self.bn.running_mean += 0.25
    return self.relu(self.bn(self.c(x)))


@forward()
def dropout_in_place(self, x):
    y = self.c(x)
    F.dropout(y, 0.5, training=True, inplace=True)
    return y


@forward(parts=lambda: {"act": nn.LeakyReLU(0.1, inplace=True)})
def leaky_in_place_unused(self, x):
    y = self.bn(self.c(x))
    self.act(y)
    return y


@forward(parts=lambda: {"act": nn.ReLU6(inplace=True), "bn2": norm()})
def relu6_then_norm(self, x):
    y = self.c(x)
    z = self.act(y)
    return self.bn2(y) + z


@forward()
def expanded_cannot_change(self, x):
    y = self.c(x).mean((2, 3), keepdim=True).expand(-1, -1, 9, 9)
    return attempt(y.add_, x)


@forward()
def sum_of_itself(self, x):
    y = self.c(x)
    y += y
    return F.relu(y)


@forward()
def pooled_in_place_input(self, x):
    y = self.pool(self.relu_(self.c(self.relu_(x))))
    x.neg_()
    return y


def two_relus():
    return nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(True))


@script(two_relus)
def first_layer_changes_input(model):
    x = image()
    y = model(x)
    return y, x, bool((x >= 0).all())


@script(two_relus)
def view_of_input_is_changed(model):
    batch = image(2)
    return model(batch[:1]), batch

"""Which tensors are the same, share memory, or have which strides."""

import torch
from torch import nn
from torch.nn import functional as F

from .case import Net, attempt, conv, forward, image, script


def same_memory(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def relations(model):
    """Whether results are the input, share memory with it, or with each other."""
    x = image()
    found = model(x)
    results = list(found) if isinstance(found, tuple | list) else [found]
    facts = [(y is x, same_memory(y, x), [y is z for z in results],
              [same_memory(y, z) for z in results]) for y in results]
    return results, facts, x


@forward(relations)
def input_itself(self, x):
    self.c(x)
    return x


@forward(relations)
def input_and_result(self, x):
    return x, F.relu(self.c(x))


@forward(relations)
def view_of_input(self, x):
    y = self.c(x)
    return x[:, 1:3], y


@forward(relations)
def same_result_twice(self, x):
    y = F.relu(self.c(x))
    return y, y


@forward(relations)
def result_and_its_view(self, x):
    y = self.c(x)
    return y, y[:, :2], y.view_as(y)


@forward(relations)
def result_and_its_permutation(self, x):
    y = self.relu(self.c(x))
    return y, y.permute(0, 2, 3, 1)


@forward(relations)
def detached_shares(self, x):
    y = self.c(x)
    return y, y.detach()


@forward(relations, parts=lambda: {"nothing": nn.Identity()})
def identity_shares(self, x):
    return self.nothing(x), self.c(self.nothing(x))


@forward(relations)
def contiguous_shares(self, x):
    y = x.contiguous()
    return y, self.c(y)


@forward(relations)
def contiguous_then_changed(self, x):
    y = x.contiguous()
    y.add_(1)
    return self.c(y)


@forward(relations)
def channels_last_then_changed(self, x):
    y = x.contiguous(memory_format=torch.channels_last)
    z = self.c(y)
    y.zero_()
    return z, y


@forward(relations)
def dropout_passes_input_on(self, x):
    return self.drop(x), self.c(x)


@forward(relations, parts=lambda: {"pieces": nn.Sequential()})
def empty_sequential(self, x):
    return self.pieces(x), self.c(x)


@script(nn.Identity)
def only_an_identity(model):
    x = image()
    return model(x) is x, attempt(model, None), attempt(model, "text")


def changed_later(model):
    """What a user does to a result may not reach later calls."""
    x = image()
    first = model(x)
    first.fill_(7)
    second = model(x)
    second.neg_()
    return first, second, model(x), x


@forward(changed_later)
def result_changed_by_user(self, x):
    return self.relu(self.bn(self.c(x)))


@forward(changed_later)
def pooled_result_changed_by_user(self, x):
    return self.pool(self.relu(self.c(x)))


def strides(model):
    x, square = image(), image(1, 8, 9, 9)
    y, z = model(x), model(square)
    return y, y.stride(), y.is_contiguous(), z.stride(), attempt(y.view, -1)


@forward(strides)
def strides_of_conv(self, x):
    return self.c(x)


@forward(strides)
def strides_of_chain(self, x):
    return self.pool(self.relu(self.bn(self.c(x))))


@forward(strides)
def strides_of_sum(self, x):
    return self.relu(self.c(x) + x)


@forward(strides)
def strides_of_permuted(self, x):
    return self.c(x).permute(0, 3, 1, 2)


@forward(strides)
def strides_of_slice(self, x):
    return self.c(x)[:, ::2]


@forward()
def strides_asked_inside(self, x):
    y = self.c(x)
    return y, list(y.stride()), y.is_contiguous(), y.is_contiguous(
        memory_format=torch.channels_last)


@forward()
def stride_of_input_asked_inside(self, x):
    scale = 2.0 if x.is_contiguous() else 3.0
    return self.c(x) * scale, x.stride(1)


@forward()
def as_strided_of_result(self, x):
    y = self.c(x)
    return y.as_strided((9, 9), (9, 1)), torch.as_strided(y, (4,), (2,), 5)


@forward()
def as_strided_of_input(self, x):
    return self.c(x), x.as_strided((3, 8), (8, 1))


@forward()
def view_as_integers(self, x):
    y = torch.ones_like(self.c(x))
    return y.view(torch.int32), self.c(x).view(torch.int32).shape


@forward()
def storage_read(self, x):
    y = torch.zeros_like(self.c(x)) + torch.arange(9.0)
    return y.untyped_storage().nbytes(), y.storage_offset(), y[:, 2].storage_offset()


@forward()
def data_ptr_compared(self, x):
    y = self.c(x)
    return y.data_ptr() == y.view_as(y).data_ptr(), y.data_ptr() == x.data_ptr(), y


@forward()
def view_that_needs_layout(self, x):
    return attempt(lambda: self.c(x).view(x.shape[0], -1)), x.shape


@forward()
def view_splits_channels(self, x):
    y = self.c(x).view(x.shape[0], 2, 4, 9, 9)
    y[:, 0] = 0
    return y


@forward()
def view_across_pixels_changed(self, x):
    y = self.c(x)
    y.view(x.shape[0], 8, 81)[:, :, 40] = 9.0
    return F.relu(y)


@forward()
def flat_order(self, x):
    return self.relu(self.c(x)).flatten(1)[:, :100], x.flatten()[3]


@forward(parts=lambda: {"shuffle": nn.PixelShuffle(2)})
def pixel_shuffle(self, x):
    return self.shuffle(self.c(x))


@forward(parts=lambda: {"out": torch.zeros(1, 8, 9, 9)})
def sum_into_attribute(self, x):
    with torch.no_grad():
        torch.add(self.c(x), x, out=self.out)
    return self.out, F.relu(self.out)


@forward()
def sum_into_input(self, x):
    y = self.c(x).detach()
    torch.add(y, 1, out=x)
    return x + y


@forward()
def relu_into_input(self, x):
    y = self.c(x).detach()
    torch.clamp(y, 0, 1, out=x)
    return self.d(x)


@forward()
def cat_into_out(self, x):
    out = torch.empty(0)
    with torch.no_grad():
        y = self.c(x)
        torch.cat([y, x], 1, out=out)
    return out, y


@forward()
def write_after_concatenation(self, x):
    y = self.c(x)
    z = torch.cat([y, x], 1)
    y.zero_()
    return z, y


@forward()
def transposed_view_added(self, x):
    y = self.c(x)
    return F.relu(y + x.transpose(2, 3)), F.relu(self.d(x) + y.mT)


class Keeps(Net):
    """Hands out and keeps what it has computed."""

    last = None

    def forward(self, x):
        y = self.relu(self.c(x))
        before, self.last = self.last, y
        return y if before is None else y + before


@script(Keeps, released=False)
def kept_result_is_the_same_object(model):
    x = image()
    y = model(x)
    facts = [model.last is y]
    y.mul_(2)
    return facts, model(x), model.last


@script(lambda: nn.Sequential(conv(), nn.Identity(), nn.Flatten(0)))
def flattened_shares_nothing_with_input(model):
    x = image()
    y = model(x)
    y.zero_()
    return x, model(x).shape, model(x)

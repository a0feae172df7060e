"""Changes in place of inputs, results, and views of them."""

import torch
from torch.nn import functional as F

from .case import forward


@forward()
def mul_on_result(self, x):
    y = self.c(x)
    y.mul_(2)
    return y


@forward()
def relu_module_result_unused(self, x):
    y = self.c(x)
    self.relu_(y)
    return y


@forward()
def relu_on_input_then_sum(self, x):
    y = self.c(x)
    z = self.relu_(x)
    return F.relu(y + z)


@forward()
def relu_on_input_result_unused(self, x):
    y = self.c(x)
    F.relu(x, inplace=True)
    return y + x


@forward()
def relu_on_view(self, x):
    y = self.c(x)
    y.view(x.shape[0], -1).relu_()
    return y


@forward()
def reshape_may_alias(self, x):
    y = self.c(x)
    y.reshape(x.shape[0], 8, -1).mul_(0.5)
    return y


@forward()
def flatten_may_alias(self, x):
    y = F.relu(self.c(x))
    y.flatten(2).add_(1)
    return y


@forward()
def add_to_input(self, x):
    return x.add_(self.c(x))


@forward()
def iadd_input(self, x):
    x += self.c(x)
    return F.relu(x)


@forward()
def iadd_input_after_call(self, x):
    y = self.c(x)
    x += 1
    return y + x


@forward()
def iadd_residual(self, x):
    z = x * 2
    y = self.c(x)
    z += y
    return self.relu(z), z


@forward()
def iadd_right_side_kept(self, x):
    y = self.c(x)
    z = self.d(x)
    z += y
    return z, y


@forward()
def iadd_left_side_kept(self, x):
    y = self.c(x)
    kept = y
    y += x
    return F.relu(y), kept


@forward()
def residual_changed_after_use(self, x):
    z = x + 1
    y = F.relu(self.c(x) + z)
    z.zero_()
    return y, z


@forward()
def residual_changed_before_use(self, x):
    z = x.clone()
    y = self.c(x)
    z.mul_(3)
    return F.relu(y + z)


@forward()
def slice_assigned(self, x):
    y = self.c(x)
    y[:, :4] = 0
    return F.relu(y)


@forward()
def slice_zeroed(self, x):
    y = self.bn(self.c(x))
    y[..., 0].zero_()
    return y


@forward()
def mask_assigned(self, x):
    y = self.c(x)
    y[x > 0] = 1.5
    return y


@forward()
def index_list_assigned(self, x):
    y = self.c(x)
    y[:, [1, 5]] = x[:, [0, 2]]
    return self.d(y)


@forward()
def diagonal_filled(self, x):
    y = self.c(x)
    y[0, 0].fill_diagonal_(7)
    y.diagonal(dim1=2, dim2=3).mul_(2)
    return y


@forward()
def chunks_changed(self, x):
    y = self.c(x)
    a, b = y.chunk(2, 1)
    a.add_(b)
    return F.relu(y)


@forward()
def split_and_swapped(self, x):
    y = self.c(x)
    a, b = y.split([3, 5], dim=1)
    a.neg_()
    b.copy_(b.flip(1))
    return y, a


@forward()
def unbind_changed(self, x):
    y = self.c(x)
    for i, plane in enumerate(y.unbind(1)):
        plane.mul_(i)
    return y


@forward()
def transposed_in_place(self, x):
    y = self.c(x)
    y.transpose_(2, 3)
    return y


@forward()
def t_in_place(self, x):
    y = self.c(x).mean((0, 3))
    y.t_()
    return y


@forward()
def squeezed_in_place(self, x):
    y = self.c(x)[:1]
    y.squeeze_(0)
    y.unsqueeze_(1)
    return y


@forward()
def resized_in_place(self, x):
    y = self.c(x).contiguous()
    y = y.detach().clone(memory_format=torch.contiguous_format)
    y.resize_(1, 8, 3, 3)
    return y


@forward()
def set_to_other_storage(self, x):
    y = self.c(x).detach()
    y.set_(x.detach().clone(memory_format=torch.contiguous_format))
    return y


@forward()
def copied_over(self, x):
    y = self.c(x)
    z = torch.empty_like(y)
    z.copy_(y)
    y.zero_()
    return z, y


@forward()
def masked_fill(self, x):
    return self.relu(self.c(x).masked_fill_(x < 0, -1.0) + x)


@forward()
def index_add(self, x):
    y = self.c(x)
    y.index_add_(1, torch.tensor([0, 0, 3]), x[:, :3])
    return F.relu(y)


@forward()
def scattered(self, x):
    y = self.c(x)
    y.scatter_(1, torch.zeros(x.shape[0], 1, 9, 9, dtype=torch.long), 4.0)
    return y


@forward()
def clamped(self, x):
    y = self.bn(self.c(x))
    y.clamp_(-0.5, 0.5)
    return y


@forward()
def relu_function_in_place(self, x):
    y = self.c(x)
    F.relu_(y)
    return self.d(y)

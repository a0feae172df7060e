"""Weights, statistics and settings of layers that change after a model was optimised."""

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

from .case import Features
from .surgery import edit


@edit
def weight_replaced(model):
    model.c.weight = nn.Parameter(torch.randn(8, 8, 3, 3))


@edit
def weight_of_other_shape(model):
    model.c.weight = nn.Parameter(torch.randn(8, 8, 1, 1))


@edit
def bias_removed(model):
    model.c.bias = None


@edit
def bias_of_norm_removed(model):
    model.bn.bias = None


@edit
def weight_data_set(model):
    model.c.weight.data = torch.randn(8, 8, 3, 3)


@edit
def weight_changed_in_place(model):
    with torch.no_grad():
        model.c.weight.mul_(2)
        model.bn.bias += 1


@edit
def weight_filled_through_data(model):
    model.c.weight.data.fill_(0.1)


@edit
def one_value_changed(model):
    with torch.no_grad():
        model.c.weight[3, 2, 1, 1] = 40.0


@edit
def weight_changed_through_numpy(model):
    model.c.weight.detach().numpy()[1] = 3.0


@edit
def statistics_assigned(model):
    model.bn.running_mean = torch.full((8,), 2.0)


@edit
def statistics_reset(model):
    model.bn.reset_running_stats()


@edit
def parameters_reset(model):
    model.c.reset_parameters()


@edit
def eps_changed(model):
    model.bn.eps = 3.0


@edit
def stride_changed(model):
    model.c.stride = (2, 2)


@edit
def padding_changed(model):
    model.c.padding = (0, 2)


@edit
def dilation_changed(model):
    model.c.dilation = (2, 1)


@edit
def padding_mode_changed(model):
    model.c.padding_mode = "circular"
    model.c._reversed_padding_repeated_twice = [1, 1, 1, 1]


@edit
def tracking_stopped(model):
    model.bn.track_running_stats = False
    model.bn.running_mean = model.bn.running_var = None


@edit
def state_loaded(model):
    other = Features()
    model.load_state_dict(other.state_dict())


@edit
def state_assigned(model):
    model.load_state_dict(Features().state_dict(), assign=True)


@edit
def part_of_state_loaded(model):
    found = model.load_state_dict({"c.bias": torch.ones(8)}, strict=False)
    assert "c.weight" in found.missing_keys


@edit
def applied(model):
    model.apply(lambda m: nn.init.constant_(m.weight, 0.05) if isinstance(m, nn.Conv2d) else m)


@edit
def pruned(model):
    prune.l1_unstructured(model.c, "weight", 0.5)


@edit
def pruned_for_good(model):
    prune.random_structured(model.c, "weight", 0.5, dim=0)
    prune.remove(model.c, "weight")


@edit
def old_weight_norm(model):
    weight_norm(model.c)
    with torch.no_grad():
        model.c.weight_g.mul_(3)


@edit
def new_weight_norm(model):
    parametrizations.weight_norm(model.c)
    with torch.no_grad():
        model.c.parametrizations.weight.original0.mul_(3)


@edit
def spectral_norm(model):
    parametrizations.spectral_norm(model.c)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@edit
def parametrized(model):
    torch.nn.utils.parametrize.register_parametrization(model.c, "weight", Doubled())

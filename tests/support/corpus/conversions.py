"""A model handed to other parts of torch: types, layouts, functional calls, exporters."""

import torch
from torch import nn

import tilewise

from .case import Chain, Features, attempt, conv, image, norm, script


@script(Chain, edits=True)
def to_double(model):
    x = image()
    first = model(x).detach()
    model.double()
    return first, model(x.double()), attempt(model, x), model.float()(x)


@script(Features, edits=True)
def to_bfloat16(model):
    x = image()
    first = model(x).detach()
    model.bfloat16()
    return first, model(x.bfloat16())


@script(Features, edits=True)
def to_half(model):
    model.half()
    return attempt(model, image().half()), model.c.weight.dtype


@script(Features, edits=True)
def to_channels_last(model):
    x = image()
    first = model(x)
    model.to(memory_format=torch.channels_last)
    return first, model(x), model(x.contiguous(memory_format=torch.channels_last))


@script(Features, edits=True)
def to_cpu_and_meta(model):
    x = image()
    first = model.cpu()(x)
    model.to("meta")
    return first, model(x.to("meta")).shape


@script(Features, edits=True, compiled=False)
def to_empty(model):
    model.to_empty(device="cpu")
    model.load_state_dict(Features().state_dict())
    return model(image())


@script(Chain, released=False)
def functional_call(model):
    x = image()
    state = {name: t * 0.5 for name, t in model.state_dict().items() if t.is_floating_point()}
    return torch.func.functional_call(model, state, (x,)), model(x)


@script(lambda: nn.Sequential(conv(), nn.ReLU(), conv()), released=False)
def vmap(model):
    x = torch.randn(3, 1, 8, 9, 9)
    return torch.func.vmap(model)(x), model(x[0])


@script(lambda: nn.Sequential(conv(), nn.ReLU(), conv()), released=False, compiled=False)
def stacked_ensemble(model):
    params = {name: torch.stack([p.detach(), 2 * p.detach()]) for name, p in
              model.named_parameters()}
    x = image()
    return torch.func.vmap(lambda p: torch.func.functional_call(model, p, (x,)))(params)


@script(lambda: nn.Sequential(conv(), nn.Tanh(), conv()), released=False, compiled=False)
def jacobian_products(model):
    x, v = image(), image()
    y, tangent = torch.func.jvp(model, (x,), (v,))
    return y, tangent, torch.func.vjp(model, x)[1](v)[0]


@script(Features, compiled=False)
def exported(model):
    program = torch.export.export(model, (image(),))
    return program.module()(image())


@script(Features, compiled=False)
def traced_by_jit(model):
    return torch.jit.trace(model, image(), check_trace=False)(image())


@script(Features, released=False, compiled=False)
def traced_by_fx(model):
    return torch.fx.symbolic_trace(model)(image())


@script(Features, compiled=False)
def optimised_again(model):
    again = tilewise.optimize(model)
    return again(image()), model(image())


@script(lambda: nn.ModuleDict({"a": conv(), "b": norm()}), released=False, compiled=False)
def container_without_forward(model):
    x = image()
    return model["b"](model["a"](x)), list(model), attempt(model, x), len(model)


@script(Features, released=False, compiled=False)
def part_of_another_model(model):
    outer = nn.Sequential(model, nn.Conv2d(8, 8, 3, padding=1), nn.Flatten())
    y = outer.train()(image(2))
    return y, outer.eval()(image()), len(list(outer.parameters())), model.training

"""Precision, gradient modes, compiled parts and other surroundings of a call."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .case import Chain, Features, Net, attempt, calls, conv, forward, image, row, script


@script(lambda: row().double(), example=lambda: image().double())
def double_model(model):
    x = image().double()
    return model(x), attempt(model, x.float()), x


@script(lambda: row().bfloat16(), example=lambda: image().bfloat16())
def bfloat16_model(model):
    return model(image().bfloat16())


@script(lambda: nn.Sequential(conv(dtype=torch.complex64)),
        example=lambda: image().to(torch.complex64))
def complex_model(model):
    return attempt(model, image().to(torch.complex64))


@forward()
def autocast_inside(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = self.c(x)
        z = self.relu(self.bn(y))
    return y, z, self.relu(self.d(x))


@script(Features)
def autocast_outside(model):
    x = image()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    return y, model(x)


@forward()
def autocast_switched_off_inside(self, x):
    with torch.autocast("cpu", enabled=False):
        y = self.relu(self.c(x.float()))
    return y


@forward()
def no_gradient_inside(self, x):
    with torch.no_grad():
        y = self.relu(self.c(x))
    return self.d(y), y.requires_grad


@forward(released=False)
def gradient_switched_on_inside(self, x):
    with torch.enable_grad():
        y = self.relu(self.c(x))
    return y.requires_grad, y.detach()


@forward()
def gradient_of_the_input_inside(self, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = self.relu(self.c(x)).pow(2).sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=self.training)
    return slope


@forward()
def asks_whether_gradients_are_on(self, x):
    y = self.c(x)
    return (y if torch.is_grad_enabled() else self.relu(y)), torch.is_inference_mode_enabled()


@forward()
def detached_branch(self, x):
    y = self.relu(self.c(x))
    return self.d(y.detach()) + y, y.detach().requires_grad


@script(Features)
def inference_mode(model):
    x = image()
    with torch.inference_mode():
        y = model(x)
    return y.is_inference(), y.clone(), model(x)


@script(Features)
def inference_tensor_as_input(model):
    with torch.inference_mode():
        x = image()
        y = model(x)
    return y.clone(), x.clone()


class Checkpointed(Net):
    def forward(self, x):
        return self.d(checkpoint(self.part, x, use_reentrant=False))

    def part(self, x):
        return self.relu(self.bn(self.c(x)))


@script(Checkpointed, grad=True)
def checkpointed(model):
    y = model(image(2))
    y.sum().backward()
    return y, model.c.weight.grad, model.bn.num_batches_tracked


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -3 * gradient


@script(lambda: Flips(), grad=True)
def own_autograd_function(model):
    x = image().requires_grad_()
    y = model(x)
    y.sum().backward()
    return y, x.grad, model.c.weight.grad


class Flips(Net):
    def forward(self, x):
        return self.d(Reversed.apply(self.relu(self.c(x))))


class Straight(Net):
    """A straight-through estimator."""

    def forward(self, x):
        y = self.c(x)
        return self.d(y + (y.sign() - y).detach())


@script(Straight, grad=True)
def straight_through(model):
    x = image().requires_grad_()
    model(x).sum().backward()
    return x.grad, model.c.weight.grad, model.d.weight.grad


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) + 1


@forward()
def scripted_function(self, x):
    return self.d(scripted(self.c(x)))


@script(lambda: nn.Sequential(conv(), torch.jit.script(nn.Sequential(conv(), nn.ReLU())), conv()))
def scripted_part(model):
    return calls(model)


@script(lambda: nn.Sequential(conv(), torch.jit.trace(nn.ReLU(), torch.randn(1, 8, 9, 9)), conv()))
def traced_part(model):
    return calls(model)


class Compiled(Net):
    def __init__(self):
        super().__init__()
        self.inner = torch.compile(row(), backend="eager")

    def forward(self, x):
        return self.relu(self.c(self.inner(x)))


@script(Compiled)
def compiled_part(model):
    return calls(model)


class Labelled(torch.Tensor):
    """A subclass that survives every operation."""


@script(Chain)
def subclass_as_input(model):
    x = image().as_subclass(Labelled)
    y = model(x)
    return y, type(y).__name__


@script(Features)
def subclass_image(model):
    y = model(image().as_subclass(Labelled))
    return type(y).__name__, y.sum().item() > -1e9, y


class Logged(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@script(Features, compiled=False)
def under_a_dispatch_mode(model):
    with Logged() as mode:
        y = model(image())
    return y, mode.count > 0


@script(Features)
def under_a_default_device(model):
    with torch.device("cpu"):
        y = model(image())
    return y, torch.zeros(1).device.type


@script(Features)
def under_a_default_dtype(model):
    torch.set_default_dtype(torch.float64)
    try:
        return model(image().float()), torch.ones(1).dtype
    finally:
        torch.set_default_dtype(torch.float32)


@script(Features, compiled=False)
def under_the_profiler(model):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = model(image())
    return y, len(profile.events()) > 0


@forward()
def sparse_and_quantized_beside(self, x):
    y = self.relu(self.c(x))
    return y.to_sparse().to_dense(), torch.fake_quantize_per_tensor_affine(y, 0.1, 0, 0, 255)


@forward()
def compiler_disabled_part(self, x):
    return self.d(slow_path(self.relu(self.c(x))))


@torch.compiler.disable
def slow_path(x):
    return x * 2 if float(x.sum()) > -1e9 else x


@forward()
def fft_between(self, x):
    y = torch.fft.rfft2(self.c(x))
    return torch.fft.irfft2(y, s=(9, 9)) + F.relu(x), y

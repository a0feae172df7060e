"""Training: losses, gradients, optimisers and statistics over several steps."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from .case import Chain, Features, Net, conv, gradients, image, norm, row, script


def steps(model, optimizer, count=3):
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(image(2)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def trained(make, name, **flags):
    """A case: three steps of an optimiser, then an answer in eval mode."""
    def note(function):
        def run(model):
            model.train()
            losses = steps(model, function(model.parameters()))
            y = model.eval()(image())
            return losses, y.detach(), list(model.parameters()), list(model.buffers())
        run.__name__, run.__module__ = name, function.__module__
        return script(make, grad=True, **flags)(run)
    return note


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


trained(Chain, "chain")(sgd)
trained(row, "sequential")(sgd)
trained(lambda: nn.Sequential(conv(), norm(), nn.ReLU(True), conv(), norm()), "in_place")(sgd)
trained(lambda: nn.Sequential(conv(), nn.ReLU(), nn.MaxPool2d(2), conv(), nn.Dropout(0.3)),
        "pool_and_dropout")(sgd)
trained(lambda: nn.Sequential(conv(bias=False), norm(affine=False)), "no_weights")(sgd)


@(lambda f: trained(lambda: nn.Sequential(conv(bias=False), norm(), nn.ReLU(), conv()), "adam")(f))
def adam(parameters):
    # with a small eps it would make steps of rounding errors
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-3)


@(lambda f: trained(Features, "without_a_fused_step")(f))
def foreach(parameters):
    return torch.optim.SGD(parameters, lr=0.1, foreach=True)


@script(Chain, train=True, grad=True)
def accumulated(model):
    for _ in range(3):
        model(image(2)).sum().backward()
    return gradients(model)


@script(Features, train=True, grad=True)
def gradient_of_the_input(model):
    x = image(2).requires_grad_()
    model(x).sin().sum().backward()
    return x.grad, gradients(model)


@script(Features, grad=True)
def gradient_in_eval_mode(model):
    x = image(2).requires_grad_()
    y = model(x)
    y.sin().sum().backward()
    return y, x.grad, gradients(model)


@script(lambda: nn.Sequential(conv(), nn.Tanh(), conv()), grad=True, compiled=False)
def second_derivative(model):
    x = image().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.pow(2).sum().backward()
    return slope, x.grad, gradients(model)


@script(lambda: nn.Sequential(conv(), nn.ReLU(), conv()), grad=True)
def gradient_without_parameters(model):
    x = image().requires_grad_()
    return torch.autograd.grad(model(x).sum(), x), gradients(model)


@script(Chain, train=True, grad=True)
def statistics_and_gradients(model):
    x = image(2)
    y = model(x)
    (y - 1).pow(2).mean().backward()
    return y, gradients(model), list(model.buffers())


@script(Chain, train=True, grad=True)
def eval_between_steps(model):
    optimizer, seen, x = sgd(model.parameters()), [], image()
    for _ in range(2):
        seen.append(steps(model.train(), optimizer, 1))
        with torch.no_grad():
            seen.append(model.eval()(x))
    return seen


@script(Chain, grad=True, released=False, compiled=False)
def original_learns_too(model, original):
    """The two share weights: a step of one is a step of both."""
    x = image(2)
    steps(model.train(), sgd(model.parameters()), 1)
    return original.eval()(x), model.eval()(x)


@script(Chain, grad=True, released=False, compiled=False)
def optimizer_of_the_original(model, original):
    optimizer = sgd(original.parameters())
    return steps(model.train(), optimizer), model.eval()(image())


@script(Chain, train=True, grad=True)
def clipped(model):
    model(image(2)).sum().backward()
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return total, gradients(model)


@script(Chain, train=True, grad=True, edits=True)
def only_the_head(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("fc")
    losses = steps(model, sgd([p for p in model.parameters() if p.requires_grad]))
    return losses, gradients(model), model.c.weight


@script(Chain, train=True, grad=True, compiled=False)
def moving_average_of_weights(model):
    average = copy.deepcopy(model)
    losses = steps(model, sgd(model.parameters()))
    with torch.no_grad():
        for a, b in zip(average.parameters(), model.parameters()):
            a.lerp_(b, 0.5)
    return losses, average.eval()(image()), model.eval()(image())


@script(Chain, train=True, grad=True, released=False, compiled=False)
def averaged_model(model):
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = sgd(model.parameters())
    for _ in range(2):
        steps(model, optimizer, 1)
        average.update_parameters(model)
    torch.optim.swa_utils.update_bn([image(2), image(2)], average)
    return average.eval()(image())


class Auxiliary(Net):
    def forward(self, x):
        y = self.relu(self.bn(self.c(x)))
        main = self.fc(self.relu(self.d(y)).mean((2, 3)))
        return (main, self.fc(y.mean((2, 3)))) if self.training else main


@script(Auxiliary, train=True, grad=True)
def auxiliary_head(model):
    model.train()
    main, aux = model(image(2))
    target = torch.tensor([1, 3])
    loss = F.cross_entropy(main, target) + 0.4 * F.cross_entropy(aux, target)
    loss.backward()
    return loss, gradients(model), model.eval()(image())


@script(Chain, train=True, grad=True)
def autocast_training(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(image(2)).float().pow(2).mean()
    loss.backward()
    return loss.bfloat16(), model.fc.weight.grad.bfloat16(), model.d.weight.grad.bfloat16()


@script(lambda: nn.Sequential(conv(), nn.ReLU(inplace=True), conv()), grad=True)
def graph_kept(model):
    x = image().requires_grad_()
    y = model(x).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    return first, x.grad


@script(lambda: nn.Sequential(conv(), nn.ReLU(), conv()), grad=True, edits=True)
def weight_changed_before_backward(model):
    y = model(image()).sum()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    try:
        y.backward()
    except RuntimeError as error:
        return error
    return gradients(model)

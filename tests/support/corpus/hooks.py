"""Hooks, registered before and after a model was optimised."""

import torch
from torch import nn
from torch.nn.modules import module as modules

from .case import Chain, Features, Net, image, row, script


class Counting:
    """A hook of any kind that notes its calls."""

    def __init__(self, result=None):
        self.calls, self.result = [], result

    def __call__(self, module, *args):
        self.calls.append((type(module).__name__, [tuple(a.shape) if torch.is_tensor(a) else len(a)
                                                   for a in args]))
        return None if self.result is None else self.result(*args)


def around(register, part="", make=Features, result=None, grad=False):
    """A case: calls before, with and after a hook."""
    def note(function):
        def run(model):
            x, hook = image(), Counting(result)
            seen = [model(x)]
            handle = getattr(model.get_submodule(part), register)(hook)
            seen.append(model(x))
            if grad:
                seen[-1].sum().backward()
            handle.remove()
            return seen, model(x), hook.calls, x
        run.__name__, run.__module__ = function.__name__, function.__module__
        return script(make, edits=True, grad=grad)(run)
    return note


FORWARD, BEFORE = "register_forward_hook", "register_forward_pre_hook"
BACKWARD = "register_full_backward_hook"


@around(FORWARD, "c")
def on_conv(): ...


@around(FORWARD, "bn")
def on_norm(): ...


@around(FORWARD, "relu")
def on_relu(): ...


@around(FORWARD)
def on_root(): ...


@around(FORWARD, "1", row)
def on_item(): ...


@around(FORWARD, "c", result=lambda args, y: y + 1)
def changes_result_of_conv(): ...


@around(FORWARD, "bn", result=lambda args, y: torch.zeros_like(y))
def changes_result_of_norm(): ...


@around(FORWARD, "", result=lambda args, y: (y, y.mean()))
def changes_result_of_root(): ...


@around(FORWARD, "c", result=lambda args, y: y.mul_(2))
def changes_result_in_place(): ...


@around(BEFORE, "c")
def before_conv(): ...


@around(BEFORE, "relu", result=lambda args: (args[0] * 2,))
def changes_input_of_relu(): ...


@around(BEFORE, "", result=lambda args: args[0] * 2)
def changes_input_of_root(): ...


@around(BACKWARD, "c", grad=True)
def backward_of_conv(): ...


@around(BACKWARD, "relu", grad=True)
def backward_of_relu(): ...


@around(BACKWARD, "", Chain, grad=True)
def backward_of_root(): ...


@around("register_full_backward_pre_hook", "bn", grad=True)
def backward_before_norm(): ...


class Hooked(Features):
    """Has its hooks from the start, as feature extractors do."""

    def __init__(self):
        super().__init__()
        self.taken = {}
        self.c.register_forward_hook(lambda m, args, y: self.taken.__setitem__("c", y))
        self.bn.register_forward_hook(self.keep)

    def keep(self, module, args, y):
        self.taken["bn"] = y


class Outside(Net):
    """Hooks that do not know the model."""

    def forward(self, x):
        return self.relu(self.bn(self.c(x)))


FOUND = {}


def outside():
    model = Outside()
    model.c.register_forward_hook(lambda m, args, y: FOUND.update(c=y))
    model.register_forward_pre_hook(lambda m, args: FOUND.update(x=args[0]))
    return model


@script(outside)
def registered_before(model):
    FOUND.clear()
    y = model(image())
    return y, dict(FOUND), sorted(FOUND)


@script(Features, released=False)
def of_all_modules(model):
    names = []
    handle = modules.register_module_forward_hook(
        lambda m, args, y: names.append(type(m).__name__) if m in (model.c, model.bn) else None)
    try:
        model(image())
        model(image())
    finally:
        handle.remove()
    return names, model(image())


@script(Features, released=False)
def of_all_modules_changing(model):
    x = image()
    handle = modules.register_module_forward_hook(
        lambda m, args, y: y + 1 if isinstance(m, nn.BatchNorm2d) else None)
    try:
        first = model(x)
    finally:
        handle.remove()
    return first, model(x)


@script(Features, edits=True)
def with_keywords(model):
    seen = []
    model.register_forward_hook(lambda m, args, options, y: seen.append(sorted(options)),
                                with_kwargs=True)
    model.register_forward_pre_hook(
        lambda m, args, options: (args, {**options, "x": options["x"] + 1}), with_kwargs=True)
    return model(x=image()), seen


@script(Features, edits=True)
def always_called(model):
    seen = []
    model.c.register_forward_hook(lambda m, args, y: seen.append(y is None), always_call=True)
    try:
        model(torch.randn(1, 3, 9, 9))
    except Exception:
        seen.append("raised")
    return seen, model(image())


@script(Features, edits=True)
def order_of_hooks(model):
    order = []
    for name in ("first", "second"):
        model.c.register_forward_hook(lambda m, args, y, name=name: order.append(name))
        model.relu.register_forward_hook(lambda m, args, y, name=name: order.append("r" + name))
    model.c.register_forward_hook(lambda m, args, y: order.append("zeroth"), prepend=True)
    model(image())
    return order


@script(Features, grad=True, edits=True)
def on_a_weight(model):
    seen = []
    model.c.weight.register_hook(lambda g: seen.append(tuple(g.shape)) or g * 2)
    model(image()).sum().backward()
    return seen, model.c.weight.grad, model.bn.weight.grad


@script(Features, grad=True)
def on_the_result(model):
    x, seen = image(), []
    y = model(x)
    y.register_hook(lambda g: seen.append(g.sum().item()))
    (y * 3).sum().backward()
    return seen, model.c.weight.grad


@script(Features, edits=True)
def input_shapes_of_layers(model):
    """As tools that print summaries do it."""
    table = []
    handles = [m.register_forward_hook(lambda m, args, y: table.append(
        (type(m).__name__, tuple(args[0].shape), tuple(y.shape))))
        for m in model.modules() if not list(m.children())]
    model(image(2))
    for handle in handles:
        handle.remove()
    return table

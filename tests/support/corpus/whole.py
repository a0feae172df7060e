"""The optimised model as an object: its class, names, copies and files."""

import copy
import io
import pickle

import torch
from torch import nn

from .case import Chain, Features, Net, attempt, image, row, script


class Rich(Chain):
    """More than a forward."""

    kind = "rich"

    def __init__(self):
        super().__init__()
        self.labels, self._secret = ["cat", "dog"], 4

    @property
    def parameter_count(self):
        return sum(p.numel() for p in self.parameters())

    @classmethod
    def build(cls):
        return cls()

    @staticmethod
    def classes():
        return 4

    def predict(self, x):
        return self(x).argmax(1) >= 0, self.labels

    def freeze(self):
        for p in self.parameters():
            p.requires_grad = False
        return self

    def __len__(self):
        return 7

    def __getitem__(self, i):
        return (self.c, self.d)[i]

    def __contains__(self, name):
        return name in self.labels

    def extra_repr(self):
        return "rich=True"


@script(Rich, released=False, compiled=False)
def class_is_kept(model):
    return isinstance(model, Rich), isinstance(model, Net), isinstance(model, nn.Module)


@script(Rich, released=False)
def methods_and_properties(model):
    return (model.parameter_count, model.classes(), model.predict(image()), model.kind,
            model._secret, model.labels, attempt(lambda: model.nothing))


@script(Rich, released=False, compiled=False)
def special_methods(model):
    return len(model), model[1].weight, "cat" in model, "bird" in model, callable(model)


@script(Rich, released=False, compiled=False)
def text(model):
    return "rich=True" in str(model), "Conv2d" in repr(model), len(str(model)) > 40


@script(Rich, edits=True)
def method_that_edits(model):
    y = model.freeze()(image())
    return y, y.requires_grad, [p.requires_grad for p in model.parameters()]


@script(row, released=False, compiled=False)
def sequential_as_a_list(model):
    return (len(model), type(model[0]).__name__, [type(m).__name__ for m in model],
            isinstance(model, nn.Sequential), type(model[-1]).__name__, len(model[1:3]))


@script(row, released=False, compiled=False)
def types_of_modules(model):
    return [isinstance(m, nn.Conv2d) for m in model.children()], [
        isinstance(m, nn.BatchNorm2d) for m in model.children()]


@script(Rich, released=False, compiled=False)
def names(model):
    return ([name for name, _ in model.named_modules()], [name for name, _ in
            model.named_children()], [name for name, _ in model.named_parameters()],
            [name for name, _ in model.named_buffers()])


@script(Rich, released=False)
def order_of_parameters(model):
    return [tuple(p.shape) for p in model.parameters()], [tuple(b.shape) for b in model.buffers()]


@script(Rich, released=False, compiled=False)
def tensors_are_the_originals(model, original):
    pairs = list(zip(model.parameters(), original.parameters()))
    return [a is b for a, b in pairs], len(pairs)


@script(Rich, released=False, compiled=False)
def state_of_the_original_fits(model, original):
    state = model.state_dict()
    return list(state), original.load_state_dict(state), model.load_state_dict(
        original.state_dict()).missing_keys


@script(Chain, edits=True)
def original_is_edited(model, original):
    """Weights are shared: an edit of the original is seen."""
    x = image()
    first = model(x)
    with torch.no_grad():
        original.c.weight.mul_(-1)
        original.bn.running_var.fill_(3.0)
    return first, model(x)


@script(Chain, released=False, compiled=False)
def original_still_works(model, original):
    x = image()
    return model(x), original(x), original.c(x), model.c(x)


@script(Chain, released=False, compiled=False)
def original_keeps_its_forward(model, original):
    return type(original).__name__, "forward" in vars(original), type(original.c) is nn.Conv2d, [
        name for name, _ in original.named_modules()]


@script(Chain, compiled=False)
def deep_copy(model):
    x = image()
    first = model(x)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        next(twin.parameters()).zero_()
    return first, twin(x), model(x)


@script(Chain, edits=True, compiled=False)
def deep_copy_then_edit(model):
    x = image()
    model(x)
    twin = copy.deepcopy(model)
    twin.relu = nn.Tanh()
    twin.c.weight.data.mul_(2)
    return twin(x), model(x)


@script(Features, compiled=False)
def pickled(model):
    x = image()
    first = model(x)
    twin = pickle.loads(pickle.dumps(model))
    return first, twin(x), twin.training


@script(Rich, released=False, compiled=False)
def pickled_with_its_class(model):
    twin = pickle.loads(pickle.dumps(model))
    return twin(image()), twin.classes(), twin.labels, len(twin)


@script(row, released=False, compiled=False)
def saved_and_loaded(model):
    x, file = image(), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = row().eval()
    fresh.load_state_dict(torch.load(file))
    return fresh(x), model(x)


@script(row, compiled=False)
def whole_model_saved(model):
    x, file = image(), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)(x), model(x)

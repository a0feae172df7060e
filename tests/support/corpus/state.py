"""Whatever Python keeps between two calls, and decisions made from data."""

import contextlib
import io
import warnings

import torch
from torch import nn

from .case import Net, attempt, calls, forward, image, module_of, script

COUNTER = 0
SCALE = 1.0
SEEN: list[int] = []


@forward(parts=lambda: {"calls": 0})
def counter(self, x):
    self.calls += 1
    return self.c(x) * self.calls


@forward(parts=lambda: {"calls": 0}, released=False,
         script=lambda model: (calls(model), model.calls))
def counter_read_outside(self, x):
    self.calls += 1
    return self.relu(self.bn(self.c(x)))


@forward(parts=lambda: {"history": []}, released=False,
         script=lambda model: (calls(model), model.history))
def growing_list(self, x):
    self.history.append(tuple(x.shape))
    return self.c(x) + len(self.history)


@forward(parts=lambda: {"seen": {}}, released=False,
         script=lambda model: (calls(model), model.seen))
def growing_dict(self, x):
    self.seen[len(self.seen)] = x.sum()
    return self.relu(self.c(x))


@forward(parts=lambda: {"cache": None})
def cached_first_result(self, x):
    if self.cache is None:
        self.cache = self.c(x).detach()
    return self.relu(self.d(x) + self.cache)


@forward(parts=lambda: {"grids": {}}, script=lambda model: [
    model(image(1, 8, size, 9)) for size in (9, 7, 9)])
def cache_by_size(self, x):
    key = x.shape[2]
    if key not in self.grids:
        self.grids[key] = torch.linspace(0, 1, key).view(1, 1, -1, 1) * (1 + len(self.grids))
    return self.c(x) + self.grids[key]


@forward(parts=lambda: {"memory": nn.Buffer(torch.zeros(1, 8, 9, 9))}, edits=True, released=True)
def memory_reassigned(self, x):
    self.memory = self.relu(self.c(x) + self.memory).detach()
    return self.memory * 2


@forward(parts=lambda: {"average": nn.Buffer(torch.zeros(1, 8, 1, 1))})
def moving_average(self, x):
    y = self.c(x)
    self.average.lerp_(y.detach().mean((0, 2, 3), keepdim=True), 0.5)
    return self.relu(y - self.average)


@forward(parts=lambda: {"ready": nn.Buffer(torch.tensor(False))})
def initialised_by_first_call(self, x):
    if not self.ready:
        self.bn.running_mean.copy_(x.mean((0, 2, 3)))
        self.ready.fill_(True)
    return self.relu(self.bn(self.c(x)))


@forward(parts=lambda: {"last": None}, released=False,
         script=lambda model: (calls(model), model.last))
def keeps_last_feature(self, x):
    self.last = self.c(x)
    return self.fc(self.relu(self.last).mean((2, 3)))


def read_loss(model):
    y = model(image())
    return y, model.loss, model(image()), model.loss


@forward(read_loss, parts=lambda: {"loss": 0.0}, released=False)
def side_loss(self, x):
    y = self.relu(self.c(x))
    self.loss = y.abs().mean()
    return y


# decisions made from data


@forward(script=lambda model: [model(image() + shift) for shift in (9, -9, 9)])
def branch_on_sum(self, x):
    return self.c(x) if x.sum() > 0 else self.relu(self.d(x))


@forward(script=lambda model: [model(image() * 0 + value) for value in (3.0, 1.0, 4.0)])
def item_as_count(self, x):
    y = self.c(x)
    for _ in range(int(x.max().item())):
        y = self.relu(self.d(y))
    return y


@forward(script=lambda model: [model(image() + value) for value in (5.0, 0.0)])
def loop_until_small(self, x):
    steps = 0
    while x.abs().mean() > 2 and steps < 6:
        x, steps = x * 0.5, steps + 1
    return self.c(x), steps


@forward(script=lambda model: [model(image() + value) for value in (50.0, -50.0)])
def where_of_mask(self, x):
    y = self.c(x)
    chosen = torch.nonzero(x.mean((0, 2, 3)) > 0).flatten()
    return y[:, chosen], chosen


@forward(script=lambda model: [attempt(model, image() + value) for value in (50.0, -50.0, 50.0)])
def refuses_by_value(self, x):
    if bool(x.mean() < 0):
        raise ValueError("negative")
    return self.relu(self.c(x))


@forward()
def early_exit(self, x):
    y = self.relu(self.bn(self.c(x)))
    if y.max() > 1e6:
        return y
    return self.d(y)


# globals, output


class Numbered(Net):
    def forward(self, x):
        global COUNTER
        COUNTER += 1
        return self.c(x) * COUNTER


@script(Numbered)
def global_counter(model):
    here = module_of(global_counter)
    here.COUNTER = 0
    return calls(model), here.COUNTER


@script(lambda: Counts())
def global_changed_later(model):
    here = module_of(global_changed_later)
    seen = []
    for here.SCALE in (1.0, 3.0, -2.0):
        seen.append(model(image()))
    here.SCALE = 1.0
    return seen


class Counts(Net):
    def forward(self, x):
        return self.relu(self.c(x) * SCALE)


class Logs(Net):
    def forward(self, x):
        SEEN.append(x.shape[0])
        return self.relu(self.c(x))


@script(Logs)
def global_list_grows(model):
    SEEN.clear()
    model(image())
    model(image(2))
    return list(SEEN)


@script(lambda: Prints())
def printed(model):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        model(image())
        model(image(2))
    return out.getvalue()


class Prints(Net):
    def forward(self, x):
        print("shape", tuple(x.shape))
        return self.c(x)


@script(lambda: Warns())
def warned(model):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        y = model(image())
        model(image())
    return [str(w.message) for w in found if w.category is UserWarning], y


class Warns(Net):
    def forward(self, x):
        warnings.warn("be careful", UserWarning, stacklevel=2)
        return self.relu(self.c(x))

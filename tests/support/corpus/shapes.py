"""Shapes, types and questions about the input."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Net, attempt, conv, forward, image, norm, row, script


def sizes(model):
    shapes = ((1, 8, 9, 9), (2, 8, 9, 9), (1, 8, 7, 9), (1, 8, 9, 9))
    return [attempt(model, image(*shape)) for shape in shapes]


@forward(sizes)
def batch_and_size_change(self, x):
    return self.relu(self.bn(self.c(x)) + x)


@forward(sizes)
def branch_on_size(self, x):
    return self.c(x) if x.shape[2] > 8 else self.relu(self.d(x))


@forward(sizes)
def branch_on_batch(self, x):
    return self.relu(self.c(x)) if len(x) == 1 else self.c(x)


@forward(sizes)
def view_by_shape(self, x):
    n, c, h, w = x.shape
    return self.c(x).reshape(n, c, h * w).transpose(1, 2), n * c


@forward(sizes)
def size_in_result(self, x):
    y = self.c(x)
    return y, y.size(), x.size(2), x.numel(), list(y.shape)


@forward(sizes)
def grid_made_by_shape(self, x):
    rows = torch.arange(x.shape[2], dtype=x.dtype).view(1, 1, -1, 1)
    return self.relu(self.c(x + rows))


@forward(sizes, parts=lambda: {"position": nn.Parameter(torch.randn(1, 8, 9, 9))})
def position_fits_one_size(self, x):
    return self.relu(self.c(x) + self.position)


@forward(sizes)
def padded_to_even(self, x):
    return self.pool(self.c(F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))))


@forward(lambda model: [attempt(model, image(*s)) for s in ((1, 8, 9, 9), (1, 4, 9, 9))])
def asserted_channels(self, x):
    assert x.shape[1] == 8
    return self.relu(self.c(x))


@forward(lambda model: [attempt(model, image(1, c)) for c in (8, 3, 8)])
def wrong_channels(self, x):
    return self.relu(self.bn(self.c(x)))


@forward(lambda model: [attempt(model, image(1, c)) for c in (8, 3, 8)])
def catches_its_own_error(self, x):
    try:
        return self.relu(self.c(x))
    except RuntimeError:
        return torch.zeros(())


@forward(lambda model: [attempt(model, x) for x in (image(), image()[0], torch.zeros(8), image())])
def checks_rank(self, x):
    if x.dim() not in (3, 4):
        raise ValueError(f"{x.dim()} dimensions")
    return self.relu(self.c(x))


@script(lambda: nn.Sequential(conv(), nn.ReLU(), conv()))
def without_a_batch(model):
    x = torch.randn(8, 9, 9)
    return model(x), model(image()), x


@script(row)
def norm_refuses_no_batch(model):
    return attempt(model, torch.randn(8, 9, 9)), model(image())


@script(lambda: nn.Sequential(conv(), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()))
def empty_batch(model):
    return attempt(model, torch.randn(0, 8, 9, 9)), model(image())


@script(row)
def empty_batch_with_norm(model):
    return attempt(model.eval(), torch.randn(0, 8, 9, 9)), model(image())


@script(lambda: nn.Sequential(conv(), nn.ReLU()))
def smaller_than_the_filter(model):
    return [attempt(model, image(1, 8, 1, 1)), attempt(model, image(1, 8, 2, 1))]


@script(lambda: nn.Sequential(conv(padding=0), nn.ReLU()))
def too_small_for_the_filter(model):
    return [attempt(model, image(1, 8, 2, 2)), model(image(1, 8, 3, 3))]


@script(lambda: nn.Sequential(conv(), nn.ReLU()))
def wrong_dtype(model):
    x = torch.randn(1, 8, 9, 9, dtype=torch.float64)
    return attempt(model, x), attempt(model, x.long()), attempt(model, x.half()), model(x.float())


@script(row)
def views_as_input(model):
    big = torch.randn(2, 16, 18, 9)
    return [model(big[1:, ::2, ::2]), model(big.transpose(2, 3)[:1, 3:11]),
            model(big[:1, :8].flip(3)), model(big[0, :8, :9].unsqueeze(0)),
            model(torch.randn(1, 8, 1, 1).expand(1, 8, 9, 9)), big]


@forward()
def asks_whether_tensor(self, x):
    return (self.c(x), isinstance(x, Tensor), torch.is_tensor(x), type(x).__name__,
            hasattr(x, "shape"), hasattr(x, "missing"))


@forward()
def asks_for_dtype_and_device(self, x):
    y = self.c(x)
    if x.dtype == torch.float32 and x.device.type == "cpu":
        y = self.relu(y)
    return y.to(x.dtype), str(y.device), y.dtype, y.requires_grad, x.is_floating_point()


@forward()
def asks_the_weight(self, x):
    y = x.to(self.c.weight.dtype).to(next(self.parameters()).device)
    return self.relu(self.c(y)) * self.c.weight.shape[0]


@forward()
def casts_inside(self, x):
    return self.relu(self.c(x)).double().mean((2, 3)), self.c(x).half(), x.int()


class Accepts(Net):
    """Many kinds of input, as processors of images have it."""

    def forward(self, x):
        if isinstance(x, list | tuple):
            x = torch.cat(list(x))
        if isinstance(x, dict):
            x = x["pixels"]
        if x.dim() == 3:
            x = x.unsqueeze(0)
        if x.dtype == torch.uint8:
            x = x.float() / 255
        return self.relu(self.bn(self.c(x)))


@script(Accepts)
def many_kinds_of_input(model):
    x = image()
    pixels = torch.arange(8 * 81, dtype=torch.uint8).view(1, 8, 9, 9)
    return [model(x), model([x, x]), model((x,)), model({"pixels": x}), model(x[0]), model(pixels)]


@forward(sizes)
def adaptive_pool_then_head(self, x):
    y = F.adaptive_avg_pool2d(self.relu(self.c(x)), 1)
    return self.fc(torch.flatten(y, 1))


@forward(lambda model: [model(image(1, 8, 9, 9)), model(image(1, 8, 11, 9))],
         parts=lambda: {"bn2": norm()})
def resized_to_the_input(self, x):
    small = self.pool(self.relu(self.bn(self.c(x))))
    up = F.interpolate(small, size=x.shape[2:], mode="bilinear", align_corners=False)
    return self.relu(self.bn2(self.d(up)) + x)

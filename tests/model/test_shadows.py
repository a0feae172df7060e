"""Python that asks how many axes, which type or which device: one graph for all sizes."""

from __future__ import annotations

import math
import operator
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_flatten

import tilewise
from tilewise.model import shortcuts
from tilewise.model.shadows import Unknown, traits_of
from tilewise.model.tracer import Tracer


class Net(nn.Module):
    def __init__(self, before, behind):
        super().__init__()
        torch.manual_seed(0)
        self.c, self.d = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.w = nn.Parameter(torch.randn(8, 1, 1))
        self.before, self.behind = before, behind

    def forward(self, x):
        return self.behind(self, self.d(torch.relu(self.c(self.before(self, x)))))


def as_it_is(self, x):
    return x


def batched(self, x):
    return x[None] if x.dim() == 3 else x


def batched_by_length(self, x):
    return x.unsqueeze(0) if len(x.shape) == 3 else x


def from_bytes(self, x):
    return x.float() / 255 if x.dtype is torch.uint8 else x


def from_bytes_by_equality(self, x):
    return x if x.is_floating_point() else x.to(torch.float32) / 255


def where_weights_are(self, x):
    return x.to(self.w.device) if x.device != self.w.device else x.to(self.w.dtype)


def to_tokens(self, y):
    n, c, *rest = y.shape
    tokens = y.reshape(n, c, -1).transpose(1, 2)
    return tokens.softmax(-1) if tokens.ndim == 3 else y.new_zeros(*rest)


def half_size(self, y):
    return F.interpolate(y, size=[side // 2 for side in y.shape[2:]])


def mean_of_rest(self, y):
    return y.mean(tuple(range(2, len(y.shape))))


def area(self, y):
    return y / math.prod(y.shape[-2:])


def masked(self, y):
    return y.masked_fill(y < 0, torch.finfo(y.dtype).min)


def grown(self, y):
    w = self.w
    while w.ndim < y.ndim:
        w = w[None]
    return y * w


def pieces(self, y):
    a, b = y.chunk(2, 1)
    return torch.stack([a, b]) if a.dim() == 4 and b.dtype == torch.float32 else a


BEFORE = [as_it_is, batched, batched_by_length, from_bytes, from_bytes_by_equality,
          where_weights_are]
BEHIND = [to_tokens, half_size, mean_of_rest, area, masked, grown, pieces]
CASES = [(before, pieces) for before in BEFORE] + [(as_it_is, behind) for behind in BEHIND]


def image(before, *shape):
    if before in (from_bytes, from_bytes_by_equality) and shape[-1] % 2:
        return torch.randint(0, 256, shape, dtype=torch.uint8)
    return torch.randn(shape)


@pytest.mark.parametrize(("before", "behind"), CASES)
def test_one_graph_for_all_sizes(before, behind):
    net = Net(before, behind).eval()
    model = tilewise.optimize(net)
    by_axes = before in (batched, batched_by_length)
    with torch.no_grad():
        for side in (16, 18, 20, 24, 15, 17, 21):
            for shape in ([(3, side, 14)] if by_axes else []) + [(2, 3, 14, side)]:
                x = image(before, *shape)
                torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-4)
    found = captures_of(model)
    others = by_axes or before in (from_bytes, from_bytes_by_equality)
    assert len(found) == (2 if others else 1)
    assert all(one.forms is None and not one.opaque for one in found)


def test_a_parameter_of_another_type():
    net = Net(lambda self, x: x.to(self.w.dtype), as_it_is).eval()
    model = tilewise.optimize(net)
    x = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        for change in (lambda: None, model.double, model.float):
            change()
            net = Net(net.before, net.behind).eval().to(model.w.dtype)
            net.load_state_dict(model.state_dict())
            found = model(x)
            assert found.dtype == model.w.dtype
            torch.testing.assert_close(found, net(x), rtol=1e-4, atol=1e-4)


def by_identity(self, y):
    return y * 2 if (y * torch.ones(1, dtype=torch.int64)).dtype is torch.float32 else y


def in_place(self, y):
    y.unsqueeze_(1)
    return y * 2 if y.ndim == 5 else y


def in_place_by_another_name(self, y):
    z = y.relu_()
    z.unsqueeze_(1)
    return y * 2 if y.ndim == 5 else y


def through_out(self, y):
    z = torch.empty(0)
    torch.add(y, 1.0, out=z)
    return z if z.ndim == 4 else y


def chosen(self, y):
    return y * 2 if y[y > 0].dim() == 1 else y


def squeezed(self, y):
    return y * 2 if y[:, :1].squeeze().dim() == 3 else y


@pytest.mark.parametrize("behind", [
    by_identity, in_place, in_place_by_another_name, through_out, chosen, squeezed])
def test_what_does_not_follow(behind):
    net = Net(as_it_is, behind).eval()
    model = tilewise.optimize(net)
    with torch.no_grad():
        for side in (12, 12, 12, 12, 14):
            for batch in (2, 1):
                x = torch.randn(batch, 3, side, side)
                torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-4)


def test_the_length_of_a_batch():
    net = Net(as_it_is, lambda self, y: torch.cat([y[i:i + 1] * i for i in range(len(y))])).eval()
    model = tilewise.optimize(net)
    with torch.no_grad():
        for batch in (2, 2, 2, 3, 3, 3, 3, 3, 3, 2):
            x = torch.randn(batch, 3, 12, 12)
            torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-4)


def told(function, x):
    """What is known of a function's result whatever the sizes, and what it is."""

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.ones(8))

        def forward(self, x):
            return function(self, x)

    net = One()
    tracer = Tracer(net, {})
    _, (result,), _ = tracer.run(*tree_flatten(((x,), {})))
    try:
        shadow = tracer.deciding.shadows.of(result)
    except Unknown:
        return None, traits_of(net(x))
    known = (shadow.value.dim(), shadow.value.dtype, shadow.device) if shadow.is_rigid else None
    return known, traits_of(net(x))


def appended(x, count):
    return x[(...,) + (None,) * count]


KNOWN = {
    "view": lambda s, x: x.view(2, -1), "reshape": lambda s, x: x.reshape((2, 4, -1)),
    "permute": lambda s, x: x.permute(0, 2, 1, *range(3, x.dim())), "abs": lambda s, x: x.abs(),
    "transpose": lambda s, x: x.transpose(0, 1), "unsqueeze": lambda s, x: x.unsqueeze(-1),
    "flatten": lambda s, x: x.flatten(1), "back": lambda s, x: torch.flatten(x, -2, -1),
    "float": lambda s, x: x.float(), "to": lambda s, x: x.to(torch.float64),
    "item": lambda s, x: x[0], "slice": lambda s, x: x[:, 1:],
    "none": lambda s, x: x[None, ..., None],
    "pad": lambda s, x: F.pad(x, (1, 1)), "number": lambda s, x: x[x.shape[0] - 1],
    "chunk": lambda s, x: x.chunk(2)[1], "unbind": lambda s, x: x.unbind(1)[0],
    "unpacked": lambda s, x: next(iter(x.chunk(2, 1))), "clone": lambda s, x: x.clone(),
    "sum": lambda s, x: x.sum(1), "above": lambda s, x: x > 0, "largest": lambda s, x: x.max(1)[1],
    "add": lambda s, x: x + 1, "half": lambda s, x: 0.5 * x, "twice": lambda s, x: x + x,
    "cat": lambda s, x: torch.cat([x, x.float()], 1), "broadcast": lambda s, x: x + x[0],
    "other": lambda s, x: x.double() + x, "complex": lambda s, x: x * 1j,
    "keyword": lambda s, x: torch.mul(x, other=x.double()), "by": lambda s, x: x / x.shape[-1],
    "typed": lambda s, x: F.softmax(x, 1, dtype=torch.float64), "row": lambda s, x: F.linear(
        x.float().transpose(-1, -2)[..., :1].expand(*x.shape[:-2], x.shape[-1], 8), s.v),
    "weight": lambda s, x: x * s.w, "moved": lambda s, x: x.to(s.w.device) + 1,
    "to_weight": lambda s, x: x.to(s.w.device, s.w.dtype), "like": lambda s, x: x.to(s.w),
    "appended": lambda s, x: appended(x[0, 0, 0], x.ndim - 1),
    "slices": lambda s, x: x[(slice(None),) * (x.ndim - 1) + (slice(0, 2),)],
    "zeros": lambda s, x: x[(0,) * (x.dim() - 2)], "inplace": lambda s, x: x.clone().add_(1),
    "relu": lambda s, x: F.relu(x), "normalize": lambda s, x: F.normalize(x.float()),
    "pool": lambda s, x: F.max_pool2d(x.float(), 2), "softmax": lambda s, x: x.float().softmax(-1),
    "of_size": lambda s, x: x.new_zeros(x.shape[1:]), "limit": lambda s, x: x.clamp(
        min=x[None].double()), "bool": lambda s, x: x[True], "mean": lambda s, x: x.float().mean(
        tuple(range(2, x.ndim)))}
NEVER = {
    "mask": lambda s, x: x[x > 0], "squeeze": lambda s, x: x[..., :1].squeeze(),
    "squeeze_dim": lambda s, x: x.squeeze(-1), "repeated": lambda s, x: x[(None,) * x.shape[0]],
    "flatten_to": lambda s, x: x.flatten(0, x.shape[0] - 1),
    "shape": lambda s, x: x.new_zeros([1] * x.shape[0]),
    "indices": lambda s, x: F.max_pool2d(x.float(), 2, return_indices=True)[1],
    "promoted": lambda s, x: x.float().mean(tuple(range(1, x.dim()))) + x.double().mean(
        tuple(range(1, x.dim()))).squeeze(),
    "some_sizes": lambda s, x: x.new_zeros(x.shape[:x.shape[0]]),
    "later": lambda s, x: renamed(x), "out": lambda s, x: through(x),
    "power": lambda s, x: x.new_zeros(2) * 2 ** (x.shape[0] - 3), "outside": lambda s, x: x + (
        torch.ones(1))}


def renamed(x):
    y = x.clone()
    z = y.add_(1)
    z.unsqueeze_(0)
    return y


def through(x):
    y = x[0].clone()
    torch.add(x, 1, out=y.resize_(0))
    return y


@pytest.mark.parametrize("shape", [(2, 4, 8), (2, 4, 6, 8), (1, 4, 6, 8), (2, 4, 6, 8, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("name", [*KNOWN, *NEVER])
def test_what_is_told_is_so(name, dtype, shape):
    x = (torch.rand(shape) * 9).to(dtype)
    try:
        known, true = told({**KNOWN, **NEVER}[name], x)
    except (RuntimeError, ValueError, NotImplementedError, IndexError) as reason:
        pytest.skip(f"PyTorch refuses it: {reason}")
    assert known == (true if name in KNOWN else None)


def test_most_of_it_runs():
    """The test before skips few of its cases."""
    x = torch.randn(2, 4, 6, 8)
    refused = set()
    for name, function in {**KNOWN, **NEVER}.items():
        try:
            told(function, x)
        except (RuntimeError, ValueError, NotImplementedError, IndexError):
            refused.add(name)
    assert not refused


MODULES = [
    (nn.Conv2d(3, 8, 3, 2, 1), (2, 3, 17, 9)),
    (nn.Conv2d(4, 8, (3, 5), padding="same", groups=2), (1, 4, 7, 8)),
    (nn.Conv1d(3, 4, 5, dilation=2), (2, 3, 20)),
    (nn.Conv3d(2, 4, 3, padding=(0, 1, 2)), (1, 2, 5, 6, 7)),
    (nn.BatchNorm2d(3).eval(), (2, 3, 4, 5)), (nn.SiLU(inplace=True), (3, 4)),
    (nn.Upsample(scale_factor=1.7), (1, 2, 7, 9)), (nn.Upsample((5, 6)), (1, 2, 7, 9)),
    (nn.Upsample(scale_factor=2, mode="bilinear"), (1, 2, 7, 9)),
    (nn.GroupNorm(2, 4), (2, 4, 3, 3)), (nn.LayerNorm(5), (2, 5))]
OTHER_MODULES = [
    (nn.Conv2d(3, 8, 3), (2, 4, 9, 9)),  # an error of torch's
    (nn.Conv2d(3, 8, 3), (1, 3, 2, 2)), (nn.Conv2d(3, 8, 3), (3, 9, 9)),
    (nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), (1, 3, 9, 9)),
    (nn.BatchNorm2d(3), (2, 4, 5, 5)), (nn.MaxPool2d(2), (1, 2, 4, 4))]


@pytest.mark.parametrize(("module", "shape"), MODULES + OTHER_MODULES)
def test_shortcuts_for_modules(module, shape):
    x = torch.randn(shape)
    found = shortcuts.of_module(module, x.to("meta"))
    assert (found is None) == ((module, shape) in OTHER_MODULES)
    if found is not None:
        assert traits_of(found)[:2] == traits_of(module(x))[:2]
        assert found.shape == module(x).shape


@pytest.mark.parametrize("options", [
    {"size": 5}, {"size": (3, 7)}, {"scale_factor": 0.3}, {"scale_factor": (1.9, 2.0)},
    {"scale_factor": 1.3, "recompute_scale_factor": True},
    {"scale_factor": 1.1, "mode": "bicubic"}, {"size": 4, "mode": "bilinear", "antialias": True}])
@pytest.mark.parametrize("sides", [(7, 9), (10, 30), (33, 100)])
def test_shortcuts_for_interpolate(options, sides):
    x = torch.randn(1, 2, *sides)
    found = shortcuts.of_function("interpolate", [x.to("meta")], options)
    assert found.shape == F.interpolate(x, **options).shape


@pytest.mark.parametrize("a", [torch.ones(2, 3), torch.ones(3).double(), torch.ones(4, 1, 1), 2, 1j,
                               torch.ones(3, dtype=torch.int32), torch.tensor(2.0)])
@pytest.mark.parametrize("b", [torch.ones(2, 3), torch.ones(4, 1, 3), torch.ones(2, 3).half(), 0.5,
                               True, torch.ones(2, 3, dtype=torch.int64)])
@pytest.mark.parametrize("name", ["add", "mul", "truediv", "sub"])
def test_shortcuts_for_sums(a, b, name):
    function = getattr(operator, name)
    found = shortcuts.of_function(name, [
        x.to("meta") if isinstance(x, torch.Tensor) else x for x in (a, b)], {})
    if found is not None:
        assert found.shape == function(a, b).shape
        assert found.dtype == function(a, b).dtype
    plain = [x for x in (a, b) if isinstance(x, torch.Tensor)]
    if {x.dtype for x in plain} == {torch.float32} and not isinstance(a, complex) and b is not True:
        assert found is not None


def test_autocast_changes_types():
    net = Net(as_it_is, lambda self, y: y * 2 if y.dtype == torch.bfloat16 else y * 3).eval()
    model = tilewise.optimize(net)
    x = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-4)
            with torch.autocast("cpu", torch.bfloat16):
                torch.testing.assert_close(model(x), net(x), rtol=3e-2, atol=3e-2)
    assert any(capture.granted for capture in captures_of(model))


def captures_of(model):
    return [one for all_ in model.__dict__["forward"].captures.values() for one in all_]


class Sums(nn.Module):
    def forward(self, y):
        self.cache = y  # which no graph can repeat
        return y.sum(1)


class Own(nn.Module):
    """Parts that change what the model asks for."""

    def __init__(self, ask):
        super().__init__()
        self.c, self.act, self.part, self.ask = nn.Conv2d(3, 8, 3), nn.ReLU(), Sums(), ask
        self.act.forward = lambda x: x.sum(1)
        self.part.cache = torch.zeros(1)
        self.register_buffer("buf", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.ask(self, self.c(x))


def own_forward(self, y):
    z = self.act(y)
    return z * 2 if z.ndim == 4 else z


def after_a_write(self, y):
    z = self.part(y)
    return z * 2 if self.part.cache.dim() == 4 else z


def not_called(self, y):
    return y * 2 if y.is_complex else y


def never_equal(self, y):
    return y * 2 if y.dim == 4 else y


def in_a_variable(self, y):
    kind = y[y > 0].dtype
    plus = 1
    return y * 2 if kind is torch.float32 and plus else y


def of_a_tuple(self, y):
    return y * 2 if y.max(1)[0].dtype is torch.float32 else y


def promoted(self, y):
    return y * 2 if torch.promote_types(y.dtype, torch.float64) is torch.float64 else y


def kind(t):
    return t.dtype


def by_a_helper(self, y):
    return y * 2 if kind(y[y > 0]) is torch.float32 else y


def by_keyword(self, y):
    return y * 2 if torch.is_floating_point(input=y) else y


def with_a_second_user(self, y):
    z = self.part.forward(y) if len(y.shape) == 3 else y
    return torch.relu(z)


def for_each(self, y):
    return y * sum([len(y.shape), *(2 for _ in y.shape), *(1 for _ in y[0, 0, 0, 0].shape)])


def reversed_pieces(self, y):
    return torch.cat(list(reversed(y.chunk(2))))


def pieces_of_an_input(self, y):
    a, b = y
    return torch.stack([a, b]).to(a.dtype) * a.ndim


@pytest.mark.parametrize("ask", [
    own_forward, after_a_write, not_called, never_equal, in_a_variable, of_a_tuple, promoted,
    reversed_pieces, pieces_of_an_input, by_a_helper, by_keyword, with_a_second_user, for_each])
def test_other_ways_to_ask(ask):
    torch.manual_seed(0)
    net = Own(ask).eval()
    model = tilewise.optimize(net)
    with torch.no_grad():
        for side in (12, 12, 12, 14, 16):
            x = torch.randn(2, 3, side, side)
            torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-4)


def test_autocast_that_is_switched_off_inside():
    def ask(self, y):
        with torch.autocast("cpu", enabled=False):
            if y.dtype != torch.float32:
                y = y.float()
        return y

    net = Net(as_it_is, ask).eval()
    model = tilewise.optimize(net)
    x = torch.randn(2, 3, 12, 12)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            assert model(x).dtype == net(x).dtype == torch.float32


def test_bytes_are_interpolated_as_by_torch():
    def before(self, x):
        y = F.interpolate(x, size=(8, 8), mode="bilinear")
        return y.float() * (1 / 255 if y.dtype == torch.uint8 else 1.0)

    net = Net(before, as_it_is).eval()
    model, x = tilewise.optimize(net), torch.randint(0, 256, (2, 3, 12, 12), dtype=torch.uint8)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-4)


def test_a_question_is_no_second_user():
    """It does not keep an activation from its convolution."""
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.c, self.d = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

        def forward(self, x):
            y = self.c(x)
            assert len(y.shape) == 4
            if y.dim() == 3:
                y = y[None]
            return self.d(torch.relu(y))

    model = tilewise.optimize(Asks().eval())
    with torch.no_grad():
        model(torch.randn(2, 3, 12, 12))
    (capture,) = captures_of(model)
    assert [block.activation for block in capture.blocks] == ["relu", None]


def test_an_operator_of_others_that_gives_a_tensor_axes():
    library = torch.library.Library("tilewise_shadows", "FRAGMENT")
    library.define("grow(Tensor(a!) x) -> ()")
    library.impl("grow", lambda x: (x.unsqueeze_(0), None)[1], "CPU")

    def behind(self, y):
        z = y.clone()
        torch.ops.tilewise_shadows.grow(z)
        return z * 2 if z.dim() == 4 else z

    net = Net(as_it_is, behind).eval()
    model, x = tilewise.optimize(net), torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-4)


def test_a_size_that_is_not_there():
    net = Net(as_it_is, lambda self, y: (y.size(3), y)[1]).eval()
    model = tilewise.optimize(net)
    with torch.no_grad():
        model(torch.randn(2, 3, 12, 12))
        with pytest.raises(IndexError):
            model(torch.randn(3, 12, 12))


@pytest.mark.parametrize("behind", [mean_of_rest, masked, grown])
def test_released(behind):
    net = Net(batched, behind).eval()
    x = torch.randn(2, 3, 12, 14)
    with pytest.raises(tilewise.TilewiseError, match="keep_original is False"):
        tilewise.optimize(net, keep_original=False)
    released = tilewise.optimize(net, x, keep_original=False)
    copy = pickle.loads(pickle.dumps(released))
    with torch.no_grad():
        for model in (released, copy):
            for y in (x, torch.randn(1, 3, 9, 8)):
                torch.testing.assert_close(model(y), net(y), rtol=1e-4, atol=1e-4)
            for y in (x[0], x.double()) if behind is masked else (x[0],):
                with pytest.raises(tilewise.TilewiseError, match="axes"):
                    model(y)

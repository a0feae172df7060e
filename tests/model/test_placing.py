"""Parts of a concatenation are written where they belong in it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tilewise
from tilewise.bench.guarded import GuardedMemory
from tilewise.model import placing, programs
from tilewise.model.captured import all_captured
from tilewise.model.nn import Block
from tilewise.runtime import program

pytestmark = pytest.mark.usefixtures("by_our_kernels")


def conv(c, k, size=3, **options):
    return nn.Sequential(nn.Conv2d(c, k, size, padding=size // 2, **options), nn.ReLU())


class Dense(nn.Module):
    """Each layer reads all before it; the norm comes before the convolution."""

    def __init__(self):
        super().__init__()
        self.first = conv(3, 24)
        self.norms = nn.ModuleList(nn.BatchNorm2d(24 + 10 * i) for i in range(4))
        self.layers = nn.ModuleList(conv(24 + 10 * i, 10) for i in range(4))
        self.last = nn.Conv2d(64, 5, 1)

    def forward(self, x):
        parts = [F.avg_pool2d(self.first(x), 2)]
        for norm, layer in zip(self.norms, self.layers):
            parts.append(layer(F.relu(norm(torch.cat(parts, 1)))))
        return self.last(torch.cat(parts, 1))


class Grown(nn.Module):
    """The same, each concatenation from the one before."""

    def __init__(self):
        super().__init__()
        self.first = conv(3, 24)
        self.layers = nn.ModuleList(conv(24 + 10 * i, 10) for i in range(3))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = torch.cat((x, layer(F.hardtanh(x * 2))), 1)
        return F.max_pool2d(x, 2)


class Branches(nn.Module):
    """As in GoogLeNet: filters of several sizes, and a pool."""

    def __init__(self):
        super().__init__()
        self.stem = conv(3, 17)
        self.parts = nn.ModuleList([conv(17, 35, 1), conv(17, 33), conv(17, 16, 5),
                                    conv(17, 40)])
        self.last = nn.Conv2d(141, 4, 1)

    def forward(self, x):
        x = self.stem(x)
        parts = [part(x) for part in self.parts]
        return self.last(torch.cat([*parts, F.max_pool2d(x, 3, 1, 1)], 1))


class Mixed(nn.Module):
    """Some parts are read by others, returned, taken twice, or torch's."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = conv(3, 12), conv(12, 8), conv(8, 8), conv(8, 8)
        self.last = nn.Conv2d(60, 4, 3)

    def forward(self, x):
        a = self.a(x)
        b = self.b(a)
        c, d = self.c(b), self.d(b)
        e = F.interpolate(F.avg_pool2d(d, 2), scale_factor=2)
        whole = torch.cat((a, c, b.flip(2), d, d, e, c), 1)
        return self.last(whole), d, F.max_pool2d(torch.cat((c, e), 1), 2)


class Written(nn.Module):
    """What is written to a concatenation must not reach its parts."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.last = conv(3, 8), conv(8, 8), nn.Conv2d(24, 4, 1)

    def forward(self, x):
        a = self.a(x)
        b = self.b(a)
        whole = torch.cat((b * 2, b), 1)
        whole[:, :12].add_(1)
        return self.last(torch.cat((whole, F.relu(b - 1)), 1))


class Given(nn.Module):
    """An input and a parameter are parts as well."""

    def __init__(self):
        super().__init__()
        self.a, self.last = conv(3, 16), nn.Conv2d(23, 4, 1)
        self.places = nn.Parameter(torch.randn(2, 4, 20, 22))

    def forward(self, x):
        return self.last(torch.cat((x, self.a(x), self.places), 1))


class Turned(nn.Module):
    """The same parts, in another order and with others between them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = conv(3, 16), conv(3, 24), conv(3, 32)
        self.last = nn.Conv2d(72, 4, 1)

    def forward(self, x):
        a, b, c = self.a(x), self.b(x), self.c(x)
        early = [F.max_pool2d(torch.cat(parts, 1), 2) for parts in ((a, b), (b, c))]
        return self.last(torch.cat((b, a, c), 1)), *early


class Halves(nn.Module):
    """As in YOLO: slices of a part are parts, and what follows reads one of them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = conv(3, 32, 1), nn.Conv2d(64, 4, 1)
        self.layers = nn.ModuleList(conv(16, 16) for _ in range(4))

    def forward(self, x):
        parts = list(self.first(x).chunk(2, 1))
        for i in (0, 2):
            parts.append(parts[-1] + self.layers[i + 1](self.layers[i](parts[-1])))
        return self.last(torch.cat(parts, 1))


class Named(nn.Module):
    """Slices whose whole is given by name."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.last = conv(3, 32), conv(16, 16), nn.Conv2d(48, 4, 1)

    def forward(self, x):
        first, second = torch.chunk(input=self.a(x), chunks=2, dim=1)
        return self.last(torch.cat((first, second, self.b(second)), 1))


class Crossed(nn.Module):
    """Slices in another order than they have, or not all of them; one of a part: that is copied."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.last = conv(3, 24, 1), conv(3, 24), nn.Conv2d(60, 4, 1)
        self.after = conv(8, 12)

    def forward(self, x):
        a, b = self.a(x).split(8, 1), self.b(x)
        return self.last(torch.cat((a[1], a[0], self.after(a[2]), b[:, 4:12], b), 1))


class Pyramid(nn.Module):
    """Parts that convolutions read: strided, pointwise, depthwise."""

    def __init__(self):
        super().__init__()
        self.a, self.b = conv(3, 24), conv(24, 24, groups=24)
        self.down, self.c, self.last = conv(24, 16, stride=2), conv(24, 20, 1), conv(68, 8)
        self.low = conv(20, 8, stride=2)

    def forward(self, x):
        a = self.a(x)
        b = self.b(a)
        c = self.c(b)
        return self.last(torch.cat((a, b, c), 1)), self.down(a), self.low(c)


class Upward(nn.Module):
    """As in a U-Net; contiguous() on the way says nothing about how images lie."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = conv(3, 16), conv(16, 192), conv(113, 8)
        self.up, self.norm = nn.ConvTranspose2d(192, 97, 2, 2), nn.BatchNorm2d(97)

    def forward(self, x):
        skip = self.a(x)
        up = self.norm(self.up(self.b(F.max_pool2d(skip, 2))))
        whole = torch.cat((up.contiguous(), skip), 1)
        return self.c(whole) * whole.dim()


NETS = {"named": Named, "upward": Upward, "halves": Halves, "crossed": Crossed, "pyramid": Pyramid,
        "turned": Turned, "given": Given, "dense": Dense, "grown": Grown, "branches": Branches,
        "mixed": Mixed, "written": Written}
COPIES = {"named": 1, "upward": 0, "halves": 0, "crossed": 2, "pyramid": 1, "turned": 2, "given": 1,
          "dense": 0, "grown": 0, "branches": 0, "mixed": 2, "written": 2}


def made(name):
    torch.manual_seed(0)
    net = NETS[name]().eval()
    for norm in (m for m in net.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.uniform_(norm.running_mean, -0.5, 0.5)
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    return net


def bound(model):
    return [found for captured in all_captured(model) for captures in captured.captures.values()
            for capture in captures for found in capture.programs.bound]


def leaves(found):
    return found if isinstance(found, tuple) else (found,)


def check(name, monkeypatch, shape=(2, 3, 20, 22)):
    net = made(name)
    model, x = tilewise.optimize(net), torch.randn(shape).to(memory_format=torch.channels_last)
    with torch.inference_mode():
        first = model(x)
        model(x + 1)
        with monkeypatch.context() as patch:
            patch.setattr(program, "memory", GuardedMemory())
            again = model(x)
        exact = copy.deepcopy(net).double()(x.double())
    for a, b, c in zip(leaves(first), leaves(again), leaves(exact), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
        assert (b - c).norm() <= 1e-5 * c.norm()
    return model


@pytest.mark.parametrize("name", NETS)
def test_results_are_the_same_and_nothing_is_copied_that_need_not_be(name, monkeypatch):
    monkeypatch.setattr(programs, "MORE", 9)
    (found,) = bound(check(name, monkeypatch))
    assert sum(label.name == "cat" for label in found.labels) == COPIES[name]


@pytest.mark.parametrize("shape", [(1, 3, 2, 2), (3, 3, 6, 50), (1, 3, 64, 64)])
@pytest.mark.parametrize("name", ["dense", "branches"])
def test_other_sizes(name, shape, monkeypatch):
    check(name, monkeypatch, shape)


def test_infinities_stay_where_torch_has_them(monkeypatch):
    net = made("branches")
    model, x = tilewise.optimize(net), torch.randn(1, 3, 20, 20)
    with torch.inference_mode():
        for _ in range(3):
            model(x)
        x[0, 1, 5, 5] = float("inf")
        assert torch.equal(model(x).isfinite(), net(x).isfinite())
    fresh = tilewise.optimize(net)
    with torch.inference_mode():
        for _ in range(3):
            found = fresh(x)
        assert torch.equal(found.isfinite(), net(x).isfinite())


def test_blocks_take_the_same_code_before_and_in_their_places(monkeypatch):
    model = tilewise.optimize(made("dense"))
    x = torch.randn(1, 3, 20, 20)
    with torch.inference_mode():
        model(x)
        compiled = []
        from tilewise.kernels.cpu.emit import launch
        monkeypatch.setattr(launch, "_loaded", lambda request, right=launch._loaded:
                            compiled.append(request) or right(request))
        model(x)
        model(x)
    assert not [request for request in compiled if "conv" in request.make.__module__]


def test_more_memory_is_not_taken(monkeypatch):
    monkeypatch.setattr(programs, "MORE", 0.1)
    (found,) = bound(check("dense", monkeypatch))
    assert sum(label.name == "cat" for label in found.labels) > 3


class Odd(nn.Module):
    """A module that nobody knows is called as often as it was asked for."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return x


def test_a_module_that_is_not_known_runs_once_a_call():
    torch.manual_seed(0)
    net = nn.Sequential(Branches(), Odd(), nn.Conv2d(4, 4, 3)).eval()
    model = tilewise.optimize(net)
    with torch.inference_mode():
        for _ in range(4):
            model(torch.randn(1, 3, 20, 20))
    (odd,) = [m for m in model.modules() if isinstance(m, Odd)]
    assert odd.calls == 4


def a_channel_early(*args, right=placing.slots):
    return {node: slot._replace(first=max(0, slot.first - 1))
            for node, slot in right(*args).items()}


def the_first_slice_is_all(cat, forms, right=placing._covered):
    yield from right(cat, forms)
    first = 0
    for part in placing._parts(cat):
        yield placing._whole(part), first
        first += forms[part].shape[1]


FAULTS = {
    "channel": (programs, "slots", a_channel_early),
    "slices": (placing, "_covered", the_first_slice_is_all),
    "copies": (placing, "_joined", lambda out, parts: out),
    "readers": (placing, "_is_read", lambda node, step_of: True),
    "writers": (placing.Effects, "written", lambda self, node: []),
}


def check_all(monkeypatch):
    for name in NETS:
        check(name, monkeypatch)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises((AssertionError, RuntimeError, KeyError)):
        check_all(monkeypatch)


def test_a_block_without_a_place_is_as_it_was():
    block = Block(nn.Conv2d(8, 6, 3, padding=1), activation="relu")
    x = torch.randn(1, 8, 9, 9).contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        whole = torch.full((1, 20, 9, 9), 7.0).contiguous(memory_format=torch.channels_last)
        expected, found = block(x), block.into(whole[:, 3:9], x)
    assert found is not None
    assert torch.equal(whole[:, 3:9], expected)
    assert (torch.cat((whole[:, :3], whole[:, 9:]), 1) == 7).all()

"""Models whose Python depends on sizes: one graph for each size that comes again, always right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tilewise
from tilewise.model.captured import LATER, SIZED


class Anchors(nn.Module):
    """A head that keeps what it made for the last size, as Ultralytics' does."""

    shape = None

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        shape = x.shape
        if self.shape != shape:
            self.grid = torch.arange(shape[3]).float() + torch.arange(shape[2]).float()[:, None]
            self.shape = shape
        return self.conv(x) + self.grid


class Net(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1))
        self.head = head

    def forward(self, x):
        return self.head(self.body(x))


class Branch(nn.Module):
    """Takes another way for large images."""

    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x):
        rows = int(x.shape[2])
        return self.large(x) if x.shape[2] > 8 else self.small(x) * rows


def graphs(model):
    """Those for one size, and whether all of the model is in them."""
    found = [capture for captures in model.__dict__["forward"].captures.values()
             for capture in captures if capture.forms is not None]
    assert not any(capture.opaque for capture in found)
    return found


def check(model, net, *sizes):
    for h, w in sizes:
        x = torch.randn(2, 3, h, w)
        torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-4)


@pytest.fixture(params=[Anchors, Branch])
def both(request):
    torch.manual_seed(0)
    net = Net(request.param()).eval()
    with torch.inference_mode():
        yield tilewise.optimize(net), net


def test_a_size_that_comes_again_has_a_graph(both):
    model, net = both
    check(model, net, (16, 16))
    assert not graphs(model)
    check(model, net, *[(16, 16)] * 4)
    (capture,) = graphs(model)
    (bound,) = capture.programs.bound
    assert bound.program.kernels >= 3
    check(model, net, *[(24, 20)] * LATER)
    assert len(graphs(model)) == 1  # the first was soon enough, the next is asked for longer
    check(model, net, (24, 20))
    assert len(graphs(model)) == 2
    check(model, net, *[(16, 16)] * 3, *[(24, 20)] * 3)
    assert len(graphs(model)) == 2


def test_sizes_that_change_all_the_time_get_none(both):
    model, net = both
    check(model, net, *[(16, 16), (24, 20)] * 4)
    assert not graphs(model)


def test_graphs_are_few(both):
    model, net = both
    for size in range(10, 10 + 2 * (SIZED + 2), 2):
        (patience,) = model.__dict__["forward"]._patience.values() or (1,)
        check(model, net, *[(size, size)] * patience)
        assert not graphs(model) or graphs(model)[0].forms != (torch.Size([2, 3, size, size]),)
        check(model, net, (size, size))
        assert graphs(model)[0].forms == (torch.Size([2, 3, size, size]),)
    assert len(graphs(model)) == SIZED


def test_tries_are_few():
    """Where a graph for one size is no help either, that is not found out again and again."""

    class Counts(nn.Module):
        count = 0

        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(8, 4, 1)

        def forward(self, x):
            if x.shape[2] > 2:
                self.count = self.count + 1
            return self.conv(x) * self.count

    net = Net(Counts()).eval()
    model = tilewise.optimize(net)
    with torch.inference_mode():
        for _ in range(40):
            x = torch.randn(1, 3, 16, 16)
            found = model(x)
            model.head.count -= 1
            net.head.count = model.head.count
            torch.testing.assert_close(found, net(x), rtol=1e-4, atol=1e-4)
            model.head.count = net.head.count
    assert not graphs(model)
    assert max(model.__dict__["forward"]._patience.values()) > 40  # after two


def test_other_parameters_may_have_other_sizes(both):
    model, net = both
    check(model, net, *[(16, 16)] * 4)
    assert graphs(model)
    for one in (model, net):
        torch.manual_seed(1)
        one.body[0] = nn.Conv2d(3, 8, 3, 1, 1).eval()  # which makes images twice as large
    check(model, net, *[(16, 16)] * 4)


def test_a_parameter_of_another_size(both):
    model, net = both
    check(model, net, *[(16, 16)] * 4)
    for one in (model, net):
        torch.manual_seed(1)
        one.body[0].weight = nn.Parameter(torch.randn(8, 3, 1, 1))  # no less than the padding
    check(model, net, *[(16, 16)] * 4)


def test_gradients_and_training(both):
    model, net = both
    with torch.inference_mode(False):
        x = torch.randn(1, 3, 16, 16)
        for _ in range(4):
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            model(a).sum().backward()
            net(b).sum().backward()
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def test_values_are_still_refused():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            y = self.conv(x)
            return y * 2 if y.sum() > 0 else y

    net = Looks().eval()
    model = tilewise.optimize(net)
    with torch.inference_mode():
        for _ in range(6):
            x = torch.randn(1, 3, 9, 9)
            torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-4)
    assert not graphs(model)
    assert any("value of" in reason for reason in model.__dict__["forward"].refusals.values())


class Two(nn.Module):
    """Two convolutions, and Python behind them."""

    def __init__(self, behind):
        super().__init__()
        self.c, self.d = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.w = nn.Parameter(torch.randn(1, 16, 1, 1))
        self.behind = behind

    def forward(self, x):
        return self.behind(self, self.d(self.c(x)))


def by_count(self, y):
    k = torch.nonzero(y.mean(1) > 0)
    return y + len(list(range(k.shape[0])))


def by_mask(self, y):
    return y * 2 if y[y > 0].numel() > 1600 else y


def by_noise(self, y):
    y = y + torch.randn(y.shape)
    return y * 2 if y.shape[-1] % 2 == 0 else y


def by_gradient(self, y):
    return y * 2 if y.requires_grad else y


def by_type(self, y):
    return y.float() * 2 if y.dtype == torch.bfloat16 else y


def by_width(self, y):
    return y * 2 if y.shape[-1] > 15 else y


def by_rank(self, y):
    y.unsqueeze_(1)
    return y * 2 if y.dim() == 5 else y


def by_parameter(self, y):
    return y * 2 if self.w.shape[-1] == 1 else y


def by_table(self, y):
    return y * {20: 2.0, 24: 3.0}.get(y.shape[-1], 5.0)


def complexes(self, y):
    n, _, h, w = y.shape
    y = y.reshape(n, 16, h * w // 2, 2).contiguous()
    return torch.view_as_real(torch.view_as_complex(y) * 1j)


def seen_as(self, y):
    return y.contiguous().view_as(torch.zeros(y.shape[0], y.numel() // y.shape[0])) * 2


def planes(self, y):
    return y.contiguous()


BEHIND = [by_count, by_mask, by_noise, by_gradient, by_type, by_width, by_rank, by_parameter,
          by_table, complexes, seen_as, planes]


def same(model, net, x):
    found = []
    for one in (model, net):
        torch.manual_seed(7)
        found.append(one(x))
        found.append(torch.get_rng_state())
    assert torch.equal(found[1], found[3])
    torch.testing.assert_close(found[0], found[2], rtol=1e-4, atol=1e-4)
    assert found[0].stride() == found[2].stride()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("behind", BEHIND)
def test_what_only_seems_to_follow_from_sizes(behind, layout):
    torch.manual_seed(0)
    net = Two(behind).eval()
    model = tilewise.optimize(net)
    for size in (20, 20, 20, 14, 14, 14, 20, 20):
        x = torch.randn(2, 3, size, size).contiguous(memory_format=layout)
        with torch.no_grad():
            same(model, net, x)
        same(model, net, x)


@pytest.mark.parametrize("change", [
    lambda m: setattr(m.c, "stride", (2, 2)), lambda m: setattr(m.c, "padding", (3, 3)),
    lambda m: setattr(m.w, "data", torch.ones(1, 16, 2, 2)),
    lambda m: m.c.bias.data.add_(3.0)])
@pytest.mark.parametrize("behind", [by_width, by_parameter, by_mask, by_count])
def test_what_is_changed_after(behind, change):
    torch.manual_seed(0)
    net = Two(behind).eval()
    model = tilewise.optimize(net)
    x = torch.randn(2, 3, 14, 14)
    with torch.no_grad():
        for _ in range(4):
            same(model, net, x)
        change(net)
        if model.c.stride != net.c.stride or model.c.padding != net.c.padding:
            change(model)  # tensors are shared, numbers are not
        for _ in range(4):
            same(model, net, x)


def test_autocast_is_no_size():
    net = Two(by_type).eval()
    model = tilewise.optimize(net)
    x = torch.randn(2, 3, 14, 14)
    with torch.no_grad():
        for _ in range(4):
            model(x)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                assert model(x).dtype == net(x).dtype
            torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-4)


def test_memory_that_a_part_keeps():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.zeros(1, 16, 1, 1))

        def forward(self, h):
            try:  # which is refused
                return self.kept
            except ValueError:
                return h

    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.c, self.d, self.kept = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), Keeps()

        def forward(self, x):
            y = self.d(self.c(x))
            b = self.kept(y.mean())
            b += 1.0
            return y + b

    net = Adds().eval()
    model = tilewise.optimize(net)
    x = torch.randn(1, 3, 12, 12)
    with torch.no_grad():
        start = net.d(net.c(x))
        for count in range(1, 6):
            torch.testing.assert_close(model(x), start + count, rtol=1e-4, atol=1e-4)


class Writing(nn.Module):
    """It writes to what an activation or a norm gave it, before it asks for a size."""

    def __init__(self, first):
        super().__init__()
        self.first, self.conv = first, nn.Conv2d(3, 4, 3, padding=1)
        self.factor = nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, x):
        y, by = self.first(x), torch.relu(self.factor)
        y += 1.0
        by += 1.0
        return self.conv(y * by if y.shape[2] > 4 else y)


@pytest.mark.parametrize("first", [nn.ReLU(), nn.BatchNorm2d(3), nn.SiLU()])
def test_deciding_writes_to_nothing_of_the_callers(first):
    torch.manual_seed(0)
    net, x = Writing(first).eval(), torch.randn(2, 3, 8, 8)
    before, factor = x.clone(), net.factor.detach().clone()
    with torch.no_grad():
        expected, model = net(x.clone()), tilewise.optimize(net)
        for _ in range(5):
            torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(x, before)
    assert torch.equal(net.factor, factor)

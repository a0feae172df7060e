"""Programs: a graph that was called twice runs in one native call, with the same results."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tilewise
from tilewise.model.captured import all_captured
from tilewise.model.programs import MOST, Bound


class Net(nn.Module):
    """Branches, views, a concatenation, and what torch computes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.b = nn.Conv2d(16, 16, 3, padding=1)
        self.c = nn.Conv2d(8, 24, 1)
        self.d = nn.Conv2d(40, 10, 3, stride=2)
        self.scale = nn.Parameter(torch.rand(10, 1, 1))

    def forward(self, x):
        x = self.a(x)
        left, right = self.b(x).chunk(2, 1)
        y = torch.cat((x, self.c(left * right.sigmoid())), 1)
        y = F.max_pool2d(self.d(y), 3, 2, 1) * self.scale
        return y, y.mean((2, 3))


def programs_of(model):
    return [bound for captured in all_captured(model) for captures in captured.captures.values()
            for capture in captures for bound in capture.programs.bound]


def called(model, x, times=3):
    """The result of each call."""
    with torch.inference_mode():
        return [model(x) for _ in range(times)]


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


def test_the_third_call_is_a_program(net):
    x = torch.randn(2, 3, 20, 22)
    model = tilewise.optimize(net)
    assert not called(model, x, 1)[0][0].isnan().any()
    assert programs_of(model) == []
    called(model, x, 1)
    (bound,) = programs_of(model)
    assert bound.program.kernels >= 4
    calls = []
    run = bound.program.__class__.__call__
    bound.program.__class__.__call__ = lambda *args: calls.append(1) or run(*args)
    try:
        called(model, x, 2)
    finally:
        bound.program.__class__.__call__ = run
    assert calls == [1, 1]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_results_have_the_same_bits_and_form(net, layout):
    model = tilewise.optimize(net)
    xs = [torch.randn(2, 3, 20, 22).contiguous(memory_format=layout) for _ in range(4)]
    with torch.inference_mode():
        blocks = model(xs[0])
        model(xs[1])
        assert len(programs_of(model)) == 1
        others = [model(x) for x in xs[2:]]
        again = model(xs[0])
        for a, b in zip(blocks, again, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
        for x, found in zip(xs[2:], others, strict=True):
            for a, b in zip(found, net(x), strict=True):
                torch.testing.assert_close(a, b)


def test_results_stay_as_they_are(net):
    model = tilewise.optimize(net)
    x = torch.randn(1, 3, 20, 22)
    first = called(model, x)[-1]
    before = [t.clone() for t in first]
    called(model, torch.randn(1, 3, 20, 22))
    assert all(map(torch.equal, first, before))


def test_each_size_has_its_program_and_few_are_kept(net):
    model = tilewise.optimize(net)
    for size in range(20, 20 + MOST + 3):
        x = torch.randn(1, 3, size, 17)
        for found in called(model, x):
            torch.testing.assert_close(found[0], net(x)[0])
    assert len(programs_of(model)) == MOST


def change_in_place(net):
    net.b.weight.mul_(2)


def change_unseen(net):
    net.b.weight.data.mul_(2)


def change_data(net):
    net.a[0].weight.data = torch.randn(16, 3, 3, 3)


def change_bias(net):
    net.c.bias.mul_(3)


def replace_bias(net):
    net.c.bias = nn.Parameter(torch.randn(24))


def replace_weight(net):
    net.d.weight = nn.Parameter(torch.randn(10, 40, 3, 3))


def replace_scale(net):
    net.scale = nn.Parameter(torch.randn(10, 1, 1))


def change_norm(net):
    net.a[1].running_mean.add_(1)


def change_eps(net):
    net.a[1].eps = 0.5


def change_stride(net):
    net.d.stride = (1, 1)


def change_padding(net):
    net.d.padding = (1, 0)


def swap_module(net):
    net.a[2] = nn.SiLU()


def hook_module(net):
    net.b.register_forward_hook(lambda module, args, y: y * 2)


CHANGES = [change_in_place, change_unseen, change_data, change_bias, replace_bias, replace_weight,
           replace_scale, change_norm, change_eps, change_stride, change_padding, swap_module,
           hook_module]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_are_followed(net, change):
    x = torch.randn(1, 3, 20, 22)
    model = tilewise.optimize(net)
    called(model, x)
    assert programs_of(model)
    before = net(x)[0]
    with torch.no_grad():
        change(net)
        if change in (swap_module, hook_module):
            change(model)
        for name in ("stride", "padding"):
            setattr(model.d, name, getattr(net.d, name))
        model.a[1].eps = net.a[1].eps
        for kind, name in (("b", "weight"), ("c", "bias"), ("d", "weight")):
            setattr(getattr(model, kind), name, getattr(getattr(net, kind), name))
        model.scale = net.scale
    after = net(x)[0]
    assert before.shape != after.shape or not torch.allclose(before, after)
    for found in called(model, x, 4):
        torch.testing.assert_close(found[0], after, rtol=1e-4, atol=1e-4)


def test_gradients_are_as_before(net):
    x = torch.randn(1, 3, 20, 22)
    model = tilewise.optimize(net)
    called(model, x)
    model(x)[0].sum().backward()
    grads = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    net(x)[0].sum().backward()
    for found, p in zip(grads, net.parameters(), strict=True):
        torch.testing.assert_close(found, p.grad, rtol=1e-3, atol=1e-4)


def test_a_result_that_is_not_finite_is_as_torchs(net):
    x = torch.randn(1, 3, 40, 40)
    model = tilewise.optimize(net)
    called(model, x)
    x[0, 0, 20, 20] = float("inf")
    found, expected = called(model, x, 1)[0][0], net(x)[0]
    assert torch.equal(found.isfinite(), expected.isfinite())


def test_threads_share_a_program(net):
    model = tilewise.optimize(net)
    xs = [torch.randn(1, 3, 20, 22) for _ in range(4)]
    called(model, xs[0])
    with torch.inference_mode():
        expected = [model(x)[0] for x in xs]
    wrong = []

    def work(i):
        with torch.inference_mode():
            for _ in range(50):
                if not torch.equal(model(xs[i])[0], expected[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class Keeper(nn.Module):
    """Code that no graph stands for, and that holds on to what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = []

    def forward(self, x):
        if float(x.sum()) > 1e9:
            return x
        self.kept.append(x)
        return x + 1


def test_unknown_code_may_keep_what_it_is_given():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), Keeper(), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)).eval()
    model = tilewise.optimize(net)
    xs = [torch.randn(1, 3, 30, 30) for _ in range(4)]
    for x in xs:
        called(model, x, 1)
    kept = model[1].kept[-len(xs):]
    for x, found in zip(xs, kept, strict=True):
        torch.testing.assert_close(found, net[0](x))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        y = self.a(x)
        z = self.b(y)
        y += z
        y[:, :2].mul_(2)
        z.relu_()
        return y.clamp_(-1, 1), z


def test_what_is_written_in_place():
    torch.manual_seed(0)
    net = InPlace().eval()
    model = tilewise.optimize(net)
    x = torch.randn(1, 4, 16, 16)
    for found in called(model, x, 4):
        for a, b in zip(found, net(x), strict=True):
            torch.testing.assert_close(a, b)
    assert programs_of(model)


class ByValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3)

    def forward(self, x):
        return self.conv(x) * x.sum().item()


def test_numbers_made_of_values_have_no_program():
    net = ByValue().eval()
    model = tilewise.optimize(net)
    for _ in range(4):
        x = torch.randn(1, 4, 16, 16)
        torch.testing.assert_close(called(model, x, 1)[0], net(x))
    assert programs_of(model) == []


def test_random_numbers_are_drawn_in_every_call():
    net = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3), nn.Dropout(0.5)).eval()
    model = tilewise.optimize(net)
    model[2].train()
    x = torch.randn(1, 4, 16, 16)
    torch.manual_seed(1)
    found = called(model, x, 5)
    assert not torch.equal(found[3], found[4])


class Tokens(nn.Module):
    """A sum in place that no kernel of ours does: shapes broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.place = nn.Parameter(torch.randn(1, 50, 64))

    def forward(self, x):
        x = self.first(x)
        x += self.place
        return self.second(x)


def test_in_place_by_torch_is_a_step():
    net = Tokens().eval()
    model = tilewise.optimize(net)
    x = torch.randn(4, 50, 64)
    for found in called(model, x, 4):
        torch.testing.assert_close(found, net(x))


class Forgetful(nn.Module):
    """Lets the cache of weights go in the middle of a call."""

    def forward(self, x):
        from tilewise.runtime.weights import MADE

        if float(x.sum()) > 1e30:
            return x
        MADE.clear()
        self.blocks = [torch.full((40000,), 7.0) for _ in range(40)]
        return x + 0


def test_weights_are_held_during_a_call():
    net = nn.Sequential(nn.Conv2d(8, 32, 3), Forgetful(), nn.Conv2d(32, 32, 3)).eval()
    model = tilewise.optimize(net)
    x = torch.randn(1, 8, 32, 32)
    for found in called(model, x, 5):
        torch.testing.assert_close(found, net(x))


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        f = torch.fft.rfft2(self.a(x))
        return self.b(torch.fft.irfft2(f.conj() * f * (1 + 1j)))


def test_conjugate_views_are_no_views():
    net = Spectrum().eval()
    model = tilewise.optimize(net)
    x = torch.randn(1, 8, 32, 32)
    for found in called(model, x, 4):
        torch.testing.assert_close(found, net(x), rtol=1e-3, atol=1e-1)


def test_a_bias_that_comes_later_counts():
    net = nn.Sequential(nn.Conv2d(8, 32, 3, bias=False), nn.Conv2d(32, 32, 3)).eval()
    model = tilewise.optimize(net)
    x = torch.randn(1, 8, 32, 32)
    called(model, x, 4)
    assert programs_of(model)
    model[0].bias = net[0].bias = nn.Parameter(torch.ones(32))
    for found in called(model, x, 4):
        torch.testing.assert_close(found, net(x))


class Branch(nn.Module):
    """What it gives depends on values."""

    def __init__(self, kind) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x):
        large = float(x.abs().max()) > 5
        if self.kind == "same":
            return x * 0 if large else x
        if self.kind == "shape":
            return x[..., 1:] if large else x * 1
        return x * 2 if large else x * 3


@pytest.mark.parametrize("kind", ["same", "shape", "value"])
def test_unknown_modules_may_do_something_else_in_every_call(kind):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 16, 3), Branch(kind), nn.Conv2d(16, 16, 3)).eval()
    model = tilewise.optimize(net)
    x = torch.randn(1, 8, 24, 24)
    with torch.inference_mode():
        for scale in (1, 1, 1, 100, 1, 100, 100):
            torch.testing.assert_close(model(x * scale), net(x * scale), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_that_learns_learns_once(dtype):
    nets = [nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)).to(dtype)
            for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    model = tilewise.optimize(nets[0])
    x = torch.randn(2, 8, 16, 16, dtype=dtype)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(model(x), nets[1](x))
    assert int(nets[0][1].num_batches_tracked) == 4
    torch.testing.assert_close(nets[0][1].running_mean, nets[1][1].running_mean)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 3)

    def forward(self, x):
        x.add_(1)
        return self.b(self.a(x))


@pytest.mark.parametrize("value", [0.0, float("inf")])
def test_inputs_are_written_once(value):
    net = Writes().eval()
    model = tilewise.optimize(net)
    with torch.inference_mode():
        for _ in range(4):
            x = torch.zeros(1, 64, 20, 20)
            x[0, 0, 0, 0] = value
            model(x)
            assert float(x[0, 1, 1, 1]) == 1


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3)

    def forward(self, x, size):
        return self.b(F.interpolate(self.a(x), size=(size, size)))


def test_sizes_that_are_tensors():
    net = Sized().eval()
    model = tilewise.optimize(net)
    x = torch.randn(1, 8, 20, 20)
    with torch.inference_mode():
        for size in (20, 20, 20, 24, 24, 20):
            found = model(x, torch.tensor(size))
            torch.testing.assert_close(found, net(x, torch.tensor(size)))


def test_settings_of_modules_that_make_views():
    net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten()).eval()
    model = tilewise.optimize(net)
    x = torch.randn(2, 8, 20, 20)
    called(model, x, 4)
    assert programs_of(model)
    model[3].start_dim = net[3].start_dim = 2
    for found in called(model, x):
        assert found.shape == net(x).shape


def test_profile_wants_eval_mode(net):
    with pytest.raises(tilewise.TilewiseError, match="training mode"):
        tilewise.profile(tilewise.optimize(net).train(), torch.randn(1, 3, 20, 22))
    told = tilewise.profile(tilewise.optimize(net).eval(), torch.randn(1, 3, 20, 22))
    assert any(line.flops for line in told.lines)
    assert min(told.arena, told.weights) > 0
    assert "steps" in str(told)


def test_one_value_that_changed_unseen_is_found():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3)).eval()
    model = tilewise.optimize(net)
    x = torch.randn(1, 64, 12, 12)
    called(model, x)
    assert programs_of(model)
    net[0].weight.data[31, 30, 1, 1] = 50.0  # between the places that every glance sees
    expected = net(x)
    for _ in range(200):
        if torch.allclose(called(model, x, 1)[0], expected, rtol=1e-4, atol=1e-3):
            break
    for found in called(model, x, 4):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

    def forward(self, x, y):
        return self.a(x) - self.b(y)


def test_the_same_tensor_as_two_inputs():
    net = Two().eval()
    model = tilewise.optimize(net)
    x, y = torch.randn(1, 3, 20, 20), torch.randn(1, 3, 20, 20)
    with torch.inference_mode():
        for pair in ((x, x), (x, x), (x, y), (x, y), (y, x), (x, x), (y, y)):
            torch.testing.assert_close(model(*pair), net(*pair))
    assert programs_of(model)


class Shaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3)
        self.kept = nn.Parameter(torch.randn(1, 3, 20, 20))

    def forward(self, x):
        return self.a(x) + self.a(self.kept)


def test_a_parameter_as_input():
    net = Shaped().eval()
    model = tilewise.optimize(net)
    with torch.inference_mode():
        for x in (*[net.kept] * 3, *torch.randn(3, 1, 3, 20, 20).unbind()):
            torch.testing.assert_close(model(x), net(x))


def test_numbers_that_no_float_holds():
    net = ByNumber().eval()
    model = tilewise.optimize(net)
    x = torch.randn(1, 3, 20, 20)
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(model(x), net(x), equal_nan=True)


class ByNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        x = self.a(x)
        return self.b(x.clamp(-1, 1)), x * 1e300, x * float("nan"), x - float("inf"), x / 3


def test_a_program_holds_no_weights_and_no_images(net):
    import gc
    import weakref

    from tilewise.runtime.weights import MADE

    model = tilewise.optimize(net)
    x = torch.randn(1, 3, 20, 22)
    called(model, x, 2)
    assert programs_of(model)
    made = [weakref.ref(entry) for _, entry in MADE.items()]
    image = weakref.ref(x)
    del x
    MADE.clear()
    gc.collect()
    assert image() is None
    assert not any(ref() for ref in made)
    x = torch.randn(1, 3, 20, 22)
    for found in called(model, x):
        torch.testing.assert_close(found[0], net(x)[0])


def test_a_program_lets_go_of_weights(net):
    import gc
    import weakref

    model = tilewise.optimize(net)
    called(model, torch.randn(1, 3, 20, 22))
    (bound,) = programs_of(model)
    assert isinstance(bound, Bound)
    ref = weakref.ref(bound.program)
    del bound, model
    gc.collect()
    assert ref() is None


class SumInPlace(nn.Module):
    """A sum that broadcasts, written to what a convolution gave."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        y = self.a(x)
        z = self.b(y)
        z += y[:, :, :1, :1]
        return self.b(z)


def test_a_sum_in_place_by_torch_is_in_the_program():
    torch.manual_seed(0)
    model, x = SumInPlace().eval(), torch.randn(1, 3, 9, 9)
    for found in called(tilewise.optimize(model), x, 4):
        torch.testing.assert_close(found, model(x))

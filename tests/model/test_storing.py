"""Images in bfloat16 between the steps of float32 models, where the precision admits it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.plans import ran
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise
from tilewise.bench import networks
from tilewise.core.target import Target
from tilewise.model import storing as storage
from tilewise.model.captured import all_captured
from tilewise.model.storing import LEAST, Stored, narrowed, storing, widened
from tilewise.runtime.types import element_of

pytestmark = pytest.mark.skipif(element_of(torch.bfloat16) is None,
                                reason="no kernel reads bfloat16 images on this machine")


@pytest.fixture(autouse=True)
def medium() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


class Net(nn.Module):
    """Residuals, a concatenation, a transposed convolution, what torch computes, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.b = nn.Conv2d(32, 32, 3, padding=1)
        self.deep = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.up = nn.Sequential(nn.ConvTranspose2d(32, 16, 2, 2), nn.BatchNorm2d(16), nn.ReLU())
        self.c = nn.Conv2d(48, 24, 1)
        self.last = nn.Conv2d(24, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.a(x)
        y = torch.relu(self.b(x) + x)
        z = torch.cat((x, self.up(F.max_pool2d(F.silu(self.deep(y)), 2))), 1)
        z = self.last(self.c(z))
        return y, F.log_softmax(z, 1), self.head(z.mean((2, 3)))


def made() -> nn.Module:
    torch.manual_seed(0)
    model = Net().eval()
    for norm in (model.a[1], model.up[1]):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    return model


def stored_of(model: nn.Module) -> list[Stored]:
    return [graph for captured in all_captured(model) for captures in captured.captures.values()
            for capture in captures for graph in capture.graphs if isinstance(graph, Stored)]


def called(model: nn.Module, x: Tensor, times: int = 4) -> list[Any]:
    with torch.inference_mode(), storing(True):
        return [model(x) for _ in range(times)]


def far(found: Tensor, want: Tensor) -> float:
    return float((found.double() - want).norm() / want.norm())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_errors_are_those_of_storing(layout: Any) -> None:
    model, x = made(), torch.randn(2, 3, 20, 22).contiguous(memory_format=layout)
    fast = tilewise.optimize(copy.deepcopy(model))
    results = called(fast, x)
    (graph,) = stored_of(fast)
    assert len(graph.programs.bound) == 1
    with torch.no_grad():
        exact, plain = copy.deepcopy(model).double()(x.double()), model(x)
    for result in results:  # node by node, and as a program
        for found, first, want, theirs in zip(result, results[0], exact, plain, strict=True):
            assert torch.equal(found, first)
            assert (found.dtype, found.stride()) == (theirs.dtype, theirs.stride())
            # more than of float32 images, and less than a rounding of each of eight in a row
            assert 2.0 ** -15 < far(found, want) < 8 * 2.0 ** -9


def test_plans_declare_it_and_convolutions_are_of_16_bits() -> None:
    fast, x = tilewise.optimize(made()), torch.randn(2, 3, 20, 22)
    called(fast, x, 1)
    plans = ran(lambda: called(fast, x, 1))
    assert [plan.problem.dtype for plan in plans if plan.problem.h > 1] == [
        *["bf16"] * 5, "f32"]  # torch reads the result of the last
    assert all(LEAST <= plan.error <= 2e-2 for plan in plans if plan.problem.dtype == "bf16")


def test_casts_are_at_the_ends_only() -> None:
    fast = tilewise.optimize(made())
    called(fast, torch.randn(1, 3, 16, 16), 1)
    (graph,) = stored_of(fast)
    casts = [node.target for node in graph.graph.nodes if node.target in (narrowed, widened)]
    assert casts.count(narrowed) == 1
    assert casts.count(widened) == 2  # of y, and of what the last convolution reads


def test_what_nobody_looks_at_is_not_cast() -> None:
    """Pieces that are counted only, as `list(x.chunk(2, 1))` counts them."""
    class Halves(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = (torch.nn.Conv2d(c, 32, 3, padding=1) for c in (3, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = list(torch.relu(self.first(x)).chunk(2, 1))
            y.extend(torch.relu(layer(y[-1])) for layer in (self.last,))
            return torch.relu(self.last(y[0]) + y[2][:, :16].repeat(1, 2, 1, 1))

    fast = tilewise.optimize(Halves().eval())
    called(fast, torch.randn(1, 3, 16, 16), 1)
    (graph,) = stored_of(fast)
    casts = [node.target for node in graph.graph.nodes]
    assert casts.count(widened) == 2  # of what torch repeats, and of the result


def test_a_cast_is_no_step_of_torchs() -> None:
    fast, x = tilewise.optimize(made()), torch.randn(1, 3, 16, 16)
    called(fast, x)
    with torch.inference_mode(), storing(True):
        lines = [line for line in tilewise.profile(fast, x).lines if line.step.endswith("ed")]
    casts = [line.by for line in lines if line.step in ("narrowed", "widened")]
    assert casts == ["tilewise"] * 3


@pytest.mark.parametrize("setting, max_error, is_stored", [
    ("highest", None, False), ("high", None, False), ("medium", None, True),
    ("medium", 3e-3, False), ("highest", 2e-2, True)])
def test_the_precision_decides(setting: str, max_error: float | None, is_stored: bool) -> None:
    torch.set_float32_matmul_precision(setting)
    model, x = made(), torch.randn(1, 3, 16, 16)
    fast = tilewise.optimize(copy.deepcopy(model), max_error=max_error)
    with torch.no_grad():
        want = model.double()(x.double())
    errors = [far(a, b) for a, b in zip(called(fast, x)[-1], want, strict=True)]
    assert (max(errors) > 1e-4) == is_stored


def test_without_force_estimates_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 3, 16, 16)
    for gain, is_stored in ((0.0, False), (100.0, True)):
        for name in ("GAIN", "ON_UNIT"):
            monkeypatch.setattr(storage, name, gain)
        fast = tilewise.optimize(made())
        with torch.inference_mode():
            fast(x)
            dtypes = {plan.problem.dtype for plan in ran(lambda model=fast: model(x))}
        assert ("bf16" in dtypes) == is_stored


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_goes_where_torch_has_it(value: float) -> None:
    model, x = made(), torch.randn(1, 3, 20, 20)
    fast = tilewise.optimize(model)
    called(fast, x)
    x[0, 1, 7, 9] = value
    with torch.no_grad():
        want = model(x)
    for result in called(fast, x, 2):
        for found, theirs in zip(result, want, strict=True):
            assert torch.equal(found.isfinite(), theirs.isfinite())
            assert torch.equal(found.isnan(), theirs.isnan())


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    fast, x, before = tilewise.optimize(made()), torch.randn(3, 3, 34, 30), torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results += called(fast, x, 3)
    finally:
        torch.set_num_threads(before)
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result[:2], results[0][:2], strict=True))


def test_sizes_change_and_weights_too() -> None:
    model = made()
    fast = tilewise.optimize(model)
    for size in (16, 20, 16, 34):
        x = torch.randn(1, 3, size, size + 2)
        with torch.no_grad():
            model.b.weight.mul_(1.5)
            want = copy.deepcopy(model).double()(x.double())
        for result in called(fast, x, 3):
            assert all(far(a, b) < 2.0 ** -6 for a, b in zip(result, want, strict=True))


def test_threads_share_a_graph() -> None:
    fast = tilewise.optimize(made())
    xs = [torch.randn(1, 3, 16 + 2 * (i % 2), 16) for i in range(4)]
    want, found = [called(fast, x, 1)[0][0] for x in xs], [None] * 4

    def work(i: int) -> None:
        found[i] = called(fast, xs[i], 5)[-1][0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, found, want))  # type: ignore[arg-type]


def test_gradients_autocast_and_other_types_are_as_before() -> None:
    model, x = made(), torch.randn(1, 3, 16, 16)
    fast = tilewise.optimize(model)
    called(fast, x)
    with storing(True):
        fast(x)[0].sum().backward()
        assert model.b.weight.grad is not None
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert fast(x)[0].dtype == torch.bfloat16
        for run in (fast, model):
            with pytest.raises(RuntimeError), torch.no_grad():
                run(x.bfloat16())  # as torch refuses it, also behind a call that stored so


class InPlace(nn.Module):
    """Writes to what a convolution gave and another one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y[:, :4].mul_(3.0)
        return self.b(y) + y.sum()


def test_what_is_written_to_stays_float32() -> None:
    torch.manual_seed(0)
    model, x = InPlace().eval(), torch.randn(1, 3, 12, 12)
    fast = tilewise.optimize(copy.deepcopy(model))
    with torch.no_grad():
        want = model.double()(x.double())
    for found in called(fast, x):
        assert far(found, want) < 1e-4


@pytest.mark.parametrize("seed", range(6))
def test_random_networks_between_unmapped_pages(seed: int) -> None:
    share = networks.judged(seed, stored=True).share
    assert share <= 1


def test_norms_that_learn_see_images_as_they_are() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.SiLU(), nn.BatchNorm2d(16),
                          nn.Conv2d(16, 8, 1)).eval()
    fast = tilewise.optimize(copy.deepcopy(plain))
    batches = [torch.randn(n, 3, 12, 12) for n in (4, 4, 3)]
    called(fast, batches[0], 1)
    with storing(True):
        for model in (plain, fast):
            torch.optim.swa_utils.update_bn(batches, model)
    assert int(fast[2].num_batches_tracked) == 3
    torch.testing.assert_close(fast[2].running_mean, plain[2].running_mean)


@pytest.mark.parametrize("norm", [nn.InstanceNorm2d(16), nn.GroupNorm(4, 16)])
def test_norms_of_their_own_pixels_keep_float32_images(norm: nn.Module) -> None:
    """Of a mean that is large, they would leave its rounding."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 16, 1), norm, nn.ReLU(), nn.Conv2d(16, 4, 1)).eval()
    nn.init.constant_(plain[0].bias, 100.0)
    fast, x = tilewise.optimize(copy.deepcopy(plain)), torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        want = plain.double()(x.double())
    assert max(far(found, want) for found in called(fast, x)) < 1e-4


def test_a_bound_admits_an_input_that_is_rounded_too() -> None:
    """Each rounding errs by up to 2^-8: one of them is not all."""
    value = 1 + 2.0 ** -8 - 2.0 ** -11
    plain = nn.Sequential(nn.Conv2d(16, 16, 1, bias=False), nn.Conv2d(16, 16, 1, bias=False)).eval()
    for conv in plain:
        nn.init.dirac_(conv.weight)
        conv.weight.data *= value
    x = torch.full((1, 16, 24, 24), value)
    want = plain(x).detach().double()
    for admitted, rounds in ((5e-3, False), (9e-3, True)):
        fast = tilewise.optimize(copy.deepcopy(plain), max_error=admitted)
        (found,) = called(fast, x, 1)
        assert (far(found, want) > 1e-4) == rounds


def test_weights_of_another_type_are_refused_as_before() -> None:
    fast, x = tilewise.optimize(spread()), torch.randn(1, 3, 16, 16)
    called(fast, x, 2)
    fast.double()
    with pytest.raises((RuntimeError, tilewise.TilewiseError)):
        called(fast, x, 1)


def test_results_that_torch_reads_are_not_rounded() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)
            nn.init.constant_(self.a.bias, 100.0)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(y - y.mean((2, 3), keepdim=True))

    torch.manual_seed(0)
    plain, x = Centred().eval(), torch.randn(1, 3, 16, 16)
    fast = tilewise.optimize(copy.deepcopy(plain))
    with torch.no_grad():
        want = plain.double()(x.double())
    assert max(far(found, want) for found in called(fast, x)) < 4 * 2.0 ** -8


def spread() -> nn.Module:
    """Large images and few products: memory is what takes its time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 64, 1), *(
        nn.Conv2d(64, 64, 3, padding=1, groups=64) for _ in range(3)), nn.Conv2d(64, 4, 1)).eval()


def test_it_is_chosen_where_memory_takes_longest_and_bundles_bring_it(tmp_path: Any) -> None:
    from tilewise.runtime import weights

    x, model = torch.randn(2, 3, 320, 320), spread()
    with torch.inference_mode():
        first = tilewise.optimize(model)
        want = first(x)
        dtypes = [plan.problem.dtype for plan in ran(lambda: first(x))]
        assert dtypes == ["bf16"] * 5
        tilewise.bundle.save(spread(), x, tmp_path / "bundle", isas=[Target.host().isa])
        before = weights.made_here
        fast = tilewise.bundle.load(tmp_path / "bundle", spread)
        assert all(torch.equal(fast(x), want) for _ in range(4))
    assert weights.made_here == before


class Scaled(nn.Module):
    """A learned number for each channel between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.scale = nn.Parameter(torch.rand(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * self.scale)


def test_parameters_are_not_rounded() -> None:
    torch.manual_seed(0)
    model, x = Scaled().eval(), torch.randn(1, 3, 12, 12)
    fast = tilewise.optimize(copy.deepcopy(model))
    with torch.no_grad():
        want = model.double()(x.double())
    assert all(far(found, want) < 2.0 ** -7 for found in called(fast, x))
    (graph,) = stored_of(fast)
    cast = [node.args[0] for node in graph.graph.nodes if node.target is narrowed]
    assert len(cast) == 2
    assert all(node.op != "get_attr" for node in cast)

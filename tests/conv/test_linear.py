"""Linear layers with large weights: when, how exactly, and that the rest is torch's."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from support import harness
from support.harness import Mismatch, in_process
from support.matrix_unit import needs_amx, precision
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise
from tilewise.conv.linear import Linear, linear
from tilewise.conv.running import ENGINE
from tilewise.core import Problem, Target
from tilewise.model.captured import all_captured
from tilewise.model.tuning import observe, tune
from tilewise.runtime.engine import PRECISIONS

C = K = 1024  # the smallest weight that is worth it
IN_PARTS = [ENGINE.planner.algorithm(f"cpu_direct_{name}") for name in ("bf16x3", "bf16")]
FEW_ROWS = ENGINE.planner.algorithm("cpu_few_rows")
T = Target("cpu", "amx", 2, l1=48 << 10, l2=2 << 20, l3=32 << 20)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def operands(*rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(*rows, C), torch.randn(K, C) / C ** 0.5, torch.randn(K)


def error(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> float:
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return float((y - exact).norm() / exact.norm())


class Perceptron(nn.Module):
    """Flattens its images, as many networks do before their linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.first, self.relu = nn.Linear(C, K), nn.ReLU(inplace=True)
        self.dropout, self.second = nn.Dropout(), nn.Linear(K, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(1)
        return self.second(self.dropout(self.relu(self.first(x))))


def optimised() -> tuple[nn.Module, nn.Module, Tensor]:
    model = Perceptron().eval()
    return model, tilewise.optimize(model), torch.randn(4, 3, 8, 8)


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() < PRECISIONS["medium"] * b.norm())


# the planner's choice


def planned(rows: int, setting: str, target: Target = T) -> str:
    p = Problem.parse(f"n{rows}c4096h1w1k4096r1s1_f32_forward+bias+relu")
    with precision(setting):
        plan = ENGINE.plan(p, target)
    return plan.algorithm


def test_precision_and_rows_decide() -> None:
    rows = (1, 3, 4, 8, 64)
    torch_s, few = "vendor", "cpu_few_rows"
    assert [planned(n, "highest") for n in rows] == [torch_s, torch_s, few, few, torch_s]
    assert [planned(n, "high") for n in rows] == [f"{few}_24"] * 3 + ["cpu_direct_bf16x3"] * 2
    assert [planned(n, "medium") for n in rows] == [f"{few}_16"] * 3 + ["cpu_direct_bf16"] * 2
    assert [planned(n, "high", T.with_(isa="avx512")) for n in rows] == [f"{few}_24"] * 4 + [
        torch_s]


def test_small_weights_are_refused() -> None:
    reasons = FEW_ROWS.reject(Problem(1, 256, 1, 1, 120, 1, 1), T)
    assert reasons == ["weight has 122880 bytes, needs at least 4194304"]


@needs_amx
def test_narrow_weights_are_not_added_up_lane_by_lane() -> None:
    for c, reasons in ((255, ["input channels are 255, needs at least 256"]), (256, [])):
        p = Problem(4, c, 1, 1, (8 << 20) // c, 1, 1)
        assert FEW_ROWS.reject(p, T) == reasons


@needs_amx
def test_rows_share_what_was_prepared() -> None:
    keys = set()
    with precision("high"):
        for rows in (1, 2, 3, 6, 20, 40, 100, 300):
            plan = ENGINE.plan(Problem(rows, 2048, 1, 1, 2048, 1, 1), Target.host(threads=2))
            if plan.algorithm != "vendor":
                keys.add(ENGINE.build(plan).weight_key)
    assert len(keys) <= 2  # in parts, and in fewer bits


@needs_amx
def test_what_is_prepared_is_no_larger_than_the_weight() -> None:
    p, t = Problem(8, C, 1, 1, K, 1, 1), Target.host("amx", 2)
    weight = torch.randn(K, C, 1, 1)
    sizes = [a.prepare(p, t, a.default(p, t), weight).numel() for a in IN_PARTS]
    assert sorted(sizes) == [C * K // 2, C * K]


def test_explain_and_tune_know_them_by_name() -> None:
    model, fast, x = optimised()
    layers = {layer.name: layer.plan for layer in observe(fast, x)}
    assert layers["first"].problem.is_linear
    assert "first" in str(tilewise.explain(fast, x))
    tuned = {layer.name: layer.plan for layer in tune(fast, x)}
    assert tuned["first"].source == "measured"
    assert close(fast(x), model(x))


# the kernel


def run_guarded() -> list[str]:
    """Between unmapped pages, on integers and floats, for rows that fill nothing and too much."""
    failures, target = [], Target.host("amx", harness.THREADS)
    for rows in (1, 8, 17, 40):
        p = Problem.parse(f"n{rows}c1100h1w1k70r1s1_f32_forward+bias+relu")
        for a in IN_PARTS:
            try:
                harness.check(a, p, target, a.default(p, target), 0, [1, rows])
            except Mismatch as mismatch:
                failures.append(str(mismatch))
    return failures


@needs_amx
def test_between_unmapped_pages() -> None:
    assert in_process("test_linear:run_guarded") == []


@needs_amx
@pytest.mark.parametrize("rows", [(1,), (8,), (33,), (2, 5), (2, 3, 4), ()])
def test_any_number_of_rows_and_axes(rows: tuple[int, ...]) -> None:
    x, weight, bias = operands(*rows)
    with precision("medium"):
        y = linear(x, weight, bias, activation="relu")
        theirs = F.linear(x, weight, bias).relu()
    assert y.shape == theirs.shape == (*rows, K)
    assert close(y, theirs)
    assert 1e-4 < error(linear(x, weight, bias, max_error=2e-2), x, weight, bias) < 5e-3


@needs_amx
def test_a_bound_decides_alone() -> None:
    x, weight, bias = operands(8)
    found = [error(linear(x, weight, bias, max_error=bound), x, weight, bias)
             for bound in (1e-2, 1e-4, 1e-6)]
    assert [1e-4 < found[0] < 1e-2, 1e-7 < found[1] < 1e-4, found[2] < 1e-6] == [True] * 3
    assert torch.equal(linear(x, weight, bias, max_error=1e-6), F.linear(x, weight, bias))


@needs_amx
def test_inputs_that_do_not_lie_side_by_side() -> None:
    x, weight, bias = operands(6)
    strided = torch.stack([x, x], dim=-1)[..., 0]
    with precision("medium"):
        assert torch.equal(linear(strided, weight, bias), linear(x, weight, bias))
        assert torch.equal(linear(x, weight, bias[:1].expand(K)),
                           linear(x, weight, bias[:1].repeat(K)))


# what stays torch's


def same_as_torch(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    return torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.parametrize("change", [
    lambda x, w, b: (x.double(), w.double(), b.double()),
    lambda x, w, b: (x[:0], w, b),
    lambda x, w, b: (x, w.t().contiguous().t(), b),
    lambda x, w, b: (x, w[:16], b[:16]),
    lambda x, w, b: (x.requires_grad_(), w, b)],
    ids=["f64", "empty", "transposed", "small", "gradient"])
def test_the_rest_is_torch_s(change: Callable[..., tuple[Tensor, ...]]) -> None:
    with precision("medium"):
        assert same_as_torch(*change(*operands(8)))


def test_sizes_that_depend_on_data_can_be_exported() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(K, C), requires_grad=False)

        def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
            return linear(x[chosen][None], self.weight)

    x, chosen = torch.randn(6, C), torch.tensor([True, False, True, True, False, False])
    model = Chosen()
    exported = torch.export.export(model, (x, chosen)).module()
    assert close(exported(x, chosen), F.linear(x[chosen][None], model.weight))


def test_highest_is_float32() -> None:
    """Torch's own, unless it would pack the weight for a handful of rows."""
    assert same_as_torch(*operands(2))
    x, weight, bias = operands(8)
    with torch.no_grad():
        assert error(linear(x, weight, bias), x, weight, bias) < 1e-6


def test_modes_are_torch_s() -> None:
    x, weight, bias = operands(8)
    with precision("medium"), torch.no_grad():
        with torch.autocast("cpu"):
            assert same_as_torch(x, weight, bias)
        one = torch.func.vmap(lambda row: linear(row, weight, bias))(x)
        assert torch.equal(one, torch.func.vmap(lambda row: F.linear(row, weight, bias))(x))


@pytest.mark.parametrize("shape", [(1,), (), (8, K)], ids=str)
def test_biases_that_torch_spreads(shape: tuple[int, ...]) -> None:
    x, weight, _ = operands(8)
    bias = torch.randn(shape)
    with torch.no_grad(), precision("medium"):
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


def test_weights_of_other_shapes_are_torch_s() -> None:
    x = torch.randn(8, C)
    with torch.no_grad(), precision("medium"):
        for weight in (torch.randn(C), torch.randn(0, C)):
            assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_complaints_are_torch_s() -> None:
    x, weight, bias = operands(8)
    with precision("medium"), pytest.raises(RuntimeError, match="shapes"):
        linear(x[:, :-1], weight, bias)


# models


@needs_amx
def test_optimize_finds_all_of_them() -> None:
    model, fast, x = optimised()
    with torch.no_grad():
        fast(x)
    found = [step for captured in all_captured(fast) for (capture,) in captured.captures.values()
             for step in capture.steps.values() if isinstance(step, Linear)]
    assert [str(module.activation) for module in found] == ["relu", "None"]
    assert fast.state_dict().keys() == model.state_dict().keys()
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        assert (fast(x) - exact).norm() < 1e-5 * exact.norm()
        with precision("medium"):
            assert 1e-4 < (fast(x) - exact).norm() / exact.norm() < 2e-2


@needs_amx
def test_it_follows_the_weights() -> None:
    model, fast, x = optimised()
    with torch.no_grad(), precision("medium"):
        before = fast(x)
        model.first.weight.mul_(2)
        assert close(fast(x), model(x))
        model.load_state_dict(Perceptron().state_dict())
        assert close(fast(x), model(x))
        assert not close(fast(x), before)


@needs_amx
def test_it_trains() -> None:
    model, fast, x = optimised()
    twin = copy.deepcopy(model)
    with precision("medium"):
        for net in (fast, twin):
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            net(x).square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            assert close(fast(x), twin(x))
    assert close(model.first.weight.grad, twin.first.weight.grad)


@needs_amx
def test_copies_and_files() -> None:
    model, fast, x = optimised()
    other, file = copy.deepcopy(fast), io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    released = tilewise.optimize(model, keep_original=False)
    with torch.no_grad(), precision("medium"):
        y = fast(x)
        # torch's part may differ in the last bits where memory begins elsewhere
        assert all((net(x) - y).norm() < 1e-6 * y.norm() for net in (other, loaded, released))
        other.first.weight.zero_()
        assert torch.equal(fast(x), y)
        assert not close(other(x), y)


@needs_amx
def test_under_compilers() -> None:
    _, fast, x = optimised()
    with torch.no_grad(), precision("medium"):
        y = fast(x)
        assert close(torch.compile(fast, backend="aot_eager", fullgraph=True)(x), y)
        assert close(torch.export.export(fast, (x,)).module()(x), y)
        z, weight = torch.randn(4, C), fast.first.weight.detach()
        assert close(torch.jit.trace(lambda z: linear(z, weight), z)(2 * z), 2 * linear(z, weight))

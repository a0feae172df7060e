"""Batch norm in training mode and its gradients between unmapped pages, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from support import faults
from support.faults import Patch, changed, patched, replaced
from torch import Tensor
from torch.nn import functional as F

from tilewise.bench.guarded import Mismatch, launch_guarded
from tilewise.core.isa import ISA
from tilewise.core.problem import Epilogue, Problem
from tilewise.core.schedule import Schedule
from tilewise.core.target import Target
from tilewise.kernels.cpu.between import batch_norm, derivatives
from tilewise.kernels.cpu.emit.launch import launcher
from tilewise.runtime import batch_norm as run_time

HOST = Target.host(threads=2)
ROWS = [name for name, row in ISA.items() if row.lanes <= HOST.lanes
        and HOST.row.machines == row.machines and not row.matrix]
ANY = Problem(1, 1, 1, 1, 1, 1, 1)
ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x, "relu": F.relu, "relu6": F.relu6, "silu": F.silu,
    "hardswish": F.hardswish, "leaky_relu:0.1": lambda x: F.leaky_relu(x, 0.1)}
SHAPES = [(2, 1), (3, 5), (7, 16), (100, 17), (513, 33), (4096, 3), (900, 130)]


class Case(NamedTuple):
    """So many pixels and channels, what follows the norm, and which parameters it has."""

    pixels: int
    channels: int
    activation: str | None = None
    residual: bool = False
    has: tuple[bool, bool] = (True, True)
    offset: float = 0.0
    row: str = ROWS[0]

    @property
    def masked(self) -> bool:
        return self.residual and self.activation is not None


def draw(case: Case, seed: int, offset: float = 0.0) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(case.pixels, case.channels, generator=made) + offset


def near(found: Tensor, expected: Tensor, error: float, what: object, least: float = 0.0) -> None:
    """By the norm of what is expected, or of what was subtracted to get it."""
    worst = float((found.double() - expected).norm() / max(float(expected.norm()), least))
    if not worst <= error:
        raise Mismatch(f"{what}: {worst} from float64, {error} allowed")


def check_case(case: Case) -> None:
    """Forward and backward, at the start and at the end of a page, on one thread and on two."""
    for threads, side in ((1, "start"), (2, "end")):
        _check(case, threads, side)


def _check(case: Case, threads: int, side: str) -> None:
    pixels, channels, activation, residual, has, offset, row = case
    x, more, grad = draw(case, 0, offset), draw(case, 1) if residual else None, draw(case, 2)
    weight, bias = (draw(case, 3 + i)[0] + 1 if one else None for i, one in enumerate(has))
    lanes = ISA[row].lanes
    sizes = batch_norm.sizes(pixels, channels, 1e-5, lanes)
    tables = batch_norm.TABLES * sizes.padded
    tail = ANY.with_(epilogue=Epilogue(activation=activation, residual=residual))
    mask = {"mask": batch_norm.mask_bytes(pixels, channels, lanes)} if case.masked else {}
    forward = launcher(batch_norm.make, tail, Schedule(), ISA[row], *map(int, has),
                       int(case.masked), sizes=sizes.words)
    flat = None if more is None else more.flatten()
    made = launch_guarded(forward, {"x": x.flatten(), "weight": weight, "bias": bias,
                                    "residual": flat},
                          {"y": x.numel(), "scratch": sizes.before + tables, **mask}, 1, threads,
                          side)
    inputs = [t.double().requires_grad_() for t in (x, weight, bias, more) if t is not None]
    y = _expected(case, iter(inputs))
    near(made["y"].view(x.shape), y.detach(), 4e-6 * (1 + offset), case)
    _check_backward(case, x, grad, made, sizes, (threads, side), torch.autograd.grad(
        y, inputs, grad.double()))


def _expected(case: Case, given: Any) -> Tensor:
    x = next(given)
    weight, bias = (next(given) if one else None for one in case.has)
    y = F.batch_norm(x, None, None, weight, bias, True, eps=1e-5)
    return ACTIVATIONS[case.activation](y + next(given) if case.residual else y)


def _check_backward(case: Case, x: Tensor, grad: Tensor, made: dict[str, Tensor],
                    sizes: batch_norm.Sizes, where: tuple[int, str],
                    expected: tuple[Tensor, ...]) -> None:
    activation = None if case.masked else case.activation
    kernel = launcher(batch_norm.make_backward, ANY.with_(epilogue=Epilogue(activation=activation)),
                      Schedule(), ISA[case.row], int(case.masked), int(case.masked),
                      sizes=sizes.words)
    tables = made["scratch"][sizes.before:][:batch_norm.TABLES * sizes.padded]
    given = {"x": grad.flatten(), "weight": x.flatten(), "bias": tables,
             **({"mask": made["mask"]} if case.masked else {})}
    kept = {"residual": x.numel()} if case.masked else {}
    found = launch_guarded(kernel, given, {
        "y": x.numel(), "scratch": sizes.before + batch_norm.GRADIENTS * sizes.padded, **kept}, 1,
        *where)
    of_parameters = found["scratch"][sizes.before:].view(-1, sizes.padded)[:2, :case.channels]
    wanted, error = iter(expected), 2e-5 * (1 + case.offset)
    near(found["y"].view(x.shape), next(wanted), error, case, float(grad.norm()))
    for part, one in zip(of_parameters, case.has, strict=True):
        if one:
            near(part, next(wanted), error, case)
    if case.masked:
        near(found["residual"].view(x.shape), next(wanted), error, case)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(row: str, activation: str | None) -> None:
    for pixels, channels in SHAPES:
        check_case(Case(pixels, channels, activation, row=row))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_residuals(row: str, activation: str | None) -> None:
    for pixels, channels in SHAPES:
        check_case(Case(pixels, channels, activation, True, row=row))


@pytest.mark.parametrize("has", [(False, False), (True, False), (False, True)])
def test_without_parameters(has: tuple[bool, bool]) -> None:
    check_case(Case(70, 19, "relu", has=has))
    check_case(Case(70, 19, "relu", True, has=has))


def test_a_large_mean_costs_no_digits() -> None:
    """Sums are float64; what is left is the rounding of the input itself."""
    check_case(Case(600, 20, "relu", offset=100.0))


def test_statistics() -> None:
    case = Case(700, 21)
    x, sizes = draw(case, 0, 3.0), batch_norm.sizes(700, 21, 1e-5, HOST.lanes)
    kernel = launcher(batch_norm.make, ANY, Schedule(), HOST.row, 0, 0, 0, sizes=sizes.words)
    made = launch_guarded(kernel, {"x": x.flatten()}, {
        "y": x.numel(), "scratch": sizes.before + batch_norm.TABLES * sizes.padded}, 1, 2, "end")
    tables = made["scratch"][sizes.before:].view(batch_norm.TABLES, -1)[:, :21]
    variance, mean = torch.var_mean(x.double(), 0, unbiased=False)
    near(tables[0], mean, 1e-7, "mean")
    near(tables[4], variance, 1e-7, "variance")
    near(tables[3], (variance + 1e-5).rsqrt(), 1e-7, "one over the root")


def test_every_activation_says_whether_it_has_a_gradient() -> None:
    assert set(derivatives.DERIVATIVES) == {
        (name or "").partition(":")[0] for name in ACTIVATIONS} - {""}
    assert derivatives.has_derivative(None)
    assert derivatives.has_derivative("leaky_relu:0.3")
    assert not derivatives.has_derivative("gelu")


# deliberate faults


class Fault(NamedTuple):
    apply: Patch
    case: Case


def check(fault: Fault) -> None:
    with patched(fault.apply):
        check_case(fault.case)


MUTATIONS = {
    "a mask of another pixel": Fault(
        changed(batch_norm._Bits, "at", lambda at: at.bytes(2)), Case(100, 40, "relu", True)),
    "the last pixels are left out": Fault(
        changed(batch_norm, "_rows", lambda rows: (rows[0], rows[1] - 1)), Case(100, 17)),
    "one pixel too many": Fault(
        changed(batch_norm, "_rows", lambda rows: (rows[0], rows[1] + 1)), Case(100, 17)),
    "a gradient of another activation": Fault(
        replaced(derivatives, "DERIVATIVES",
                 {**derivatives.DERIVATIVES, "relu6": derivatives.relu}), Case(600, 17, "relu6")),
    "another divisor": Fault(
        changed(batch_norm, "double_word", lambda word: word + word), Case(50, 17)),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_batch_norm")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])


@pytest.mark.parametrize("channels", [HOST.lanes, 3 * HOST.lanes])
def test_results_past_the_caches_have_the_same_bits(monkeypatch: pytest.MonkeyPatch,
                                                    channels: int) -> None:
    rng = torch.Generator().manual_seed(channels)
    x, grad, residual = (torch.randn(2, 37, 41, channels, generator=rng).permute(0, 3, 1, 2)
                         for _ in range(3))
    found, asked = [], []
    streams = run_time._streams
    monkeypatch.setattr(run_time, "_streams", lambda *a: asked.append(streams(*a)) or asked[-1])
    for large in (1 << 40, 1):
        monkeypatch.setattr(run_time, "LARGE", large)
        for known in (run_time._forward, run_time._backward):
            known.clear()
        y, statistics = run_time.forward(x, residual, None, None, 1e-5, "relu")
        found.append((y, run_time.backward(grad, x, statistics, "relu", 1e-5, True)))
    assert asked == [0, 0, *[int(HOST.lanes == 16)] * 2]
    (y, gradients), (other, others) = found
    assert torch.equal(y, other)
    assert torch.equal(gradients.x, others.x)
    assert gradients.residual is not None
    assert torch.equal(gradients.residual, others.residual)

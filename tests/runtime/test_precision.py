"""A bound that a caller gives holds whatever precision torch is set to."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

import tilewise
from tilewise.conv.linear import Linear, linear
from tilewise.conv.running import ENGINE
from tilewise.kernels import precision

BOUND = 1e-6
SMALL = (1, 64, 3, 3)  # of so few pixels torch's convolution is a matrix product
LARGE = (1, 64, 28, 28)


@pytest.fixture(autouse=True)
def own_setting() -> Iterator[None]:
    """Torch's settings and the plans made under them are put back."""
    before = torch.get_float32_matmul_precision()
    ENGINE.executables.clear()
    yield
    ENGINE.executables.clear()
    torch.set_float32_matmul_precision(before)
    for part in (torch.backends, getattr(torch.backends.mkldnn, "conv", None)):
        if hasattr(part, "fp32_precision"):
            part.fp32_precision = "none"


def lower(how: str) -> None:
    """Have torch compute float32 with fewer bits."""
    if how == "conv":
        if not hasattr(torch.backends.mkldnn, "conv"):
            pytest.skip("this torch has one setting for all")
        torch.backends.mkldnn.conv.fp32_precision = "bf16"
    else:
        torch.set_float32_matmul_precision(how)


def settings() -> tuple[str, ...]:
    conv = getattr(torch.backends.mkldnn, "conv", None)
    return (torch.get_float32_matmul_precision(), getattr(conv, "fp32_precision", ""),
            getattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision", ""))


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    found, exact = found.detach(), exact.detach()
    return float((found.double() - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())


def operands(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=rng),
            torch.randn(64, 64, 3, 3, generator=rng) / 24)


@pytest.mark.parametrize("how", ["high", "medium", "conv"])
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("algorithm", [None, "vendor"])
def test_a_bound_holds_for_convolutions(how, shape, algorithm):
    x, weight = operands(shape)
    exact = F.conv2d(x.double(), weight.double())
    lower(how)
    before = settings()
    y = tilewise.conv2d(x, weight, algorithm=algorithm, max_error=BOUND)
    assert error(y, exact) <= BOUND
    assert settings() == before
    assert error(tilewise.conv2d(x, weight, algorithm=algorithm, max_error=BOUND), exact) <= BOUND


@pytest.mark.parametrize("stride", [1, 2])  # torch's own with a stride
@pytest.mark.parametrize("how", ["medium", "conv"])
def test_a_bound_holds_for_gradients(how, stride):
    x, weight = (t.requires_grad_() for t in operands((1, 64, 5, 5)))
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    F.conv2d(*wide, stride=stride).square().sum().backward()
    lower(how)
    tilewise.conv2d(x, weight, stride=stride, max_error=BOUND).square().sum().backward()
    for ours, theirs in zip((x, weight), wide, strict=True):
        assert error(ours.grad, theirs.grad) <= 3 * BOUND  # twice as many sums


@pytest.mark.parametrize("rows", [1, 64])
def test_a_bound_holds_for_linear_layers(rows):
    rng = torch.Generator().manual_seed(0)
    x, layer = torch.randn(rows, 512, generator=rng), torch.nn.Linear(512, 256)
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    lower("medium")
    with torch.no_grad():
        assert error(Linear(layer, max_error=BOUND)(x), exact) <= BOUND
    assert error(linear(x, layer.weight, layer.bias, max_error=BOUND), exact) <= BOUND
    assert torch.get_float32_matmul_precision() == "medium"


def test_without_a_bound_the_setting_is_torchs():
    x, weight = operands(SMALL)
    lower("medium")
    assert torch.equal(tilewise.conv2d(x, weight, algorithm="vendor"), F.conv2d(x, weight))


@pytest.mark.parametrize("how", ["medium", "conv"])
def test_the_error_of_torch_is_that_of_its_setting(how):
    text = "n1c64h3w3k64r3s3_f32_forward"
    if how == "conv":
        text = "n1c64h28w28k64r3s3_f32_forward"
    x, weight = operands(SMALL if how == "medium" else LARGE)
    exact = F.conv2d(x.double(), weight.double())

    def declared(**bound: float) -> float:
        found = tilewise.explain(text, **bound).candidates
        return next(c.plan.error for c in found if c.algorithm == "vendor")

    full = declared()
    assert full < BOUND * 3
    lower(how)
    found = error(F.conv2d(x, weight), exact)
    assert found <= declared() < 2e-2
    if torch.cpu._is_avx512_bf16_supported():  # else torch keeps all bits whatever is set
        assert full < found
    assert declared(max_error=BOUND) == full  # which is how it would run


def test_many_threads_hold_and_release():
    x, weight = operands(SMALL)
    exact = F.conv2d(x.double(), weight.double())
    lower("medium")
    before, errors = settings(), []

    def run() -> None:
        for _ in range(200):
            y = tilewise.conv2d(x, weight, algorithm="vendor", max_error=BOUND)
            errors.append(error(y, exact))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 800
    assert max(errors) <= BOUND
    assert settings() == before


def test_a_setting_made_meanwhile_is_kept():
    lower("medium")
    with precision.full():
        torch.set_float32_matmul_precision("high")
        with precision.full():
            assert not precision.lowered()
    assert torch.get_float32_matmul_precision() == "high"


def test_the_one_setting_of_older_releases(monkeypatch):
    monkeypatch.setattr(precision, "KINDS", {"matmul": precision._Legacy()})
    x, weight = operands(SMALL)
    lower("medium")
    assert precision.lowered() == {"matmul": "bf16"}
    y = tilewise.conv2d(x, weight, algorithm="vendor", max_error=BOUND)
    assert error(y, F.conv2d(x.double(), weight.double())) <= BOUND
    assert torch.get_float32_matmul_precision() == "medium"


def test_settings_that_name_no_backend():
    """torch may then refuse to tell its older setting."""
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch has one setting for all")
    x, weight = operands(LARGE)
    exact = F.conv2d(x.double(), weight.double())
    torch.backends.fp32_precision = "bf16"
    with torch.no_grad():
        assert error(tilewise.conv2d(x, weight), exact) < 2e-2
        assert error(tilewise.conv2d(x, weight, algorithm="vendor", max_error=BOUND),
                     exact) <= BOUND
    assert torch.backends.mkldnn.conv.fp32_precision == "bf16"
    torch.backends.fp32_precision = "ieee"  # what was inherited still is
    assert torch.backends.mkldnn.conv.fp32_precision == "ieee"

"""What works with the torch that is installed: a small ResNet, five uses of it.

    python scripts/check_torch.py            # one JSON object, for scripts/try_torch.py

It needs tilewise and nothing else. A use that fails is listed with the error; nothing is timed.
"""

from __future__ import annotations

import copy
import json
import platform
import sys
from collections.abc import Callable
from importlib.metadata import version

import torch
from torch import Tensor, nn

import tilewise
from tilewise.model.dynamo import has_compiler
from tilewise.models.resnet import BasicBlock, ResNet

LARGEST = 1e-5  # relative difference from torch's own result


class Skipped(Exception):
    """A use that this machine cannot try."""


def compare(found: Tensor, expected: Tensor) -> None:
    error = float((found - expected).norm() / expected.norm())
    if not error < LARGEST:
        raise AssertionError(f"differs by {error:.1e}")


def network() -> tuple[nn.Module, Tensor]:
    """Before no ReLU is a value so near zero that rounding decides whether a gradient passes."""
    torch.manual_seed(8)
    return ResNet(BasicBlock, (1, 1, 1, 1), classes=10), torch.randn(2, 3, 48, 48)


@torch.no_grad()
def self_check() -> None:
    """Each algorithm of the CPU on one layer, against float64."""
    x = torch.randn(1, 16, 12, 12).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(16, 16, 3, 3)
    exact = torch.nn.functional.conv2d(x.double(), weight.double(), padding=1)
    for algorithm in ("cpu_direct", "cpu_winograd", "vendor"):
        compare(tilewise.conv2d(x, weight, padding=1, algorithm=algorithm).double(), exact)


@torch.no_grad()
def inference() -> None:
    model, images = network()
    model.eval()
    fast = tilewise.optimize(model)
    compare(fast(images), model(images))
    algorithms = str(tilewise.explain(fast, images))
    assert "cpu_" in algorithms, "no layer runs generated code"


def training() -> None:
    """One step beside torch's, from the same weights."""
    model, images = network()
    fast = tilewise.optimize(copy.deepcopy(model))
    for each in (model, fast):
        loss = each(images).square().mean()
        loss.backward()
        torch.optim.SGD(each.parameters(), lr=0.01).step()
    for found, expected in zip(fast.parameters(), model.parameters()):
        compare(found.grad, expected.grad)
        compare(found.detach(), expected.detach())


@torch.no_grad()
def compiled() -> None:
    if not has_compiler():
        raise Skipped("no C++ compiler")
    model, images = network()
    model.eval()
    compare(torch.compile(model, backend="tilewise")(images), model(images))


@torch.no_grad()
def exported() -> None:
    model, images = network()
    model.eval()
    program = torch.export.export(tilewise.optimize(model), (images,))
    compare(program.module()(images), model(images))


USES: dict[str, Callable[[], None]] = {
    "self-check": self_check, "inference": inference, "training": training,
    "torch.compile": compiled, "torch.export": exported}


def outcome(use: Callable[[], None]) -> str:
    """`yes`, or why not, in one line."""
    try:
        use()
    except Skipped as reason:
        return f"not tried: {reason}"
    except Exception as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        return f"no: {type(error).__name__}: {first[:160]}"
    return "yes"


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "python": platform.python_version(),
            **{name: version(name) for name in ("numpy", "llvmlite")}}


def main() -> int:
    found = {name: outcome(use) for name, use in USES.items()}
    print(json.dumps({"versions": versions(), "uses": found}))
    return 1 if any(text.startswith("no:") for text in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

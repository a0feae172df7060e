"""What works on this machine: ResNet-18, the cache of compiled code, a forked child.

    python scripts/check_arm.py resnet18     # one JSON object, for scripts/emulate_debian.py
    python scripts/check_arm.py cached       # in a second process: nothing is compiled again
    python scripts/check_arm.py forked

It needs tilewise and nothing else. TILEWISE_CACHE_DIR should be a directory of its own, empty at
first. A check that fails ends with an exception.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise
from tilewise.core.files import cache_directory
from tilewise.core.target import Target
from tilewise.kernels.cpu.emit import jit
from tilewise.kernels.cpu.emit.threads import alone, uses_openmp
from tilewise.models import resnet18

LARGEST = 2e-5  # error against float64, of what `max_error` allows by default
SIZE = 224
PATIENCE = 300  # seconds that a child may take
SHORT = 30  # for one convolution
Answer = dict[str, Any]


def network() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = resnet18().eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):  # numbers as training leaves them
            nn.init.uniform_(norm.running_mean, -0.1, 0.1)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return model, torch.randn(1, 3, SIZE, SIZE)


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def bits(y: Tensor) -> str:
    return hashlib.sha256(y.contiguous().numpy().tobytes()).hexdigest()


def optimised() -> tuple[nn.Module, nn.Module, Tensor, float]:
    model, images = network()
    start = time.monotonic()
    fast = tilewise.optimize(model, images)
    return model, fast, images, round(time.monotonic() - start)


@torch.inference_mode()
def whole() -> Answer:
    """The model beside torch's, both against float64."""
    model, fast, images, seconds = optimised()
    found, own = fast(images), model(images)
    exact = network()[0].double()(images.double())
    error = relative(found, exact)
    assert error < LARGEST, f"error is {error:.1e}, needs less than {LARGEST:.0e}"
    names = [layer.plan.algorithm for _, layer in tilewise.explain(fast, images).layers]
    ours = sum(name.startswith("cpu_") for name in names)
    assert 2 * ours > len(names), f"generated code runs {ours} of {len(names)} layers"
    assert uses_openmp(), "torch's OpenMP library was not found"
    (cache_directory() / "bits").write_text(bits(found))
    return {"isa": Target.host().isa, "error": error, "error_of_torch": relative(own, exact),
            "layers": len(names), "generated": ours, "compiled": jit.compiled,
            "seconds_to_optimise": seconds}


@torch.inference_mode()
def cached() -> Answer:
    """The same bits, and not one kernel compiled."""
    _, fast, images, seconds = optimised()
    assert bits(fast(images)) == (cache_directory() / "bits").read_text(), "other bits"
    assert jit.compiled == 0, f"{jit.compiled} kernels were compiled again"
    return {"compiled": jit.compiled, "seconds_to_optimise": seconds}


@torch.inference_mode()
def forked() -> Answer:
    """A child after its parent has run on all threads: the same bits, and new code of its own."""
    _, fast, images, _ = optimised()
    with alone():  # without the parts of torch that the child cannot use
        expected = fast(images)
    x, weight = torch.randn(1, 7, 9, 11), torch.randn(5, 7, 3, 3)
    exact = F.conv2d(x.double(), weight.double(), padding=1)
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)  # a child that hangs says where
        os.environ["TILEWISE_CACHE_DIR"] = str(cache_directory() / f"child-{os.getpid()}")
        os._exit(_in_child(lambda: (
            ("other bits", torch.equal(fast(images), expected)),
            ("wrong", relative(tilewise.conv2d(x, weight, padding=1, algorithm="cpu_direct"),
                               exact) < LARGEST),
            ("nothing was compiled", jit.compiled > 0))))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code == 0, f"the child ended with {code}"
    with alone():
        assert torch.equal(fast(images), expected), "the parent computes something else afterwards"
    return {"child": code, "torch_hangs_on_one_thread": _torch_hangs(images)}


def _torch_hangs(images: Tensor) -> bool:
    """Whether torch's own convolution ends in a child that tilewise does not help."""
    weight = torch.randn(64, 3, 7, 7)
    F.conv2d(images, weight)
    child = os.fork()
    if child == 0:
        signal.alarm(SHORT)
        torch.set_num_threads(1)
        F.conv2d(images, weight)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) != 0


def _in_child(checks: Callable[[], Sequence[tuple[str, bool]]]) -> int:
    """The exit code; a child must not return into the code of its parent."""
    try:
        failed = [what for what, holds in checks() if not holds]
    except BaseException as error:
        failed = [f"{type(error).__name__}: {error}"]
    if failed:
        print("in the child:", *failed, file=sys.stderr, flush=True)
    return int(bool(failed))


CHECKS: dict[str, Callable[[], Answer]] = {"resnet18": whole, "cached": cached, "forked": forked}


def main(argv: list[str]) -> int:
    if len(argv) != 2 or argv[1] not in CHECKS:
        print(f"needs one of {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    print(json.dumps(CHECKS[argv[1]]()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

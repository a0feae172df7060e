"""What a program costs besides its kernels, and how much memory it takes.

    python benchmarks/program.py                      # a chain of 100 small convolutions
    python benchmarks/program.py resnet50 yolov8n     # and models of the zoo

Of the chain: the time of a call, the sum of its kernels (the same list, walked without Python), and
the same model layer by layer. Of models: both times, and the memory for values in between.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn

import tilewise
from tilewise.kernels.cpu.emit.walk import walk
from tilewise.model.captured import Captured
from tilewise.model.programs import Bound
from tilewise.runtime.program import WORDS, _Call, _Kernels

CALLS = 300


def bound_of(model: nn.Module, x: torch.Tensor) -> tuple[Any, Bound]:
    for _ in range(3):
        model(x)
    forward: Any = model.__dict__["forward"]
    assert isinstance(forward, Captured)
    capture, tensors = forward.find((x,), {})
    assert capture is not None
    found = capture.programs.find(tensors)
    assert isinstance(found, Bound), found
    return capture, found


def least(run: Any, calls: int = CALLS) -> float:
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def kernels_alone(bound: Bound, x: torch.Tensor) -> float:
    """The native part of a call: addresses are there, one call walks the list."""
    program = bound.program
    call = _Call(program, [x])
    (part,) = program._parts
    assert isinstance(part, _Kernels)
    call.run(part)
    entries, frames = program._addresses.ctypes.data, call.frames.ctypes.data
    assert call.frames.shape == (part.count, WORDS)
    return least(lambda: walk(entries, frames, part.count))


def chain(count: int = 100) -> None:
    model = tilewise.optimize(nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1)
                                              for _ in range(count))).eval())
    x = torch.randn(1, 8, 4, 4)
    capture, bound = bound_of(model, x)
    whole, kernels = least(lambda: model(x)), kernels_alone(bound, x)
    layers = least(lambda: capture.run(capture._names, [x]))
    print(f"{count} convolutions 8 to 8 on 4x4: {whole * 1e6:.0f} us, kernels alone "
          f"{kernels * 1e6:.0f} us, {(whole - kernels) * 1e6:.0f} us more; layer by layer "
          f"{layers * 1e6:.0f} us")


def of_the_zoo(name: str) -> None:
    from zoo_models import ZOO

    model = tilewise.optimize(ZOO[name].make().eval())
    x = torch.randn(1, *ZOO[name].shape)
    capture, bound = bound_of(model, x)
    whole = least(lambda: model(x), 15)
    layers = least(lambda: capture.run(capture._names, [x]), 15)
    program = bound.program
    print(f"{name}: {program.kernels} kernels, {program.steps_of_torch} steps of torch; "
          f"{whole * 1e3:.2f} ms, layer by layer {layers * 1e3:.2f} ms; arena "
          f"{program.bytes / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        chain()
        for name in options.models:
            of_the_zoo(name)


if __name__ == "__main__":
    main()

"""The memory that models of the zoo take: tilewise's programs beside torch.

    python benchmarks/memory.py                       # the whole zoo
    python benchmarks/memory.py resnet50 yolov8n --batch 8

Of torch: the most that tensors take at once during a call, and the weights. Of tilewise: the memory
for values in between, and the weights in the kernels' forms, as `tilewise.explain` tells them. The
model's own weights, which stay unless it is optimised with `keep_original=False`, are in neither.
"""

from __future__ import annotations

import argparse
import warnings

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from zoo_models import ZOO, settle

import tilewise
from tilewise.model.profile import memory_of, programs_of


def most_of_torch(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes, in the layout that takes less."""
    return min(_most(model.to(memory_format=layout), x.contiguous(memory_format=layout))
               for layout in (torch.contiguous_format, torch.channels_last)
               if x.dim() == 4 or layout is torch.contiguous_format)


def _most(model: nn.Module, x: torch.Tensor) -> int:
    model(x)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        model(x)
    now = most = 0
    for event in sorted((e for e in found.profiler.kineto_results.events()
                         if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def row(name: str, batch: int) -> tuple[int, int, int, int] | None:
    torch.manual_seed(0)
    model, x = settle(ZOO[name].make()).eval(), torch.randn(batch, *ZOO[name].shape)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    theirs = most_of_torch(model, x)
    fast = tilewise.optimize(model.to(memory_format=torch.contiguous_format))
    programs = [bound.program for bound in programs_of(fast, (x,))]
    return (theirs, weights, *memory_of(programs)) if programs else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names of the zoo; all of them if none")
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    ratios = []
    print(f"{'MB':24} torch: values weights  tilewise: values weights  ratio")
    for name in options.models or ZOO:
        with torch.inference_mode():
            found = row(name, options.batch)
        if found is None:
            print(f"{name:24} no program", flush=True)
            continue
        values, weights, arena, prepared = (bytes_ / 1e6 for bytes_ in found)
        ratios.append((arena + prepared) / (values + weights))
        print(f"{name:24} {values:13.1f} {weights:7.1f}  {arena:16.1f} {prepared:7.1f}  "
              f"{ratios[-1]:5.2f}", flush=True)
    print(f"{sum(ratio <= 1 for ratio in ratios)} of {len(ratios)} models take less than torch")


if __name__ == "__main__":
    main()

"""Weights prepared for the matrix unit against their definition, between unmapped pages."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from support.harness import in_process
from support.matrix_unit import needs_amx

from tilewise.bench.guarded import launch_guarded
from tilewise.core import Problem, Schedule, Target
from tilewise.core.isa import ISA
from tilewise.kernels.cpu.matrix import direct as direct_amx
from tilewise.kernels.cpu.matrix.winograd import Geometry
from tilewise.kernels.cpu.prepare import direct_matrix as direct_prepare
from tilewise.kernels.cpu.prepare import winograd as winograd_prepare
from tilewise.kernels.cpu.prepare import winograd_amx as winograd_prepare_amx

# channels, filters and taps: odd numbers, more than one step, less than a vector
SHAPES = ((33, 70, 3, 3), (64, 48, 3, 3), (1, 5, 3, 3), (70, 40, 2, 3), (40, 16, 1, 4))
DIRECT = ((33, 70, 1, 1), (64, 48, 3, 3), (1, 5, 3, 3), (3, 21, 7, 7), (37, 16, 1, 4))
ORDERS = ("channels", "positions", "shared")
CLOSE = 2.0 ** -21  # float64 sums in another order: the last bit of the last part


def prepared(launch: Any, geometry: Any, weight: torch.Tensor, side: str) -> torch.Tensor:
    """By the generated code, which touches nothing beside the weight and its result."""
    target = Target.host("amx", 2)
    values = weight.as_strided((weight.numel(),), (1,), 0)
    return launch_guarded(launch, {"x": torch.tensor(weight.stride()), "weight": values},
                          {"y": geometry.weight_floats}, 1, target.threads, side)["y"]


def run_direct() -> list[str]:
    """What differs by a bit."""
    wrong = []
    for (c, k, r, taps), products, vectors in itertools.product(DIRECT, (1, 3, 6), (1, 2)):
        p = Problem(1, c, r, taps, k, r, taps)
        g = direct_amx.Geometry(p, Schedule(vectors=vectors), 16, products)
        weight = torch.randn(k, c, r, taps, generator=torch.Generator().manual_seed(k))
        filters = weight.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)  # side by side
        for side, given in (("start", weight), ("end", filters), ("start", filters),
                            ("end", weight.contiguous(memory_format=torch.channels_last))):
            launch = direct_prepare.launch_for(g, ISA["amx"])
            found = prepared(launch, g, given, side).view(torch.int32)
            if not torch.equal(found, g.pack_weight(weight).view(torch.int32)):
                wrong.append(f"{p} {g.s} {side}")
    return wrong


@needs_amx
def test_prepared_panels_are_those_of_torch() -> None:
    assert in_process("test_amx_prepare:run_direct") == []


def run_shapes() -> list[str]:
    """What differs, of weights whose channels or taps are innermost."""
    target, wrong = Target.host("amx", 2), []
    for number, ((c, k, r, taps), products) in enumerate(itertools.product(SHAPES, (1, 3, 6))):
        p = Problem(1, c, r, taps, k, r, taps)
        s = Schedule(tile_h=4 if r > 1 else 1, tile_w=4, order=ORDERS[(number + number // 3) % 3],
                     vectors=1 + number % 2 * (k > 16))
        print(p, s)
        weight = torch.randn(k, c, r, taps, generator=torch.Generator().manual_seed(number))
        geometry = Geometry(p, s, target.lanes, products)
        expected = geometry.pack_weight(weight).view(torch.bfloat16).double()
        for side, given in (("start", weight),
                            ("end", weight.contiguous(memory_format=torch.channels_last))):
            launch = winograd_prepare.launch_for(winograd_prepare_amx.make, geometry, target.row,
                                                 products)
            u = prepared(launch, geometry, given, side)
            error = (u.view(torch.bfloat16).double() - expected).abs().max()
            if not error <= CLOSE:  # also where it is NaN
                wrong.append(f"{p} {s}: {float(error):.1e}")
    return wrong


@needs_amx
def test_prepared_weights_are_those_of_float64() -> None:
    assert in_process("test_amx_prepare:run_shapes") == []

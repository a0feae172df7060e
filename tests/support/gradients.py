"""Masks and prepared weights, judged by autograd and float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from tilewise.bench.guarded import launch_guarded
from tilewise.core import Problem, Schedule, Target
from tilewise.kernels.cpu.between.masks import make_pack, make_unpack, unpack_scratch
from tilewise.kernels.cpu.conv.winograd_geometry import Geometry
from tilewise.kernels.cpu.emit.launch import launcher
from tilewise.kernels.cpu.prepare import winograd as winograd_prepare
from tilewise.kernels.cpu.prepare.mirrored import mirror
from tilewise.runtime import masks

from . import harness
from .harness import GENERATED, Mismatch


def torch_tail(p: Problem, sums: torch.Tensor, grad: torch.Tensor) -> tuple[Any, Any]:
    """ReLU and pooling by torch: the result, and where its gradient goes."""
    sums = sums.contiguous().requires_grad_()
    y = sums if p.epilogue.activation is None else sums.relu()
    y = F.max_pool2d(y, 2) if p.epilogue.pool == 2 and p.n else y
    y = y.view(p.n, p.k, p.out_h, p.out_w) if p.n else sums.new_zeros(0, p.k, p.out_h, p.out_w)
    spread, = torch.autograd.grad(y, sums, grad) if p.n else (torch.zeros_like(sums),)
    return y.detach(), spread


def unpacked(mask: torch.Tensor, channels: int, lanes: int) -> torch.Tensor:
    """The bits as (N, K, H, W); a byte has at most as many as a vector has lanes."""
    bits = mask[..., None] >> torch.arange(min(8, lanes), dtype=torch.uint8) & 1
    return bits.flatten(-2)[..., :channels].permute(0, 3, 1, 2).bool()


def demand(condition: bool, what: str) -> None:
    if not condition:
        raise Mismatch(what)


def pack_guarded(p: Problem, t: Target, sums: torch.Tensor,
                 side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`masks.pack` with every buffer at an unmapped page."""
    p = masks._bare(p)
    found = launch_guarded(
        launcher(make_pack, p, Schedule(), t.row), {"x": harness.laid_out(sums, p)},
        {"y": p.n * p.out_h * p.out_w * p.k, "mask": masks.empty(p, t).numel()}, p.n, t.threads,
        side)
    return (found["y"].view(p.n, p.out_h, p.out_w, p.k).permute(0, 3, 1, 2),
            found["mask"].view(masks.shape(p, t)))


def unpack_guarded(p: Problem, t: Target, grad: torch.Tensor, mask: torch.Tensor,
                   side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`masks.unpack` with every buffer at an unmapped page."""
    p = masks._bare(p)
    found = launch_guarded(
        launcher(make_unpack, p, Schedule(), t.row),
        {"x": harness.laid_out(grad, p), "mask": mask.flatten()},
        {"y": p.n * p.conv_h * p.conv_w * p.k, "bias": p.k, "scratch": unpack_scratch(p, t.lanes)},
        p.n, t.threads, side)
    return found["y"].view(p.n, p.conv_h, p.conv_w, p.k).permute(0, 3, 1, 2), found["bias"]


def check_pack(p: Problem, t: Target, seed: int) -> None:
    """Integers have ties, which go to the first; floats have none."""
    rng = torch.Generator().manual_seed(seed)
    for kind, side in (("integers", "end"), ("floats", "start")):
        shapes = (p.n, p.k, p.conv_h, p.conv_w), (p.n, p.k, p.out_h, p.out_w)
        sums, grad = (torch.randint(-2, 3, shape, generator=rng).float() if kind == "integers"
                      else torch.randn(shape, generator=rng) for shape in shapes)
        y, mask = pack_guarded(p, t, sums, side)
        expected, spread = torch_tail(p, sums, grad)
        demand(torch.equal(y, expected), f"{kind}: results differ")
        check_unpack(p, t, grad, mask, spread, side)
        ones = torch_tail(p, sums, torch.ones_like(grad))[1].bool()
        demand(torch.equal(unpacked(mask, p.k, t.lanes), ones), f"{kind}: bits differ")


def check_unpack(p: Problem, t: Target, grad: torch.Tensor, mask: torch.Tensor,
                 spread: torch.Tensor, side: str) -> None:
    """A gradient behind the mask, and its sum: short sums in float32 against float64."""
    found, bias = unpack_guarded(p, t, grad, mask, side)
    demand(torch.equal(found, spread), "gradients differ")
    sums = spread.double().sum((0, 2, 3))
    terms = spread.double().abs().sum((0, 2, 3))
    bound = 2.0**-24 * (p.conv_w + p.conv_h + p.n) * terms
    demand(bool(((bias.double() - sums).abs() <= bound).all()), "gradients of the bias differ")


def check_fused_mask(p: Problem, t: Target, s: Schedule, seed: int) -> None:
    """The mask of a kernel against torch's autograd on the same kernel's sums.

    Weights are prepared without code of ours, which other tests compare with this definition.
    """
    a = GENERATED["cpu_winograd"]
    bare = p.with_(epilogue=replace(p.epilogue, activation=None, pool=1, mask=False))
    for kind, side in (("integers", "end"), ("floats", "start")):
        o = harness.operands(p, kind, seed)
        prepared = exact_u(p, s, t.lanes, o.weight)
        y, mask = harness.run_masked(a, p, t, s, o, prepared, side)
        sums = harness.run(a, bare, t, s, o, prepared, side)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed))
        expected, spread = torch_tail(p, sums, grad)
        if p.epilogue.bias and p.epilogue.residual and p.epilogue.pool > 1:
            # the kernel adds the bias after pooling and so last: other roundings, other ties
            demand(torch.allclose(y, expected, rtol=1e-5, atol=1e-5), f"{kind}: results differ")
            continue
        demand(torch.equal(y, expected), f"{kind}: results differ")
        bits = unpacked(mask, p.k, t.lanes)
        torchs = torch_tail(p, sums, torch.ones_like(grad))[1].bool()
        # windows are compared before the bias is added: where its rounding makes values equal,
        # the gradient may go to another one of them
        wrong = bits != torchs
        demand(not (wrong & ~_tied(p, sums)).any(), f"{kind}: bits differ")
        demand(torch.equal(_a_window(p, bits), _a_window(p, torchs)),
               f"{kind}: windows pass a gradient not once")
        if not wrong.any():
            check_unpack(p, t, grad, mask, spread, side)


def _a_window(p: Problem, bits: torch.Tensor) -> torch.Tensor:
    """How many bits a window has."""
    size = p.epilogue.pool
    return F.avg_pool2d(bits.float(), size) * size**2 if size > 1 and p.n else bits


def _tied(p: Problem, sums: torch.Tensor) -> torch.Tensor:
    """Values as large as the largest of their window."""
    if p.epilogue.pool == 1 or not p.n:
        return torch.zeros_like(sums, dtype=torch.bool)
    largest = F.max_pool2d(sums, 2).repeat_interleave(2, 2).repeat_interleave(2, 3)
    return sums == F.pad(largest, (0, p.conv_w % 2, 0, p.conv_h % 2), value=float("nan"))


def exact_u(p: Problem, s: Any, lanes: int, weight: torch.Tensor) -> torch.Tensor:
    """U by its definition in float64, in the order of the kernel's panels."""
    g: Any = Geometry(p, s, lanes)
    down, across = (torch.tensor([[float(v) for v in row] for row in matrix], dtype=torch.float64)
                    for matrix in (g.down.G, g.across.G))
    u = torch.einsum("ir,kcrs,js->ijck", down, weight.double(), across).float()
    u = F.pad(u.reshape(g.positions, p.c, p.k), (0, g.k_vectors * lanes - p.k, 0, g.depth - p.c))
    blocks = [u[..., first:first + g.block_k] for first in range(0, u.shape[-1], g.block_k)]
    if s.order == "channels":
        return torch.cat([block.flatten() for block in blocks])
    return torch.cat([block.flatten(1) for block in blocks], 1).flatten()


def _strided(weight: torch.Tensor, how: str) -> torch.Tensor:
    """The same values with other strides."""
    if how == "mirrored":
        return mirror(weight, 1).contiguous().transpose(0, 1).flip(2, 3)
    orders = {"contiguous": (0, 1, 2, 3), "channels_last": (0, 2, 3, 1), "turned": (1, 0, 3, 2),
              "taps_first": (2, 3, 0, 1)}
    order = orders[how]
    back = [order.index(i) for i in range(4)]
    return weight.permute(order).contiguous().permute(back)


def check_prepared(p: Problem, t: Target, s: Schedule, how: str, seed: int) -> None:
    weight = torch.randn(p.k, p.c, p.r, p.s, generator=torch.Generator().manual_seed(seed))
    given = _strided(weight, how)
    expected = exact_u(p, s, t.lanes, weight)
    values = given.as_strided((given.numel(),), (1,), 0)  # as they lie in memory
    for side in ("start", "end"):
        u = launch_guarded(winograd_prepare.launch_for(winograd_prepare.make,
                                                      Geometry(p, s, t.lanes), t.row),
                           {"x": torch.tensor(given.stride()), "weight": values},
                           {"y": Geometry(p, s, t.lanes).weight_floats}, 1, t.threads, side)["y"]
        # rounded once; sums of a few terms in float64 may round the other way
        error = (u.double() - expected.double()).abs()
        demand(bool((error <= 2.0**-23 * expected.abs().double() + 1e-14).all()),
               f"U differs by {float(error.max()):.1e}")

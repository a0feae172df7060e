"""PyTorch's own convolution: always a candidate, so that nothing is slower than it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..core.algorithm import Algorithm, accumulation_error, split_error
from ..core.cost import traffic
from ..core.gpu import GPUS
from ..core.problem import DIRECTIONS, Problem
from ..core.schedule import Schedule
from ..core.target import Target
from ..kernels.matrix import DEPTH, joins_taps
from .common import HALVES, no_grid, no_pitch

# bytes from which a result is memory that the system clears first, and how long that takes beside
# writing it: with huge pages
FRESH, CLEARED = 8 << 20, 0.25
WIDENING = 1.6  # times as long a byte as float32, where torch has to widen 16 bits
# times its float32 that torch reaches with bfloat16 on a unit, in layers that our kernel for it is
# not made for; in others a step of torch's between ours costs what it gains
GROUPED, DENSE = 1.7, 2.7
FEW = 3  # rows up to which torch multiplies without packing the weight


class Vendor(Algorithm):
    """Whatever torch runs: oneDNN on x86, cuDNN on NVIDIA."""

    name = "vendor"
    device = None
    directions = frozenset(DIRECTIONS)
    fuses = frozenset({"bias"})
    layouts = frozenset({"nhwc", "nchw"})
    baseline = True
    takes = "tensors"

    def reject(self, p: Problem, t: Target) -> list[str]:
        return no_grid(p) + no_pitch(p)

    def error(self, p: Problem, t: Target, s: Schedule) -> float:
        tf32 = p.dtype == "f32" and t.isa in GPUS and GPUS[t.isa].tf32 > 0  # cuDNN's default
        return accumulation_error(p.terms, p.dtype) + (1.5 * 2.0 ** -10 if tf32 else 0.0)

    def error_as_set(self, p: Problem, t: Target, s: Schedule) -> float:
        return self.error(p, t, s) + max(_lowered(p, t), default=0.0)

    def cost(self, p: Problem, t: Target, s: Schedule) -> float:
        if t.isa in GPUS:
            return _gpu_cost(p, t)
        if _is_product(p):
            return _product_cost(p, t)
        # filters that are large, or far apart, see much padding, which oneDNN leaves out
        compute = p.flops * p.share_inside / (t.peak * _efficiency(p, t))
        # it packs weights anew in every call
        memory = traffic(t, p.image_bytes + 2 * p.weight_bytes) + p.weight_bytes / t.flow
        turned = _turned(p, t) / t.hertz / t.threads
        result = 4 * math.prod(p.result_shape)
        fresh = CLEARED * result / t.flow if result >= FRESH else 0.0
        return 18e-6 + max(compute, memory) + 0.3 * min(compute, memory) + turned + fresh

    def prepare(self, p: Problem, t: Target, s: Schedule, weight: Any) -> Any:
        return weight.contiguous(memory_format=_layout(p))

    def build(self, p: Problem, t: Target, s: Schedule) -> Any:
        if _is_product(p):
            return _product()
        return {"forward": _forward, "backward_data": _backward_data,
                "backward_weight": _backward_weight}[p.direction](p)


def _is_product(p: Problem) -> bool:
    """Whether torch's linear layer is what it runs."""
    return p.is_linear and p.direction == "forward"


def _product_cost(p: Problem, t: Target) -> float:
    """It reads the weight, for more than a few rows also writes it packed and reads that."""
    slower = 1.0 if p.dtype not in HALVES else WIDENING
    compute = slower * p.flops / t.peak
    memory = slower * p.weight_bytes / t.flow * (1 if p.n <= FEW else 3)
    return 5e-6 + max(compute, memory) + 0.3 * min(compute, memory)


def _product() -> Any:
    from torch.nn import functional as F

    def run(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
        return F.linear(x.flatten(1), weight.flatten(1), bias)[:, :, None, None]

    return run


def _lowered(p: Problem, t: Target) -> list[float]:
    """What each of torch's settings for CPUs that is in force adds to the error of float32."""
    if p.dtype != "f32" or t.device != "cpu":
        return []
    import torch

    from ..kernels.precision import lowered

    has_tf32 = getattr(torch.cpu, "_is_amx_fp16_supported", lambda: False)()
    added = {"bf16": split_error(1, max(1, p.terms)), "tf32": 1.5 * 2.0 ** -10 if has_tf32 else 0.0}
    # small convolutions are products of matrices too
    kinds = ("matmul",) if _is_product(p) else ("conv", "matmul")
    return [added[value] for kind, value in lowered().items() if kind in kinds]


def _layout(p: Problem) -> Any:
    import torch

    return torch.channels_last if p.layout == "nhwc" else torch.contiguous_format


def _is_even(p: Problem) -> bool:
    """Whether torch can do the padding."""
    top, bottom, left, right = p.padding
    return top == bottom and left == right


def _padded(p: Problem, x: Any) -> Any:
    from torch.nn import functional as F

    top, bottom, left, right = p.padding
    return x if _is_even(p) else F.pad(x, (left, right, top, bottom))


def _forward(p: Problem) -> Any:
    from torch.nn import functional as F

    padding = (p.padding[0], p.padding[2]) if _is_even(p) else (0, 0)
    layout = _layout(p)

    def run(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
        y = F.conv2d(_padded(p, x), weight, bias, p.stride, padding, p.dilation, p.groups)
        return y.contiguous(memory_format=layout)

    return run


def _gradient(p: Problem, grad: Any, x: Any, weight: Any, which: int) -> Any:
    """torch's gradient of the input (0) or of the weight (1)."""
    import torch

    padding = (p.padding[0], p.padding[2]) if _is_even(p) else (0, 0)
    wanted = [which == i for i in range(3)]
    return torch.ops.aten.convolution_backward(
        grad, x, weight, None, p.stride, padding, p.dilation, False, (0, 0), p.groups,
        wanted)[which]


def _backward_data(p: Problem) -> Any:
    return _transposed(p) if _is_even(p) else _gradient_of_padded(p)


def _transposed(p: Problem) -> Any:
    """As a transposed convolution: torch has faster kernels for it than for a gradient."""
    from torch.nn import functional as F

    padding, layout = (p.padding[0], p.padding[2]), _layout(p)
    more = (p.padded_h - (p.conv_h - 1) * p.stride[0] - p.span_h,
            p.padded_w - (p.conv_w - 1) * p.stride[1] - p.span_w)

    def run(grad: Any, weight: Any, bias: Any, residual: Any) -> Any:
        dx = F.conv_transpose2d(grad, weight, bias, p.stride, padding, more, p.groups, p.dilation)
        return dx.contiguous(memory_format=layout)

    return run


def _gradient_of_padded(p: Problem) -> Any:
    top, _, left, _ = p.padding
    layout = _layout(p)

    def run(grad: Any, weight: Any, bias: Any, residual: Any) -> Any:
        shape = (grad.shape[0], p.c, p.padded_h, p.padded_w)
        like = grad.new_empty(shape).contiguous(memory_format=layout)  # only its shape is read
        dx = _gradient(p, grad, like, weight, 0)
        inside = dx[..., top:top + p.h, left:left + p.w]
        if bias is not None:  # of a transposed convolution
            inside = inside + bias[:, None, None]
        return inside.contiguous(memory_format=layout)

    return run


def of_seen_pixels(p: Problem, x: Any) -> tuple[Problem, Any]:
    """A strided 1x1 filter as a dense one, and the pixels of x that it sees; others as they are.

    torch 2.13 writes beyond its memory in the weight's gradient of a strided one.
    """
    if not skips_pixels((p.r, p.s), p.stride):
        return p, x
    dense = p.with_(h=p.conv_h, w=p.conv_w, stride=(1, 1), padding=(0, 0, 0, 0))
    return dense, seen_pixels(x, p.stride, p.padding).contiguous(memory_format=_layout(p))


def skips_pixels(taps: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a filter is one tap that sees some pixels only, of images or of volumes."""
    return max(taps) == 1 and max(stride) > 1


def seen_pixels(x: Any, stride: Sequence[int], padding: Sequence[int]) -> Any:
    """The pixels that one tap sees; padding before and behind, axis by axis."""
    from torch.nn import functional as F

    axes = [padding[i:i + 2] for i in range(0, len(padding), 2)]
    wide = F.pad(x, [side for sides in reversed(axes) for side in sides])
    seen = (..., *(slice(None, None, step) for step in stride))
    return wide[seen]


def _backward_weight(p: Problem) -> Any:
    layout = _layout(p)

    def run(x: Any, grad: Any, bias: Any, residual: Any) -> Any:
        shape = (p.k, p.group_c, p.r, p.s)
        like = grad.new_empty(shape).contiguous(memory_format=layout)
        q, seen = of_seen_pixels(p, x)
        return _gradient(q, grad, _padded(q, seen), like, 1)

    return run


def _gpu_cost(p: Problem, t: Target) -> float:
    """Assumed: three quarters of the published limits, as good libraries reach on large layers."""
    row = GPUS[t.isa]
    limit = row.flops(p.dtype, "tf32" if row.tf32 else "ieee") * (0.75 if p.groups == 1 else 0.2)
    compute, memory = p.flops / limit, traffic(t, p.bytes)
    return 10e-6 + max(compute, memory) + 0.3 * min(compute, memory)


def _turned(p: Problem, t: Target) -> float:
    """Cycles to turn planes, which few of its kernels take, into blocks of channels and back."""
    if p.layout == "nhwc" or p.dtype != "f32":
        return 0.0
    images = 0 if (p.r, p.s) == (1, 1) else p.input_bytes + p.output_bytes
    return (images + 2.0 * max(0, p.weight_bytes - t.l2)) / 4


def _efficiency(p: Problem, t: Target) -> float:
    """Share of the multiply-add limit that torch was seen to reach (benchmarks/planner.py)."""
    if p.dtype == "bf16" and t.device == "cpu" and t.row.reads_bf16 and not _is_for_unit(p):
        times = 1.0 if p.group_c == 1 and p.groups > 1 else GROUPED if p.groups > 1 else DENSE
        return times * _efficiency(p.with_(dtype="f32"), t)
    if p.dtype != "f32" or t.device == "cuda":
        return 0.05 if p.dtype in HALVES else 0.1  # it widens them, value by value
    if p.group_c == 1 and p.groups > 1 and p.group_k > 1:
        return 0.012  # it has no kernel for several filters a channel
    if p.group_c == 1 and p.groups > 1:
        forward = min(0.35, 0.013 * p.r * p.s)
        return min(0.02, forward) if p.direction == "backward_weight" else forward
    reads, writes = _channels(p)
    full = writes / t.lanes / math.ceil(writes / t.lanes)  # lanes that have an output
    if reads < 4:
        return min(0.65, 0.0185 * reads * p.r * p.s) * full
    if p.groups > 1:
        return (0.45 if p.direction == "backward_weight" else 0.6) * full
    return (0.6 if reads < t.lanes else 0.82) * full * _share(p)


def _is_for_unit(p: Problem) -> bool:
    """Whether our kernel fills at least half of the unit's depth."""
    return p.groups == 1 and p.direction != "backward_weight" and (
        2 * _channels(p)[0] >= DEPTH or joins_taps(p))


def _channels(p: Problem) -> tuple[int, int]:
    """Of a group: those it reads and those it writes."""
    return (p.group_k, p.group_c) if p.direction == "backward_data" else (p.group_c, p.group_k)


def _share(p: Problem) -> float:
    """What is left of it in gradients (benchmarks/gradients.py, benchmarks/transposed.py)."""
    dense = p.stride == (1, 1)
    return {"forward": 1.0, "backward_data": 1.0 if dense else 0.75,
            "backward_weight": 0.7 if dense else 0.45}[p.direction]

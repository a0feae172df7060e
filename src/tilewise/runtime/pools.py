"""Pools of channels-last tensors, with the arguments of torch's functions.

Each returns None where torch is to compute: other types, devices or layouts, gradients, arguments
that torch refuses. `out` may be a slice of the channels of a larger result.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..core.schedule import Schedule
from ..core.target import Target
from ..kernels.cpu.between import pools
from ..kernels.cpu.between.pools import AVERAGE, LENGTH, MAX, MEAN, Line
from ..kernels.cpu.emit.launch import launcher
from ..kernels.cpu.emit.tiling import ceil_div
from .sweeps import ALONE, Images, Sweep, after, as_tuple, run, sweep
from .windows import Windows, adaptive, each, stretches, whole

Pair = int | Sequence[int]
Size = int | Sequence[int | None]
WORTH = 1 << 14  # floats to read that are worth a task
LARGE = 64  # values of a window that are worth a sum in float64
UNROLLED = 9  # values of a window that are all loaded at once
TASKS = 2  # for every thread, where channels are shared out as well


def max_pool2d(x: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0,
               dilation: Pair = 1, ceil_mode: bool = False, *,
               out: Tensor | None = None) -> Tensor | None:
    """torch.nn.functional.max_pool2d, without indices."""
    return run(_max, x, out, as_tuple(kernel_size), as_tuple(stride), as_tuple(padding),
               as_tuple(dilation), ceil_mode)


def avg_pool2d(x: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0,
               ceil_mode: bool = False, count_include_pad: bool = True,
               divisor_override: int | None = None, *, out: Tensor | None = None) -> Tensor | None:
    """torch.nn.functional.avg_pool2d."""
    return run(_average, x, out, as_tuple(kernel_size), as_tuple(stride), as_tuple(padding),
               ceil_mode, count_include_pad, divisor_override)


def adaptive_avg_pool2d(x: Tensor, output_size: Size, *,
                        out: Tensor | None = None) -> Tensor | None:
    """torch.nn.functional.adaptive_avg_pool2d."""
    return run(_adaptive, x, out, AVERAGE, as_tuple(output_size))


def adaptive_max_pool2d(x: Tensor, output_size: Size, *,
                        out: Tensor | None = None) -> Tensor | None:
    """torch.nn.functional.adaptive_max_pool2d, without indices."""
    return run(_adaptive, x, out, MAX, as_tuple(output_size))


def global_average(x: Tensor, keepdim: bool = True, *, out: Tensor | None = None) -> Tensor | None:
    """x.mean((2, 3), keepdim); `out` has four axes in any case."""
    y = run(_global, x, out, not keepdim)
    return y if keepdim or y is None or out is None else y[:, :, 0, 0]


def global_sum(x: Tensor, keepdim: bool = True) -> Tensor | None:
    """x.sum((2, 3), keepdim)."""
    return run(_global, x, None, not keepdim, 1)


def global_length(x: Tensor, keepdim: bool = True) -> Tensor | None:
    """x.norm(2, (2, 3), keepdim)."""
    return run(_length, x, None, not keepdim)


def global_largest(x: Tensor, keepdim: bool = True) -> Tensor | None:
    """x.amax((2, 3), keepdim)."""
    y = run(_adaptive, x, None, MAX, (1, 1))
    return y if keepdim or y is None else y[:, :, 0, 0]


def _max(x: Images, kernel_size: Pair, stride: Pair | None, padding: Pair, dilation: Pair,
         ceil_mode: bool) -> Sweep | None:
    taps, before, holes = map(two, (kernel_size, padding, dilation))
    between = taps if stride in (None, ()) else two(stride)
    rows, columns = (Windows(taps[i], between[i], before[i], holes[i], ceil_mode).lines(size)
                     for i, size in enumerate((x.h, x.w)))
    return (_in_two_steps(x, rows, columns, holes, taps)
            or _pool(x, MAX, rows, columns, holes, taps=taps))


def _in_two_steps(x: Images, rows: list[Line], columns: list[Line],
                  holes: tuple[int, int], taps: tuple[int, int]) -> Sweep | None:
    """The largest down, and of those across, where that reads half as much or less."""
    down, across = (sum(line.taps for line in lines) for lines in (rows, columns))
    if 2 * (down * x.w + len(rows) * across) > down * across or (
            x.n * x.c * down * across <= ALONE):
        return None
    first = _pool(x._replace(to=x.c), MAX, rows, each(x.w), holes, taps=(taps[0], 1))
    second = _pool(x._replace(h=len(rows), pitch=x.c), MAX, each(len(rows)), columns, holes,
                   taps=(1, taps[1]))
    return first and second and after(first, second)


def _average(x: Images, kernel_size: Pair, stride: Pair | None, padding: Pair, ceil_mode: bool,
             count_include_pad: bool, divisor: int | None) -> Sweep | None:
    taps, before = map(two, (kernel_size, padding))
    between = taps if stride in (None, ()) else two(stride)
    rows, columns = (
        Windows(taps[i], between[i], before[i], 1, ceil_mode, count_include_pad).lines(size)
        for i, size in enumerate((x.h, x.w)))
    if divisor is not None:
        rows = [line._replace(size=divisor) for line in rows]
        columns = [line._replace(size=1) for line in columns]
    return None if divisor == 0 else _pool(x, AVERAGE, rows, columns, taps=taps)


def _adaptive(x: Images, kind: int, output_size: Size) -> Sweep | None:
    sizes = (output_size,) * 2 if isinstance(output_size, int) else tuple(output_size or ())
    if len(sizes) != 2:
        return None
    h, w = (there if size is None else size for size, there in zip(sizes, (x.h, x.w)))
    if (h, w, kind) == (1, 1, AVERAGE):
        return _global(x, False)
    return _pool(x, kind, adaptive(x.h, h), adaptive(x.w, w)) if min(h, w) > 0 else None


def _global(x: Images, flat: bool, divisor: int = 0) -> Sweep | None:
    """The mean of all pixels; where channels are few, rows are shared out and added up first."""
    row, divisor = x._replace(h=1, w=x.h * x.w), divisor or x.h * x.w
    mean = _pool(row, MEAN, whole(1, 1), whole(row.w, divisor), flat=flat)
    vectors, parts = x.n * ceil_div(x.c, Target.host().lanes), min(x.h, TASKS * x.threads)
    if mean is None or mean.threads == 1 or vectors >= x.threads or parts == 1 or (
            x.dtype != "f32"):  # sums in between would be rounded
        return mean
    sums = _pool(x._replace(to=x.c), MEAN, stretches(x.h, parts), whole(x.w, 1))
    mean = _pool(x._replace(h=1, w=parts, pitch=x.c), MEAN, whole(1, 1), whole(parts, divisor),
                 flat=flat)
    return mean and sums and after(sums, mean)


def _length(x: Images, flat: bool) -> Sweep | None:
    """The root of the sum of all squares."""
    row = x._replace(h=1, w=x.h * x.w)
    return _pool(row, LENGTH, whole(1, 1), whole(row.w, 1), flat=flat)


def two(value: Pair | None) -> tuple[int, int]:
    """Down and across; what is neither one number nor two is none that torch takes."""
    both = (value,) if isinstance(value, int) else tuple(value or ())
    return (both[0], both[-1]) if len(both) in (1, 2) else (-1, -1)


def _pool(x: Images, kind: int, rows: list[Line], columns: list[Line],
          holes: tuple[int, int] = (1, 1), flat: bool = False,
          taps: tuple[int, int] | None = None) -> Sweep | None:
    """None where there is no result; `taps` of all windows inside, the largest if not given."""
    if not (rows and columns):
        return None
    most = max(line.taps for line in rows), max(line.taps for line in columns)
    taps = taps or most  # those of the layer: small images need no code of their own
    if kind == AVERAGE and most[0] * most[1] >= LARGE:
        kind = MEAN
    if kind in (MEAN, LENGTH) or 0 in taps or taps[0] * taps[1] > UNROLLED:
        taps = 0, 0  # in a loop
    work = x.n * x.c * sum(line.taps for line in rows) * sum(line.taps for line in columns)
    launch = launcher(pools.make, x.code, Schedule(), Target.host().row, kind, *taps,
                      sizes=words(x, len(rows), len(columns), holes, work))
    table = pools.table(apart(rows, x.w * x.pitch), apart(columns, x.pitch))
    return sweep(launch, table, (x.n, x.c, len(rows), len(columns)),
                 x.threads if work > ALONE else 1, flat, x.dtype)


def apart(lines: list[Line], step: int) -> list[Line]:
    """Lines with so many floats between them."""
    return [line._replace(first=line.first * step) for line in lines]


def words(x: Images, out_h: int, out_w: int, holes: tuple[int, int], work: int) -> list[int]:
    """The words of the kernel's frame: what is where, and what is a task's."""
    rows = min(out_h, max(1, WORTH * x.n * out_h // max(1, work)))
    row_tasks, vectors = ceil_div(out_h, rows), ceil_div(x.c, Target.host().lanes)
    # where rows are fewer than threads, channels are shared out too
    groups = min(vectors, ceil_div(TASKS * x.threads, x.n * row_tasks), max(1, work // WORTH))
    group = ceil_div(vectors, groups) * Target.host().lanes
    return [x.h * x.w * x.pitch, out_h * out_w * x.to, out_w * x.to, x.to,
            holes[0] * x.w * x.pitch, holes[1] * x.pitch, out_h, out_w, x.c, rows, row_tasks,
            group, ceil_div(x.c, group)]

"""Gradients of random training blocks against float64: what optimize makes of them, two steps each.

    python benchmarks/training_blocks.py                         # 1,000 blocks
    python benchmarks/training_blocks.py --seeds 4000 4050       # some others
    python benchmarks/training_blocks.py --seeds 17 18 --show    # one of them, as a module

A block is a convolution, a norm in training mode, a residual, an activation, and then a pool, an
upsampling, a concatenation or squeeze and excitation, each as it is drawn; a second convolution
often follows. Results, statistics, gradients and gradients of gradients are compared with those of
the same module in float64. Ours may be TIMES as far from them as torch's in float32, or FLOOR.

Values that rounding could push over an edge of an activation, or past another value of a window,
are drawn again: there float32 has no right answer. Between the two steps the parameters change, as
by an optimizer. Memory that kernels write to is full of NaN before.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import multiprocessing
import random
import shlex
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise
from tilewise.bench import machine
from tilewise.bench.results import Result
from tilewise.kernels.cpu import memory
from tilewise.tools.sharing import noted

TIMES = 10  # our error against float64 to torch's
FLOOR = 2e-5  # where torch happens to be closer; Winograd's transforms cost a few times its error
SMALL = 1e-2  # a gradient counts at least as so much of the largest, since some are only rounding
EDGE = 1e-4  # nearer to an edge than this, rounding decides
DIRECTIONS = ("forward", "backward_data", "backward_weight")
LAST = torch.channels_last

# what an activation is, and where its slope jumps
ACTIVATIONS: dict[str, tuple[Callable[[], nn.Module], tuple[float, ...]]] = {
    "none": (nn.Identity, ()), "relu": (nn.ReLU, (0,)), "relu6": (nn.ReLU6, (0, 6)),
    "leaky relu": (lambda: nn.LeakyReLU(0.1), (0,)), "silu": (nn.SiLU, ()),
    "hardswish": (nn.Hardswish, (-3, 3)), "gelu": (nn.GELU, ()), "elu": (nn.ELU, ()),
    "mish": (nn.Mish, ()), "sigmoid": (nn.Sigmoid, ()), "tanh": (nn.Tanh, ()),
    "hardsigmoid": (nn.Hardsigmoid, (-3, 3)), "prelu": (nn.PReLU, (0,))}
LIKELY = ("relu",) * 4 + ("silu", "hardswish", "relu6", "none") + tuple(ACTIVATIONS)
ONCE = ("hardsigmoid",)  # torch cannot differentiate its gradient
NORMS = ("batch norm",) * 4 + ("group norm", "instance norm", "no norm")
POOLS: dict[str, Callable[[], nn.Module]] = {
    "max pool 2x2": lambda: nn.MaxPool2d(2), "max pool 3x3": lambda: nn.MaxPool2d(3, 2, 1),
    "average pool 2x2": lambda: nn.AvgPool2d(2),
    "average pool 3x3": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "mean of images": lambda: nn.AdaptiveAvgPool2d(1),
    "nearest upsampling": lambda: nn.Upsample(scale_factor=2),
    "bilinear upsampling": lambda: nn.Upsample(scale_factor=2, mode="bilinear")}
AFTER = ("nothing",) * 3 + (*POOLS, "concatenation", "excitation")
FILTERS = ((3, 1), (3, 1), (3, 1), (1, 1), (1, 1), (3, 2), (1, 2), (5, 1), (7, 2))


class Block(nn.Module):
    """One that a seed draws."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.seed = seed
        self.n, c, k = rng.randint(1, 4), rng.choice((3, 8, 16, 24)), rng.choice((8, 16, 24, 40))
        h, w = rng.randint(6, 20), rng.randint(6, 20)
        (r, stride), groups = rng.choice(FILTERS), 1
        # torch writes beyond its memory for 1x1 filters with a stride on few channels-last channels
        c = c if stride == 1 else 16
        self.shape = (self.n, c, h, w)
        if rng.random() < 0.15 and r > 1:
            groups = k = c
        self.norm_name, self.after = rng.choice(NORMS), rng.choice(AFTER)
        self.activation_name = rng.choice(LIKELY)
        self.conv = nn.Conv2d(c, k, r, stride, r // 2, groups=groups, bias=rng.random() < 0.4)
        self.norm = _norm(self.norm_name, k, rng)
        self.with_residual = rng.random() < 0.4
        beside = self.with_residual and rng.random() < 0.5
        self.side = nn.Conv2d(c, k, 1, stride) if beside else None
        make, self.kinks = ACTIVATIONS[self.activation_name]
        self.activation = make()
        self._draw_after(rng, k)
        self._freeze(rng)

    def _draw_after(self, rng: random.Random, k: int) -> None:
        self.pool = POOLS[self.after]() if self.after in POOLS else None
        if self.after == "concatenation":
            self.other = nn.Conv2d(k, rng.choice((8, 12)), 3, padding=1)
            k += self.other.out_channels
        if self.after == "excitation":
            self.squeeze, self.excite = nn.Conv2d(k, 4, 1), nn.Conv2d(4, k, 1)
        self.last = nn.Conv2d(k, 8, rng.choice((1, 3)), padding="same") if rng.random() < 0.6 \
            else None

    def _freeze(self, rng: random.Random) -> None:
        """Some learn only in part: the images, the filter or the norm do not."""
        frozen = rng.choice(("nothing",) * 4 + ("images", "filter", "norm"))
        self.of_images = frozen != "images"
        for part in {"filter": [self.conv], "norm": [self.norm]}.get(frozen, []):
            part.requires_grad_(False)

    @property
    def parts(self) -> list[str]:
        """What it consists of, for the table."""
        return [self.norm_name, f"{self.activation_name} activation", self.after,
                *(["residual"] if self.with_residual else []),
                *(["depthwise"] if self.conv.groups > 1 else [])]

    @property
    def norm_is_torchs(self) -> bool:
        """Beside a lone convolution, instance norms stay torch's."""
        convolutions = sum(isinstance(part, nn.Conv2d) for part in self.modules())
        return self.norm_name == "instance norm" and convolutions == 1

    def images(self, step: int) -> list[Tensor]:
        """The images, and a residual where none is computed."""
        torch.manual_seed(self.seed * 1000 + step)
        shapes = [self.shape]
        if self.with_residual and self.side is None:
            stride, (_, _, h, w) = self.conv.stride[0], self.shape
            shapes.append((self.n, self.conv.out_channels, -(-h // stride), -(-w // stride)))
        return [_laid_out(torch.randn(shape), self.seed % 4 != 3) for shape in shapes]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self.norm(self.conv(x))
        if self.side is not None:
            y = y + self.side(x)
        elif residual is not None:
            y = y + residual
        y = self.activation(y)
        if self.pool is not None:
            y = self.pool(y)
        if self.after == "concatenation":
            y = torch.cat((y, self.other(y)), 1)
        if self.after == "excitation":
            mean = y.mean((2, 3), keepdim=True)
            y = y * torch.sigmoid(self.excite(F.silu(self.squeeze(mean))))
        return y if self.last is None else self.last(y)


def _norm(name: str, k: int, rng: random.Random) -> nn.Module:
    affine = rng.random() < 0.8
    if name == "no norm":
        return nn.Identity()
    if name == "group norm":
        return _spread(nn.GroupNorm(rng.choice([g for g in (1, 2, 4, 8) if k % g == 0]), k,
                                    affine=affine))
    if name == "instance norm":
        return _spread(nn.InstanceNorm2d(k, affine=affine))
    return _spread(nn.BatchNorm2d(k, affine=affine, momentum=rng.choice((0.1, 0.5, None)),
                                  eps=rng.choice((1e-5, 1e-3)),
                                  track_running_stats=rng.random() < 0.9))


def _spread(norm: Any) -> nn.Module:
    """Not ones and zeros, which hide faults."""
    if norm.affine:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, std=0.5)
    return norm


def _laid_out(x: Tensor, last: bool) -> Tensor:
    return x.contiguous(memory_format=LAST) if last else x


# what is asked of a block

Seen = dict[str, Tensor]


def step(block: Any, leaves: list[Tensor], dtype: torch.dtype, number: int, second: bool,
         of_images: bool, last: bool) -> Seen:
    """Result, gradients and statistics; and gradients of the squared gradients."""
    images = [x.to(dtype, copy=True).requires_grad_(of_images) for x in leaves]
    y = block(*images)
    torch.manual_seed(number)
    grad = _laid_out(torch.randn(y.shape).to(dtype), last and number == 0)
    wanted = {**{f"images {i}": x for i, x in enumerate(images) if of_images},
              **{name: p for name, p in block.named_parameters() if p.requires_grad}}
    first = torch.autograd.grad(y, list(wanted.values()), grad, retain_graph=second)
    seen = {"result": y.detach(), **_named("gradient of", wanted, first)}
    if second:  # by other code, which can be differentiated
        first = torch.autograd.grad(y, list(wanted.values()), grad, create_graph=True)
        seen |= _named("other gradient of", wanted, first)
        penalty = sum(g.square().sum() for g in first)
        again = torch.autograd.grad(penalty, list(wanted.values()), allow_unused=True,
                                    materialize_grads=True)
        seen |= _named("second gradient of", wanted, again)
    return seen | {f"buffer {name}": b.detach().clone() for name, b in block.named_buffers()}


def _named(what: str, wanted: dict[str, Tensor], found: tuple[Tensor, ...]) -> Seen:
    return {f"{what} {name}": g.detach() for name, g in zip(wanted, found, strict=True)}


@torch.no_grad()
def move(blocks: list[Any], number: int) -> None:
    """Other parameters for all, in place, as an optimizer leaves them."""
    parameters = [list(block.parameters()) for block in blocks]
    generator = torch.Generator().manual_seed(number)
    for group in zip(*parameters):
        size = group[0].square().mean().sqrt().clamp(0.05, 1).float()
        change = 0.2 * size * torch.randn(group[0].shape, generator=generator)
        for parameter in group:
            parameter.add_(change.to(parameter.dtype))


def decided(exact: Block, number: int) -> list[Tensor]:
    """Images of a step that rounding cannot push over an edge."""
    for attempt in range(50):
        leaves = exact.images(number + 2 * attempt)
        if nearest_edge(exact, leaves) > EDGE / (1 + attempt):
            return leaves
    raise RuntimeError(f"seed {exact.seed}: no images without values at an edge")


@torch.no_grad()
def nearest_edge(exact: Block, leaves: list[Tensor]) -> float:
    """How near any value comes to an edge; the block itself stays as it is."""
    trial, found = copy.deepcopy(exact), [float("inf")]

    def before_activation(_: nn.Module, given: tuple[Tensor]) -> None:
        found.extend(float((given[0] - kink).abs().min()) for kink in trial.kinks)

    def before_pool(pool: Any, given: tuple[Tensor]) -> None:
        found.append(_between_two(pool, given[0]))

    trial.activation.register_forward_pre_hook(before_activation)
    if isinstance(trial.pool, nn.MaxPool2d):
        trial.pool.register_forward_pre_hook(before_pool)
    trial(*(x.double() for x in leaves))
    return min(found)


def _between_two(pool: Any, x: Tensor) -> float:
    """From a window's largest value to its second, unless both were clipped."""
    wide = F.pad(x, (pool.padding,) * 4, value=-1e9)
    values = F.unfold(wide, pool.kernel_size, stride=pool.stride)
    two = values.view(x.shape[0], x.shape[1], pool.kernel_size ** 2, -1).topk(2, 2).values
    apart = two[:, :, 0] - two[:, :, 1]
    return float(apart[apart > 0].min()) if (apart > 0).any() else float("inf")


# the comparison


@dataclass
class Judged:
    """What a block did: its worst error, torch's beside it, and who ran it."""

    seed: int
    parts: list[str]
    what: str = ""
    ours: float = 0.0
    torchs: float = 0.0
    wrong: list[str] = field(default_factory=list)
    directions: tuple[str, ...] = ()


def judge(seed: int, second: bool = True) -> Judged:
    """Two steps of a block by optimize, by torch, and in float64."""
    plain = Block(seed).train()
    exact, ours = copy.deepcopy(plain).double(), tilewise.optimize(copy.deepcopy(plain))
    found = Judged(seed, plain.parts)
    second = second and plain.activation_name not in ONCE
    with noted() as plans, poisoned():
        for number in range(2):
            leaves = decided(exact, number)
            # torch gets all in planes: its instance norm misreads channels-last gradients
            planes = [x.contiguous() for x in leaves]
            expected, theirs, mine = (
                step(one, given, dtype, number, second, plain.of_images, given is leaves)
                for one, given, dtype in ((exact, planes, torch.float64),
                                          (plain, planes, torch.float32),
                                          (ours, planes if plain.norm_is_torchs else leaves,
                                           torch.float32)))
            compare(found, number, mine, theirs, expected)
            move([exact, plain, ours], seed)
    found.directions = tuple(d for d in DIRECTIONS if any(
        plan.problem.direction == d and plan.algorithm != "vendor" for plan in plans))
    return found


def compare(found: Judged, number: int, mine: Seen, theirs: Seen, expected: Seen) -> None:
    if mine.keys() != expected.keys():
        found.wrong.append(f"step {number} has {sorted(mine.keys() ^ expected.keys())} on one side")
    for name in mine.keys() & expected.keys():
        scale = _scale(name, expected)
        ours, torchs = (_apart(side[name], expected[name], scale) for side in (mine, theirs))
        if ours > found.ours and not name.startswith("second"):
            found.what, found.ours, found.torchs = name, ours, torchs
        limit = max(FLOOR * (5 if name.startswith("second") else 1), TIMES * torchs)
        if not ours <= limit:  # nor where it is not a number
            found.wrong.append(f"step {number}: {name} is off by {ours:.1e}, torch's by "
                               f"{torchs:.1e}")


def _scale(name: str, expected: Seen) -> float:
    """Mean square of a result; of gradients at least a share of the largest of their kind."""
    kind = name.partition(" of ")[0] if " of " in name else None
    largest = max((_rms(value) for other, value in expected.items()
                   if kind and other.startswith(kind)), default=0.0)
    return max(_rms(expected[name]), SMALL * largest, 1e-30)


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def _apart(found: Tensor, expected: Tensor, scale: float) -> float:
    if found.shape != expected.shape:
        return float("inf")
    return _rms(found.double() - expected.double()) / scale


@contextmanager
def poisoned() -> Iterator[None]:
    """What a kernel forgets to write is seen."""
    empty = memory.empty
    with patch.object(memory, "empty",
                      lambda *shape, **kind: empty(*shape, **kind).fill_(torch.nan)):
        yield


# the command


def rows(judged: list[Judged]) -> list[dict[str, Any]]:
    """A row a part of blocks, and one for all."""
    names = sorted({part for one in judged for part in one.parts})
    groups = {"all": judged, **{name: [j for j in judged if name in j.parts] for name in names}}
    return [{"part": name, "blocks": len(some), "wrong": sum(bool(j.wrong) for j in some),
             "ours": max(j.ours for j in some), "torch": max(j.torchs for j in some),
             "all_directions": sum(len(j.directions) == 3 for j in some)}
            for name, some in groups.items()]


def save(path: Path, args: argparse.Namespace, judged: list[Judged]) -> None:
    settings = {"times": TIMES, "floor": FLOOR, "edge": EDGE, "seeds": args.seeds}
    Result("training-blocks", shlex.join(["python", *sys.argv]), datetime.date.today().isoformat(),
           machine.facts(torch.get_num_threads(), limits=False), settings,
           rows(judged)).save(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 1000), metavar=("FIRST", "END"))
    parser.add_argument("--show", action="store_true", help="print the modules, too")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, help="a result file to write")
    args = parser.parse_args()
    if args.show:
        print(*map(Block, range(*args.seeds)), sep="\n")
    judged = []
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        for one in pool.map(judge, range(*args.seeds)):
            judged.append(one)
            for wrong in one.wrong:
                print(f"seed {one.seed} ({', '.join(one.parts)}): {wrong}", flush=True)
            if len(judged) % 100 == 0:
                print(f"{len(judged)} blocks", file=sys.stderr, flush=True)
    for row in rows(judged):
        print(f"{row['part']:24} {row['blocks']:5} blocks, {row['wrong']} wrong, worst error "
              f"{row['ours']:.1e} (torch {row['torch']:.1e}), {row['all_directions']} with plans "
              "of ours in all directions")
    if args.output:
        save(args.output, args, judged)
    return int(any(one.wrong for one in judged))


if __name__ == "__main__":
    sys.exit(main())

"""Pools and resampling of tensors: torch's results, layouts that are ours, and those that are not.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.images import require_same, sliced
from torch import Tensor
from torch.nn import functional as F

from tilewise.runtime import pools, sweeps
from tilewise.runtime.resampling import upsample

LAST = torch.channels_last
SINGLES = [(1, 5, 6, 7), (3, 1, 6, 7), (3, 5, 1, 1), (1, 5, 1, 1), (1, 1, 1, 1), (2, 1, 1, 1),
           (1, 5, 6, 1), (1, 5, 1, 7), (2, 5, 6, 1), (2, 5, 1, 7), (1, 1, 6, 1), (1, 1, 1, 7)]
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "max": (lambda x, **o: pools.max_pool2d(x, 1, 1, **o), lambda x: F.max_pool2d(x, 1, 1)),
    "average": (lambda x, **o: pools.avg_pool2d(x, 1, 1, **o), lambda x: F.avg_pool2d(x, 1, 1)),
    "adaptive": (lambda x, **o: pools.adaptive_avg_pool2d(x, 2, **o),
                 lambda x: F.adaptive_avg_pool2d(x, 2)),
    "global": (pools.global_average, lambda x: x.mean((2, 3), keepdim=True)),
    "nearest": (lambda x, **o: upsample(x, scale_factor=2, **o),
                lambda x: F.interpolate(x, scale_factor=2)),
    "bilinear": (lambda x, **o: upsample(x, (3, 5), mode="bilinear", **o),
                 lambda x: F.interpolate(x, (3, 5), mode="bilinear")),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    sweeps._known.clear()
    yield
    sweeps._known.clear()


def images(generator: random.Random, shape: tuple[int, ...]) -> Tensor:
    seeded = torch.Generator().manual_seed(generator.randrange(1 << 30))
    return torch.randn(shape, generator=seeded).contiguous(memory_format=LAST)


def pair(generator: random.Random, choices: Any) -> Any:
    """One number, or two, as a tuple or a list."""
    kind = generator.choice((int, tuple, list))
    return generator.choice(choices) if kind is int else kind(
        generator.choice(choices) for _ in "hw")


def drawn(generator: random.Random) -> tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]:
    """A function of ours and torch's, with the same arguments; torch may refuse them."""
    taps, between, before, holes = (pair(generator, choices) for choices in (
        (1, 2, 3, 5, 9), (1, 2, 3), (0, 0, 1, 2), (1, 1, 2)))
    stride = generator.choice((None, between, between, between, (), 0, (1, 2, 1)))
    ceil, size = generator.random() < 0.5, pair(generator, (1, 2, 5, 7))
    counted, divisor = generator.random() < 0.5, generator.choice((None, None, 3, 0))
    whole = generator.choice((None, size, size, [None, 3], (4,)))
    return generator.choice((
        (lambda x: pools.max_pool2d(x, taps, stride, before, holes, ceil),
         lambda x: F.max_pool2d(x, taps, stride, before, holes, ceil)),
        (lambda x: pools.avg_pool2d(x, taps, stride, before, ceil, counted, divisor),
         lambda x: F.avg_pool2d(x, taps, stride, before, ceil, counted, divisor)),
        (lambda x: pools.adaptive_avg_pool2d(x, whole), lambda x: F.adaptive_avg_pool2d(x, whole)),
        (lambda x: pools.adaptive_max_pool2d(x, whole), lambda x: F.adaptive_max_pool2d(x, whole)),
        (lambda x: pools.global_average(x, ceil), lambda x: x.mean((2, 3), keepdim=ceil)),
        (lambda x: upsample(x, size), lambda x: F.interpolate(x, size)),
        (lambda x: upsample(x, size, None, "bilinear", ceil),
         lambda x: F.interpolate(x, size, None, "bilinear", ceil))))


def test_as_torch_with_any_arguments() -> None:
    generator, ours = random.Random(7), 0
    for _ in range(600):
        run, torchs = drawn(generator)
        shape = (generator.randint(1, 3), generator.choice((1, 3, 16, 21, 64, 100)),
                 generator.randint(1, 30), generator.randint(1, 30))
        x = images(generator, shape)
        if generator.random() < 0.3:
            x = sliced(x, shape[1] + generator.randint(1, 20))
        found = run(x)
        try:
            expected = torchs(x)
        except (RuntimeError, TypeError, ValueError):
            assert found is None
            continue
        assert found is not None
        assert found.shape == expected.shape
        require_same(found, expected, f"{shape}", 1e-6)
        if found.dim() == 4:
            assert found.is_contiguous(memory_format=LAST)
        ours += 1
    assert ours > 350


@pytest.mark.parametrize("shape", SINGLES)
@pytest.mark.parametrize("name", PAIRS)
def test_strides_of_single_sizes(shape: tuple[int, ...], name: str) -> None:
    """They may be anything; every way to write these images gives the same."""
    run, torchs = PAIRS[name]
    x = images(random.Random(3), shape)
    views = [x, x.contiguous(), sliced(x, shape[1] + 3), x.permute(0, 2, 3, 1).contiguous().permute(
        0, 3, 1, 2), x.as_strided(shape, [stride if size > 1 else 977 for size, stride in zip(
            shape, x.stride())])]
    views = [view for view in views if sweeps.pitch_of(tuple(view.shape), view.stride())]
    assert len(views) >= 3
    for view in views:
        found = run(view)
        require_same(found, torchs(x), f"{view.stride()}", 1e-6)
        out = sliced(torch.zeros_like(found), found.shape[1] + 2)
        assert run(view, out=out) is out
        require_same(out, found, f"out of {view.stride()}")


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("change", [
    lambda x: x.double(), lambda x: x.contiguous(),
    lambda x: x[:, :, ::2], lambda x: x[:, :, :, ::3], lambda x: x[:, ::2], lambda x: x[::2],
    lambda x: x[:, :, 1:, 1:], lambda x: x.transpose(2, 3), lambda x: x[:0], lambda x: x[0],
    lambda x: x.requires_grad_(), lambda x: x.to("meta"), lambda x: x[:, :, :1].expand(4, 6, 8, 8),
    lambda x: x.to_sparse()])
def test_others_are_torchs(name: str, change: Callable[[Tensor], Tensor]) -> None:
    x = change(images(random.Random(1), (4, 6, 8, 8)))
    assert PAIRS[name][0](x) is None


@pytest.mark.parametrize("name", PAIRS)
def test_results_that_cannot_be_written_are_torchs(name: str) -> None:
    run, torchs = PAIRS[name]
    x = images(random.Random(1), (2, 6, 8, 8))
    right = torchs(x)
    for out in (right.contiguous() if right.shape[2] > 1 else right.double(), right.double(),
                right[:1], right[:, :5], right.clone().requires_grad_()):
        assert run(x, out=out) is None


def test_into_a_concatenation() -> None:
    """The three pools of a pyramid, each beside the one before."""
    x = images(random.Random(2), (2, 20, 9, 11))
    whole = torch.empty(2, 80, 9, 11).contiguous(memory_format=LAST)
    whole[:, :20] = x
    steps, expected = whole.split(20, 1), [x]
    for before, after in pairwise(steps):
        assert pools.max_pool2d(before, 5, 1, 2, out=after) is after
        expected.append(F.max_pool2d(expected[-1], 5, 1, 2))
    assert torch.equal(whole, torch.cat(expected, 1))


def test_gradients_are_torchs_alone() -> None:
    x = images(random.Random(2), (1, 4, 6, 6)).requires_grad_()
    assert pools.max_pool2d(x, 2) is None
    with torch.no_grad():
        assert torch.equal(pools.max_pool2d(x, 2), F.max_pool2d(x, 2))


def test_a_forgotten_table_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads pool images of many sizes while what is remembered is thrown away."""
    monkeypatch.setattr(sweeps._known, "_most", 2)
    wrong: list[tuple[int, ...]] = []

    def work(seed: int) -> None:
        generator = random.Random(seed)
        for _ in range(60):
            x = images(generator, (1, 8, generator.randint(4, 20), generator.randint(4, 20)))
            if not torch.equal(pools.max_pool2d(x, 3, 1, 1), F.max_pool2d(x, 3, 1, 1)):
                wrong.append(tuple(x.shape))
            gc.collect(0)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(sweeps._known) <= 2 + len(threads)


@pytest.mark.parametrize("threads", [1, 2])
def test_large_images_on_all_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in ((1, 64, 112, 112), (1, 5, 300, 301), (8, 40, 64, 64)):
            x = images(random.Random(4), shape)
            require_same(pools.max_pool2d(x, 3, 2, 1), F.max_pool2d(x, 3, 2, 1), "max")
            require_same(pools.global_average(x), x.double().mean((2, 3), keepdim=True),
                         "global", 1e-5)
            require_same(upsample(x, scale_factor=2), F.interpolate(x, scale_factor=2), "nearest")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("pool, torchs", [(pools.max_pool2d, F.max_pool2d),
                                          (pools.avg_pool2d, F.avg_pool2d)])
@pytest.mark.parametrize("taps", [3, 5])
def test_images_smaller_than_windows_need_no_code_of_their_own(pool: Any, torchs: Any,
                                                               taps: int) -> None:
    made = set()
    launch = pools.launcher

    def noted(*args: Any, **options: Any) -> Any:
        made.add(args[4:])
        return launch(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "launcher", noted)
        for size in [(20, 20), (1, 1), (2, 1), (1, 4), (2, 2), (3, 2), (4, 3)]:
            x = images(random.Random(0), (1, 16, *size))
            require_same(pool(x, taps, 1, taps // 2), torchs(x, taps, 1, taps // 2), f"{size}")
    assert len(made) == 1

"""Blocks that repeat a call: only while nothing has changed, and only where nobody watches."""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.convolutions import LAST, assert_close, draw
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.conv.again import CALLS
from tilewise.conv.ops import conv2d
from tilewise.conv.running import ENGINE
from tilewise.core.errors import InvalidProblem
from tilewise.model.nn import Block
from tilewise.runtime import forms, weights
from tilewise.runtime.weights import MADE
from tilewise.tools.sharing import noted


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    torch.manual_seed(0)  # a ReLU can hide a change of a single element
    with torch.no_grad():
        yield


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call of a Block: whether nothing had to be looked up."""
    found: list[bool] = []

    def before(name: str, note: Callable[[], object]) -> None:
        run = getattr(Block, name)
        monkeypatch.setattr(Block, name, lambda *args: (note(), run(*args))[1])

    before("forward", lambda: found.append(True))
    for name in ("_remembered", "_anew"):
        before(name, lambda: found.__setitem__(-1, False))
    return found


def parts(bias: bool = True, norm: bool = True) -> tuple[nn.Conv2d, nn.BatchNorm2d | None]:
    conv = nn.Conv2d(8, 8, 3, padding=1, bias=bias).eval()
    if not norm:
        return conv, None
    after = nn.BatchNorm2d(8).eval()
    for tensor in (after.running_mean, after.weight, after.bias):
        tensor.normal_()
    after.running_var.uniform_(0.5, 2)
    return conv, after


def theirs(conv: nn.Conv2d, norm: nn.BatchNorm2d | None, x: Tensor,
           residual: Tensor | None = None) -> Tensor:
    y = conv(x) if norm is None else norm(conv(x))
    return torch.relu(y if residual is None else y + residual)


def image(seed: int = 0, batch: int = 1, size: int = 9) -> Tensor:
    return draw(batch, 8, size, size, seed=seed).contiguous(memory_format=LAST)


CHANGES: dict[str, Callable[[nn.Conv2d, Any], object]] = {
    "weight": lambda conv, norm: conv.weight.mul_(2),
    "weight, one element": lambda conv, norm: conv.weight[3, 2, 1, 1].add_(4),
    "weight through data": lambda conv, norm: conv.weight.data.mul_(2),
    "another weight": lambda conv, norm: setattr(conv, "weight", nn.Parameter(conv.weight * 2)),
    "bias": lambda conv, norm: conv.bias.add_(1),
    "another bias": lambda conv, norm: setattr(conv, "bias", nn.Parameter(conv.bias + 1)),
    "no bias": lambda conv, norm: setattr(conv, "bias", None),
    "mean": lambda conv, norm: norm.running_mean.add_(1),
    "variance": lambda conv, norm: norm.running_var.mul_(3),
    "variance through numpy": lambda conv, norm: norm.running_var.numpy().fill(7),
    "scale": lambda conv, norm: norm.weight.mul_(2),
    "another shift": lambda conv, norm: setattr(norm, "bias", nn.Parameter(norm.bias + 1)),
    "no shift": lambda conv, norm: setattr(norm, "bias", None),
    "pruning": lambda conv, norm: prune.l1_unstructured(conv, "weight", 0.5),
    "eps": lambda conv, norm: setattr(norm, "eps", 0.7),
    "training": lambda conv, norm: norm.train(),
    "padding": lambda conv, norm: setattr(conv, "padding", (0, 0)),
    "stride": lambda conv, norm: setattr(conv, "stride", (2, 2)),
    "layout of the weight": lambda conv, norm: setattr(
        conv.weight, "data", conv.weight.data.transpose(2, 3)),
    "fewer filters": lambda conv, norm: (
        setattr(conv.weight, "data", conv.weight.data[:4]),
        setattr(conv.bias, "data", conv.bias.data[:4]),
        norm and [setattr(getattr(norm, name), "data", getattr(norm, name).data[:4])
                  for name in ("running_mean", "running_var", "weight", "bias")]),
    "loading": lambda conv, norm: conv.load_state_dict(parts()[0].state_dict()),
}


OF_NORMS = {"mean", "variance", "variance through numpy", "scale", "another shift", "no shift",
            "eps", "training"}


@pytest.mark.parametrize("norm, change", [
    *((True, change) for change in CHANGES),
    *((False, change) for change in CHANGES if change not in OF_NORMS)])
def test_changes_are_noticed(change: str, norm: bool, repeated: list[bool]) -> None:
    conv, after = parts(norm=norm)
    block, x = Block(conv, after, "relu"), image()
    first = block(x)
    block(x)
    assert repeated[-1], "the second call repeats the first"
    CHANGES[change](conv, after)
    y, z = block(x), block(x)
    before = copy.deepcopy(after)
    assert y.shape != first.shape or not torch.allclose(y, first)
    assert_close(z, theirs(conv, before, x), 1e-5)


def test_changes_of_the_block_are_noticed() -> None:
    conv, after = parts()
    x = image()
    for name, value in (("activation", None), ("pool", 2), ("max_error", 1e-3)):
        block = Block(conv, after, "relu")
        before = block._asks()
        block(x)
        setattr(block, name, value)
        assert block._asks() != before
        fresh = Block(conv, after, block.activation, block.pool, block.max_error)
        assert torch.equal(block(x), fresh(x))


def test_norms_that_cannot_be_folded() -> None:
    x, conv = image(), nn.Conv2d(8, 8, 3, padding=1, bias=False).eval()
    with pytest.raises(RuntimeError):
        Block(conv, nn.BatchNorm2d(1).eval())(x)
    half, after = parts()
    half = half.bfloat16()
    y = Block(half, after, "relu")(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert_close(y.float(), theirs(half, after, x.bfloat16()).float(), 1e-2)


@pytest.mark.parametrize("channels, changed", [(1, slice(0, 1)), (5, slice(3, 5))])
def test_norms_of_few_channels_are_sampled_to_their_end(channels: int, changed: slice) -> None:
    conv, after = nn.Conv2d(8, channels, 3).eval(), nn.BatchNorm2d(channels).eval()
    block, x = Block(conv, after, "relu"), image()
    block(x)
    after.bias.data[changed] = 20
    assert_close(block(x), theirs(conv, after, x))


def test_weights_that_cannot_be_followed_are_prepared_once_a_call(
        monkeypatch: pytest.MonkeyPatch) -> None:
    folds: list[int] = []
    fold = weights.fold
    monkeypatch.setattr(weights, "fold", lambda *args: folds.append(1) or fold(*args))
    conv, after = parts()
    Block(conv.double(), after.double(), "relu")(image().double())
    assert len(folds) == 1


def test_numbers_that_look_alike() -> None:
    """What is remembered for one of them must serve the others."""
    x, weight = image(), draw(8, 8, 3, 3)
    for ones in (True, np.int64(1), 1):
        expected = torch.nn.functional.conv2d(x, weight, stride=1, padding=1, dilation=1)
        options = {"stride": ones, "padding": (ones, ones), "dilation": ones, "groups": ones}
        assert_close(conv2d(x, weight, **options), expected)
    for _ in range(2):  # the second time, what looks alike is remembered
        with pytest.raises(InvalidProblem, match="whole numbers"):
            conv2d(x, weight, stride=2.0)
        assert conv2d(x, weight, stride=2).shape == (1, 8, 4, 4)
    conv = nn.Conv2d(8, 8, 3, stride=np.int64(2)).eval()
    assert_close(Block(conv)(x), conv(x))


def test_values_that_are_not_in_memory() -> None:
    conv, after = parts()
    block, x = Block(conv, after, "relu"), image()
    block(x)
    for lazy in (torch._neg_view(x), torch._efficientzerotensor(x.shape)):
        assert_close(block(lazy), theirs(conv, after, lazy.clone()))


def test_one_optimizer_step_is_noticed() -> None:
    conv, after = parts()
    block, x = Block(conv, after, "relu"), image()
    block(x)
    conv.weight.grad = torch.ones_like(conv.weight)
    torch.optim.SGD([conv.weight], lr=0.1, fused=True).step()
    assert_close(block(x), theirs(conv, after, x))


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
def test_other_operands(norm: bool, repeated: list[bool]) -> None:
    conv, after = parts(norm=norm)
    block = Block(conv, after, "relu")
    for x in (image(), image(1), image(2, batch=3), image(3, size=12), image().contiguous(),
              image()[:, :, ::2], image().double().float(), image()):
        assert_close(block(x), theirs(conv, after, x))
        residual = draw(*theirs(conv, after, x).shape, seed=9)
        assert_close(block(x, residual), theirs(conv, after, x, residual))
        wide = draw(1, 1, 1, x.shape[3], seed=9)  # broadcast
        assert_close(block(x, wide), theirs(conv, after, x, wide))
    assert True in repeated
    assert False in repeated
    with pytest.raises(InvalidProblem, match="needs 8"):
        block(image()[:, :4])


def test_settings(repeated: list[bool]) -> None:
    conv, after = parts()
    block, x, threads = Block(conv, after, "relu"), image(), torch.get_num_threads()
    block(x)
    try:
        torch.set_num_threads(1)
        with noted() as plans:
            block(x)
        assert plans[0].target.threads == 1
        torch.set_float32_matmul_precision("medium")
        block(x)
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")
        with noted() as plans:
            block(x)
        assert plans[0].target.threads == threads
        assert repeated == [False, False, False, True], "the first setting is still remembered"
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")


def test_modes_of_torch_are_seen() -> None:
    conv, after = parts()
    block, x = Block(conv, after, "relu"), image()
    block(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert block(x).dtype == theirs(conv, after, x).dtype
    with torch.profiler.profile() as profile:
        block(x)
    assert "tilewise::conv2d_norm" in {event.name for event in profile.events()}

    class Count(TorchDispatchMode):
        seen: tuple[Any, ...] = ()

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (),
                               kwargs: Any = None) -> Any:
            self.seen = (*self.seen, str(function))
            return function(*args, **(kwargs or {}))

    with Count() as mode:
        block(x)
    assert "tilewise.conv2d_norm.default" in mode.seen
    many = torch.stack([x, 2 * x])
    assert_close(torch.func.vmap(block)(many), torch.stack([block(x), block(2 * x)]))
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        block(leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().sum() > 0


def test_a_gradient_of_the_input_alone() -> None:
    """With frozen weights: as torch computes it."""
    conv, after = parts()
    for parameter in (*conv.parameters(), *after.parameters()):
        parameter.requires_grad_(False)
    found = []
    with torch.enable_grad():
        for run in (Block(conv, after, "relu"), lambda x: theirs(conv, after, x)):
            leaf = image().requires_grad_()
            run(leaf).square().sum().backward()
            found.append(leaf.grad)
    assert_close(*found, 1e-5)


def test_inference_mode(repeated: list[bool]) -> None:
    conv, after = parts()
    block = Block(conv, after, "relu")
    with torch.inference_mode():
        x = image()
        assert block(x).is_inference()
        assert block(x).is_inference()
        assert repeated[-1]
        made_here, norm = parts()
        hidden = Block(made_here, norm, "relu")
        for _ in range(2):
            assert_close(hidden(x), theirs(made_here, norm, x))
            made_here.weight.mul_(2)  # which no counter tells


def test_what_is_watched_is_told(repeated: list[bool]) -> None:
    block, x = Block(*parts(), "relu"), image()
    block(x)
    with noted() as plans:
        block(x)
    assert repeated[-1]
    assert len(plans) == 1


def test_copies_and_files() -> None:
    conv, after = parts()
    block, x = Block(conv, after, "relu"), image()
    y = block(x)
    twin = copy.deepcopy(block)
    twin._parts[0].weight.mul_(2)
    assert_close(twin(x), theirs(*twin._parts, x))
    assert torch.equal(block(x), y)
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), y)


def test_what_the_caches_let_go_is_not_held() -> None:
    block, x = Block(*parts(), "relu"), image()
    y = block(x)
    gc.collect()
    before, limit = MADE.total, MADE.limit
    MADE.limit = 0
    assert before > 0
    assert MADE.total == 0
    assert [again._made() for again in block._calls._known.values()] == [None]
    assert torch.equal(block(x), y)
    MADE.limit = limit
    block(x)
    ENGINE.executables.clear()
    assert [again._executable() for again in block._calls._known.values()] == [None]
    assert torch.equal(block(x), y)


def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is asked of the caches from now on."""
    seen: list[str] = []
    for name, cache in (("executables", ENGINE.executables), ("weights", MADE)):
        get = cache.get
        monkeypatch.setattr(cache, "get",
                            lambda key, name=name, get=get: seen.append(name) or get(key))
    return seen


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
def test_two_sizes_in_turns_are_looked_up_once(norm: bool,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    conv, after = parts(norm=norm)
    block, images, seen = Block(conv, after, "relu"), (image(), image(size=7)), lookups(monkeypatch)
    results = [block(x) for x in images]
    assert seen == ["executables", "weights"] * 2
    for _ in range(3):
        for x, expected in zip(images, results):
            assert torch.equal(block(x), expected)
    assert len(seen) == 4


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
def test_calls_in_turns_are_all_remembered(norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, batches, layouts and residuals; as threads with shapes of their own mix them."""
    conv, after = parts(norm=norm)
    block, images = Block(conv, after, "relu"), [
        image(), image(size=7), image(batch=3), image().contiguous()]
    calls = [(x, residual) for x in images for residual in (None, torch.ones_like(x))]
    results = [block(*call) for call in calls]
    for call in calls:  # forms of the weight that went for others come back
        block(*call)
    seen = lookups(monkeypatch)
    for _ in range(3):
        for call, expected in zip(calls, results):
            assert torch.equal(block(*call), expected)
    assert seen == []


def test_the_least_recently_used_call_is_forgotten(repeated: list[bool],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "FEW", 1 + CALLS)  # else weights could be made again
    block, images = Block(*parts(), "relu"), [image(size=size) for size in range(4, 5 + CALLS)]
    for x in (*images[:-1], images[0], images[-1]):  # one more than it remembers
        block(x)
        assert len(block._calls) <= CALLS
    repeated.clear()
    for x in (images[0], *images[2:], images[1]):
        block(x)
    assert repeated == [True] * CALLS + [False]


def test_lists_as_parameters() -> None:
    """Some cannot be a key of a dict: such calls are not remembered, and still right."""
    conv, after = parts()
    block, x = Block(conv, after, "relu"), image()
    conv.stride = [2, 2]
    for _ in range(2):
        assert_close(block(x), theirs(conv, after, x))
    conv.stride[:] = [1, 1]
    for _ in range(2):
        assert_close(block(x), theirs(conv, after, x))
    remembered = len(block._calls)
    conv.padding = [0, 0]
    for _ in range(2):
        assert_close(block(x), theirs(conv, after, x))
    assert len(block._calls) == remembered


def test_a_setting_that_another_thread_changes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was planned for one precision is not remembered for the other."""
    block, x = Block(*parts(), "relu"), image()
    remembered = Block._remembered

    def interrupted(*args: Any) -> Any:
        torch.set_float32_matmul_precision("medium")
        return remembered(*args)

    monkeypatch.setattr(Block, "_remembered", interrupted)
    try:
        block(x)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert len(block._calls) == 0


def test_threads_with_a_number_of_threads_of_their_own() -> None:
    """Torch's setting is each thread's own once it has asked for it."""
    block, x, wrong = Block(*parts(), "relu"), image(), []
    y = block(x)

    def serve(count: int) -> None:
        torch.get_num_threads()  # else the next to ask takes what another thread set last
        torch.set_num_threads(count)
        with torch.no_grad():
            wrong.extend(count for _ in range(30) if not torch.equal(block(x), y))

    before, counts = torch.get_num_threads(), (1, 2, 3)
    threads = [threading.Thread(target=serve, args=(count,)) for count in counts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(before)  # also that of threads to come
    assert not wrong
    planned = {settings[0]: again._executable().plan.target.threads
               for (_, settings, *_), again in block._calls._known.items()}
    assert planned == {count: count for count in {before, *counts}}


def test_several_threads() -> None:
    """Each with images of its own size, more of them than the block remembers."""
    conv, after = parts()
    block, wrong = Block(conv, after, "relu"), []

    def serve(size: int) -> None:
        with torch.no_grad():
            x = image(size, size=size)
            expected = theirs(conv, after, x)
            for _ in range(50):
                if not torch.allclose(block(x), expected, atol=1e-4):
                    wrong.append(size)

    threads = [threading.Thread(target=serve, args=(size,)) for size in (9, *range(4, 13))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_compiled_after_it_was_called() -> None:
    torch.compiler.reset()
    conv, after = parts()
    block, x = Block(conv, after, "relu"), image()
    y = block(x)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    assert_close(compiled(x), y)
    exported = torch.export.export(block, (x,))
    assert_close(exported.module()(x), y)

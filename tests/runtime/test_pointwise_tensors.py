"""Elementwise chains and concatenation on tensors: torch's values, layouts and refusals."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.convolutions import LAST, PLANES, draw
from torch import Tensor
from torch.nn import functional as F

from tilewise.core import InvalidProblem
from tilewise.runtime import concatenation
from tilewise.runtime import pointwise as module
from tilewise.runtime.concatenation import concatenated
from tilewise.runtime.pointwise import Pointwise, pointwise

ADD, MUL, RELU, SILU = ((("add", 0, 1),), (("mul", 0, 1),), (("relu", 0),), (("silu", 0),))
SHAPES = [(1, 1, 1, 1), (1, 5, 1, 1), (4, 5, 1, 1), (4, 1, 1, 1), (1, 1, 6, 7), (3, 1, 6, 7),
          (2, 5, 1, 7), (2, 5, 7, 1), (1, 5, 6, 1), (2, 37, 6, 7), (2, 64, 33, 35),
          (1, 3, 150, 151)]


def last(*shape: int, seed: int = 0) -> Tensor:
    return draw(*shape, seed=seed, integers=True).contiguous(memory_format=LAST)


def sliced(*shape: int, seed: int = 0) -> Tensor:
    """Channels between others, of a channels-last image."""
    n, c, h, w = shape
    return last(n, c + 5, h, w, seed=seed)[:, 2:2 + c]


def same(found: Tensor | None, wanted: Tensor) -> bool:
    return found is not None and found.shape == wanted.shape and torch.equal(found, wanted)


# layouts


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kinds", list(itertools.product([last, sliced], repeat=2)))
def test_images_and_slices_of_channels(shape: tuple[int, ...], kinds: Any) -> None:
    x, y = (kind(*shape, seed=i) for i, kind in enumerate(kinds))
    found = pointwise(ADD, (x, y))
    assert same(found, x + y)
    assert found is not None
    assert found.is_contiguous(memory_format=LAST)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [last, sliced])
@pytest.mark.parametrize("other", ["channel", "flat channel", "each", "pixel", "one", "zero axes"])
def test_what_broadcasts(shape: tuple[int, ...], kind: Any, other: str) -> None:
    n, c, h, w = shape
    x = kind(*shape)
    y = {"channel": draw(1, c, 1, 1), "flat channel": draw(c, 1, 1), "each": draw(n, c, 1, 1),
         "pixel": draw(n, 1, h, w), "one": draw(1, 1, 1, 1), "zero axes": draw(1)[0]}[other]
    assert same(pointwise(MUL, (x, y)), x * y)
    assert same(pointwise((("sub", 1, 0),), (x, y)), y - x)


def test_operands_without_an_image_among_them() -> None:
    each, pixel, channel = draw(3, 20, 1, 1), draw(3, 1, 5, 6), draw(20, 1, 1)
    assert same(pointwise((("mul", 0, 1), ("add", 3, 2)), (each, pixel, channel)),
                each * pixel + channel)
    column = sliced(3, 1, 5, 6)  # a value of every pixel, other channels beside it
    assert same(pointwise(MUL, (each, column)), each * column)


def test_kinds_tell_what_vectors_are() -> None:
    x, scale, shift = last(2, 19, 5, 6), draw(19), draw(19)
    kinds = ("image", "channel", "channel")
    steps = (("mul", 0, 1), ("add", 3, 2))
    assert same(pointwise(steps, (x, scale, shift), kinds=kinds),
                x * scale.view(19, 1, 1) + shift.view(19, 1, 1))
    each, pixel = draw(2, 19), draw(2, 5, 6)
    assert same(pointwise(steps, (x, each, pixel), kinds=("image", "each", "pixel")),
                x * each[..., None, None] + pixel[:, None])
    assert pointwise(steps, (x, scale, shift)) is None  # to torch, columns of the images


@pytest.mark.parametrize("shape", [(7,), (3, 40), (2, 49, 33), (2, 5, 6, 7), (2, 3, 4, 5, 6), ()])
@pytest.mark.parametrize("change", [
    lambda x: x, lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    lambda x: x.contiguous(memory_format=LAST) if x.dim() == 4 else x])
def test_the_same_strides_at_any_rank(shape: tuple[int, ...], change: Any) -> None:
    x, y = change(draw(*shape)), change(draw(*shape, seed=1))
    for steps, operands, wanted in ((ADD, (x, y), x + y), (RELU, (x,), x.relu()),
                                    (MUL, (x, torch.tensor(3.0)), x * 3)):
        found = pointwise(steps, operands)
        assert same(found, wanted)
        assert found is not None
        assert found.stride() == wanted.stride()


def test_large_results_come_from_the_pool_with_the_same_strides(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POOLED", 0)
    for x in (last(2, 64, 40, 40), draw(2, 64, 40, 40), draw(2, 300, 700)):
        found = pointwise(RELU, (x,))
        assert same(found, x.relu())
        assert found is not None
        assert found.stride() == x.stride()


@pytest.mark.parametrize("operands", [
    (draw(2, 5, 6, 7), draw(2, 5, 1, 1)), (draw(2, 5, 6, 7), last(2, 5, 6, 7)),
    (draw(2, 5, 6, 7).double(), draw(2, 5, 6, 7).double()), (last(2, 5, 6, 7)[:, :, ::2],) * 2,
    (last(2, 5, 6, 7)[:, ::2],) * 2, (last(2, 5, 6, 7)[:, :, :, 1:],) * 2,
    (last(3, 5, 6, 7)[::2],) * 2, (last(2, 5, 6, 7), draw(1, 5, 6, 7)),
    (last(2, 5, 6, 7), draw(2, 1, 1, 1)), (last(2, 5, 6, 7), draw(1, 1, 6, 7)),
    (last(2, 5, 6, 7), draw(2, 5, 2, 1)[:, :, :1]), (last(0, 5, 6, 7),) * 2,
    (last(2, 5, 6, 7), draw(3, 5, 6, 7)), (draw(4, 5), draw(4)),
    (draw(1, 5, 1, 1).expand(2, 5, 6, 7),) * 2,
    (last(2, 5, 6, 7), draw(2, 5, 6, 7).bfloat16()),
    (torch.zeros(2, 5, 6, 7, dtype=torch.complex64).conj().imag,) * 2])
def test_others_are_torchs(operands: Any) -> None:
    assert pointwise(ADD, operands) is None


def test_what_autograd_follows_is_torchs() -> None:
    x = last(1, 4, 3, 3).requires_grad_()
    assert pointwise(RELU, (x,)) is None
    assert concatenated((x, x)) is None
    with torch.no_grad():
        assert same(pointwise(RELU, (x,)), x.relu())


# results


@pytest.mark.parametrize("shape", [(1, 12, 1, 1), (2, 12, 5, 6), (2, 64, 33, 35)])
def test_a_result_that_is_given(shape: tuple[int, ...]) -> None:
    n, c, h, w = shape
    x, each = last(*shape), draw(n, c, 1, 1)
    whole = torch.full((n, c + 9, h, w), float("nan")).contiguous(memory_format=LAST)
    out = whole[:, 4:4 + c]
    assert pointwise(MUL, (x, each), out) is out
    assert torch.equal(out, x * each)
    assert bool(whole[:, :4].isnan().all() and whole[:, 4 + c:].isnan().all())
    for wrong in (whole, whole[:, :c].double(), whole[:, ::2][:, :c], whole[..., :1][:, :c, :0]):
        assert pointwise(MUL, (x, each), wrong) is None


@pytest.mark.parametrize("kind", [last, sliced])
def test_in_place(kind: Any) -> None:
    for shape in SHAPES:
        x, y = kind(*shape), draw(*shape[:2], 1, 1)
        wanted = x * y
        assert pointwise(MUL, (x, y), x) is x
        assert torch.equal(x, wanted)
        z = last(*shape, seed=3)
        wanted = z + x
        assert pointwise(ADD, (z, x), x) is x
        assert torch.equal(x, wanted)


def test_channels_beside_each_other() -> None:
    whole = last(2, 40, 5, 6)
    wanted = whole[:, :20] + whole[:, 20:]
    assert pointwise(ADD, (whole[:, :20], whole[:, 20:]), whole[:, 20:]) is not None
    assert torch.equal(whole[:, 20:], wanted)


@pytest.mark.parametrize("operand, out", [  # first float, and floats from pixel to pixel
    ((0, 41), (1, 41)), ((0, 41), (45 * 41, 41)), ((20, 41), (1, 41)), ((0, 40), (1, 20)),
    ((0, 41), (0, 40)), ((0, 20), (20, 20)), ((7, 60), (20, 60))])
def test_memory_that_is_read_again_is_not_written(operand: Any, out: Any) -> None:
    memory = draw(45 * 60 * 4)
    x, y = (memory.as_strided((3, 20, 5, 9), (45 * pitch, 1, 9 * pitch, pitch), first)
            for first, pitch in (operand, out))
    before = memory.clone()
    assert pointwise(RELU, (x,), y) is None
    assert torch.equal(memory, before)


def test_vectors_are_not_written_over() -> None:
    whole = last(2, 20, 5, 6)
    assert pointwise(MUL, (last(2, 20, 5, 6), whole[:, :, :1, :1]), whole) is None
    assert pointwise(MUL, (last(2, 20, 5, 6), whole[:, 3:4]), whole) is None


def test_threads_and_slices_change_no_bit() -> None:
    threads = torch.get_num_threads()
    x = torch.randn(2, 70, 64, 65).contiguous(memory_format=LAST)
    try:
        torch.set_num_threads(1)
        wanted = pointwise(SILU, (x,))
        torch.set_num_threads(2)
        assert wanted is not None
        for found in (pointwise(SILU, (x,)), pointwise(SILU, (draw(2, 90, 64, 65).contiguous(
                memory_format=LAST)[:, 7:77].copy_(x),)), pointwise(SILU, (x.contiguous(),))):
            assert same(found, wanted)
        assert same(pointwise(SILU, (x[:, 3:9],)), wanted[:, 3:9])
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(wanted, F.silu(x), rtol=1e-6, atol=1e-6)


# what is remembered


def test_numbers_of_operands_are_no_constants() -> None:
    x, y = last(1, 8, 4, 4), last(1, 8, 4, 4, seed=1)
    for other, wanted in ((1, x + y), (1.0, x + 1), (0, x + x), (0.0, x)):
        assert same(pointwise((("add", 0, other),), (x, y)), wanted)
    one = last(1, 1, 1, 1).fill_(1.0)
    for constant, wanted in ((0.0, float("inf")), (-0.0, -float("inf"))):
        found = pointwise((("div", 0, constant),), (one,))
        assert found is not None
        assert float(found) == wanted


def test_little_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._known, "_most", 3)
    monkeypatch.setattr(concatenation._runs, "_most", 3)
    chain = Pointwise(RELU)
    monkeypatch.setattr(chain._runs, "_most", 3)
    for h in range(1, 9):
        x = last(1, 4, h, 3) - 1
        assert same(chain((x,)), x.relu())
        assert same(pointwise((("add", 0, float(h)),), (x,)), x + h)
        assert same(concatenated((x, x)), torch.cat((x, x), 1))
    assert len(chain._runs) <= 3
    assert len(module._known) <= 3
    assert len(concatenation._runs) <= 3


def test_wrong_steps_are_an_error() -> None:
    with pytest.raises(InvalidProblem):
        pointwise((("add", 0, 1),), (last(1, 4, 3, 3),))


# concatenation


@pytest.mark.parametrize("channels", [(5,), (3, 8), (16, 32, 1), (4, 5, 6, 7), (1,) * 9, (64, 70)])
@pytest.mark.parametrize("kind", [last, sliced])
@pytest.mark.parametrize("size", [(1, 1, 1), (3, 1, 1), (2, 5, 6), (1, 40, 41)])
def test_concatenation(channels: tuple[int, ...], kind: Any, size: tuple[int, int, int]) -> None:
    n, h, w = size
    parts = [kind(n, c, h, w, seed=i) for i, c in enumerate(channels)]
    wanted = torch.cat(parts, 1)
    found = concatenated(parts)
    assert same(found, wanted)
    assert found is not None
    assert found.is_contiguous(memory_format=LAST)
    whole = torch.full((n, sum(channels) + 3, h, w), float("nan")).contiguous(memory_format=LAST)
    out = whole[:, 1:-2]
    assert concatenated(parts, out) is out
    assert torch.equal(out, wanted)
    assert bool(whole[:, :1].isnan().all() and whole[:, -2:].isnan().all())


@pytest.mark.parametrize("parts", [
    (), (draw(2, 5, 6, 7), last(2, 5, 6, 7)), (last(2, 5, 6, 7), last(2, 5, 7, 6)),
    (last(2, 5, 6, 7), last(1, 5, 6, 7)), (last(2, 5, 6, 7).double(),) * 2,
    (last(2, 5, 6, 7), draw(0)), (draw(2, 5, 6), draw(2, 5, 6)), (last(2, 5, 6, 7)[..., ::2],)])
def test_other_concatenations_are_torchs(parts: Any) -> None:
    assert concatenated(parts) is None


def test_parts_are_not_written_over() -> None:
    whole = last(2, 20, 5, 6)
    assert concatenated((whole[:, 10:], whole[:, :10]), whole) is None
    assert concatenated((last(2, 9, 5, 6),), whole) is None
    assert same(concatenated((whole[:, 10:], whole[:, :10])),
                torch.cat((whole[:, 10:], whole[:, :10]), 1))


def test_planes_stay_planes() -> None:
    x = draw(2, 6, 5, 7)
    found = pointwise(RELU, (x,))
    assert found is not None
    assert found.is_contiguous(memory_format=PLANES)

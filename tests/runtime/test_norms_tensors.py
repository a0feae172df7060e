"""Norms, softmax and channel shuffle on tensors: torch's results, and None where torch computes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tilewise.runtime import norms
from tilewise.runtime.shuffling import channel_shuffle
from tilewise.runtime.softmax import softmax

LAST = torch.channels_last


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def images(*shape):
    return torch.randn(shape).contiguous(memory_format=LAST)


def same(found, expected, error=1e-5):
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=error, atol=error, equal_nan=True)


@pytest.mark.parametrize("shape", [(7,), (1,), (3, 1), (2, 5, 6, 33), (4, 197, 768), (9, 16)])
def test_layer_norm_as_torchs(shape):
    x, weight, bias = torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape[-1])
    for w in (weight, None):
        for b in (bias, None):
            y = norms.layer_norm(x, shape[-1:], w, b, 1e-6)
            expected = F.layer_norm(x, shape[-1:], w, b, 1e-6)
            same(y, expected)
            assert y.stride() == expected.stride()


def test_layer_norm_of_channels_last_images_and_slices():
    x = images(2, 24, 5, 7)
    same(norms.layer_norm(x.permute(0, 2, 3, 1), (24,)), F.layer_norm(x.permute(0, 2, 3, 1), (24,)))
    part = x[:, 3:20].permute(0, 2, 3, 1)
    same(norms.layer_norm(part, [17]), F.layer_norm(part, [17]))


def test_large_means_are_no_trouble():
    x = torch.randn(6, 300) + 1e4
    expected = F.layer_norm(x.double(), (300,))
    assert (norms.layer_norm(x, (300,)) - expected).abs().max() < 1e-5
    y = images(2, 8, 30, 30) + 1e4
    expected = F.group_norm(y.double().contiguous(), 2)
    assert (norms.group_norm(y, 2) - expected).abs().max() < 1e-4


def test_equal_values_of_any_size_have_no_variance():
    for value in (0.0, 1e4, -3e37, 1e-30):
        assert norms.layer_norm(torch.full((3, 50), value), (50,)).abs().max() == 0
        x = torch.full((1, 6, 5, 5), value).contiguous(memory_format=LAST)
        assert norms.group_norm(x, 2).abs().max() < 1e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite(value):
    x = torch.randn(9, 40)
    x[4, 17] = value
    same(norms.layer_norm(x, (40,)), F.layer_norm(x, (40,)))
    same(softmax(x, 1), torch.softmax(x, 1))
    y = images(2, 6, 5, 5)
    y[1, 3, 2, 2] = value
    same(norms.group_norm(y, 3), F.group_norm(y.contiguous(), 3))
    same(norms.instance_norm(y), F.instance_norm(y.contiguous()))
    whole = torch.full((2, 20), value)
    same(softmax(whole, 1), torch.softmax(whole, 1))


@pytest.mark.parametrize(("shape", "groups"), [
    ((1, 1, 3, 3), 1), ((2, 6, 5, 7), 3), ((2, 33, 9, 9), 11), ((1, 64, 40, 40), 32),
    ((3, 20, 1, 1), 2), ((2, 5, 1, 1), 5)])
def test_group_norm_as_torchs(shape, groups):
    x, weight, bias = images(*shape), torch.randn(shape[1]), torch.randn(shape[1])
    y = norms.group_norm(x, groups, weight, bias, 1e-3)
    expected = F.group_norm(x, groups, weight, bias, 1e-3)
    same(y, expected)
    same(norms.group_norm(x, groups, weight, bias, 1e-3, "silu"), F.silu(expected))
    assert y.is_contiguous(memory_format=LAST)


def test_instance_norm_as_torchs():
    x, weight, bias = images(2, 21, 9, 8), torch.randn(21), torch.randn(21)
    same(norms.instance_norm(x, weight, bias), F.instance_norm(x, None, None, weight, bias))
    same(norms.instance_norm(x[:, 2:9], None, None, 1e-5, "leaky_relu:0.2"),
         F.leaky_relu(F.instance_norm(x[:, 2:9]), 0.2))


@pytest.mark.parametrize("shape", [(4,), (3, 1), (2, 3, 50), (1, 3, 197, 197), (5, 4200)])
def test_softmax_as_torchs(shape):
    x = torch.randn(shape) * 10
    same(softmax(x, -1), torch.softmax(x, -1), 1e-6)
    same(softmax(x, len(shape) - 1), torch.softmax(x, -1), 1e-6)


@pytest.mark.parametrize("shape", [(2, 3, 50), (1, 7, 9, 8), (2, 16, 4, 33)])
def test_softmax_over_planes(shape):
    x = torch.randn(shape) * 10
    same(softmax(x, 1), torch.softmax(x, 1), 1e-6)
    assert softmax(x, 1).stride() == torch.softmax(x, 1).stride()


def test_softmax_over_planes_of_several_images():
    x = torch.randn(2, 64, 35).view(2, 4, 16, 35).transpose(1, 2)
    x[0, 3, 2, 5], x[1, 1, 1, 1] = float("inf"), float("nan")
    found, expected = softmax(x, 1), torch.softmax(x, 1)
    same(found, expected, 1e-6)
    assert found.stride() == expected.stride()


def test_softmax_over_planes_on_all_threads():
    x = torch.randn(64, 16, 257)
    expected = torch.softmax(x, 1)
    for _ in range(100):
        same(softmax(x, 1), expected, 1e-6)


def test_softmax_of_channels():
    x = images(2, 21, 9, 8)
    for part in (x, x[:, 2:9]):
        for dim in (1, -3):
            same(softmax(part, dim), torch.softmax(part, dim), 1e-6)


@pytest.mark.parametrize("groups", range(1, 9))
@pytest.mark.parametrize("members", [1, 5, 24, 58])
def test_channel_shuffle_as_torchs(groups, members):
    x = images(2, groups * members + 3, 5, 6)
    for part in (x[:, :-3], x[:, :-3].contiguous(memory_format=LAST)):
        assert torch.equal(channel_shuffle(part, groups),
                           F.channel_shuffle(part.contiguous(), groups))


def test_threads_make_no_difference():
    x, y = torch.randn(8, 197, 300), images(2, 64, 60, 60)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append((norms.layer_norm(x, (300,)), norms.group_norm(y, 8), softmax(x, -1),
                          channel_shuffle(y, 4)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


def test_what_is_torchs():
    x, y = torch.randn(4, 10), images(2, 6, 5, 5)
    assert norms.layer_norm(x, (4, 10)) is None
    assert norms.layer_norm(x, (9,)) is None
    assert norms.layer_norm(x.double(), (10,)) is None
    assert norms.layer_norm(x.t(), (4,)) is None
    assert norms.layer_norm(x[:0], (10,)) is None
    assert norms.layer_norm(x, (10,), torch.randn(20)[::2]) is None
    assert norms.layer_norm(x, (10,), torch.randn(10).double()) is None
    assert norms.layer_norm(x[0].expand(4, 10), (10,)) is None
    assert norms.layer_norm(torch.randn(3, 4, 10).transpose(0, 1), (10,)) is None
    assert norms.group_norm(y.contiguous(), 2) is None
    assert norms.group_norm(y, 4) is None
    assert norms.group_norm(y, 2, activation="prelu") is None
    assert norms.group_norm(x, 2) is None
    assert norms.group_norm(images(1, 3, 1, 1), 3) is None
    assert norms.instance_norm(images(2, 3, 1, 1)) is None
    assert softmax(y.contiguous(), 1) is None  # too few pixels
    assert softmax(torch.randn(2, 5, 99, 9).transpose(2, 3), 1) is None
    assert softmax(torch.randn(1, 5, 0, 99), 1) is None
    assert softmax(x, 2) is None
    assert softmax(x, 0) is None
    assert channel_shuffle(y, 4) is None
    assert channel_shuffle(y.contiguous(), 2) is None
    assert channel_shuffle(images(1, 18, 2, 2), 9) is None
    with torch.enable_grad():
        assert norms.layer_norm(x.clone().requires_grad_(), (10,)) is None
        assert norms.layer_norm(x, (10,), torch.randn(10, requires_grad=True)) is None

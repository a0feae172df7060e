"""Sums, means, largest values and lengths of tensors: torch's results, and None where torch is."""

from __future__ import annotations

import pytest
import torch

from tilewise.runtime.pointwise import pointwise
from tilewise.runtime.totals import KINDS, total

SHAPES = ((1, 3, 5, 7), (2, 64, 14, 14), (2, 130, 1, 1), (1, 2, 100, 100), (3, 17, 1, 9),
          (1, 1, 8, 8))


def images(*shape):
    return torch.randn(*shape).contiguous(memory_format=torch.channels_last) - 3


def near(found, expected):
    assert found is not None
    assert found.shape == expected.shape
    assert (found.double() - expected).norm() <= 1e-5 * expected.norm()


def check(kind, x, dim):
    for keepdim in (False, True):
        near(total(kind, x, dim, keepdim), getattr(x.double(), kind)(dim=dim, keepdim=keepdim))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_of_pixels_and_channels(kind, shape):
    torch.manual_seed(0)
    x = images(*shape)
    for dim in ((2, 3), (-1, -2), 1, (1,), -3):
        check(kind, x, dim)
    for dim in ((1, 2), -1, 3):
        check(kind, x.permute(0, 2, 3, 1), dim)


@pytest.mark.parametrize("kind", KINDS)
def test_of_slices(kind):
    whole = images(2, 40, 9, 7)
    for dim in ((2, 3), 1):
        check(kind, whole[:, 5:25], dim)
    check(kind, torch.randn(6, 50)[:, 3:40], 1)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_of_parts_of_the_channels(parts):
    x = images(2, 8 * parts, 5, 6).reshape(2, parts, 8, 5, 6)
    check("sum", x, 1)
    factor = torch.randn(2, 8 * parts, 1, 1).reshape(2, parts, 8, 1, 1)
    product = pointwise([("mul", 0, 1)], [x, factor])
    near(product, x.double() * factor)
    assert product.stride() == (x * factor).stride()


@pytest.mark.parametrize("count", [2, 3, 4])
def test_of_a_stack(count):
    parts = [images(2, 8, 5, 6) for _ in range(count)]
    check("sum", torch.stack(parts), 0)
    check("sum", torch.stack([part.contiguous() for part in parts]), 0)


def test_what_is_torchs():
    x = images(2, 8, 5, 6)
    assert total("sum", x.contiguous(), (2, 3)) is None
    assert total("sum", x, (0, 1)) is None
    assert total("sum", x, 2) is None
    assert total("sum", x, (1, -3)) is None
    assert total("sum", x, 7) is None
    assert total("sum", x.double(), 1) is None
    assert total("mean", x.reshape(2, 2, 4, 5, 6), 1) is None
    assert total("sum", images(1, 10, 3, 3).reshape(1, 5, 2, 3, 3), 1) is None  # of five


@pytest.mark.parametrize("other", [(16,), (2, 1, 1, 16), (2, 5, 6, 1), (1, 1, 1, 16), (5, 1, 1)])
def test_images_whose_channels_are_the_last_axis(other):
    x, y = torch.randn(2, 5, 6, 16), torch.randn(other)
    found = pointwise([("mul", 0, 1)], [x, y])
    if other == (5, 1, 1):
        assert found is None
    else:
        near(found, x.double() * y)
        assert found.stride() == (x * y).stride()


def test_rows_with_a_vector():
    x, y = torch.randn(2, 5, 16), torch.randn(16)
    found = pointwise([("add", 0, 1)], [x, y])
    near(found, x.double() + y)
    assert found.stride() == x.stride()


def test_parts_that_only_seem_to_fit():
    """An outer product, though both have as many values for a pixel."""
    a, b = torch.randn(2, 3, 1, 4, 4), torch.randn(2, 1, 3, 4, 4)
    assert pointwise([("mul", 0, 1)], [a, b]) is None
    y = images(2, 6, 5, 5)
    assert pointwise([("mul", 0, 1)], [y.unflatten(1, (1, 6)), y.unflatten(1, (2, 3))]) is None

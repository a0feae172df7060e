"""filter2d of torch tensors: the same numbers, gradients, and under torch.compile."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilewise
from tilewise.core import InvalidProblem
from tilewise.core.borders import BORDERS

SHAPES = ((9, 8), (7, 9, 3), (2, 6, 7, 3))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16, torch.int32,
                                   torch.float32, torch.float64])
def test_as_arrays(dtype):
    for shape in SHAPES:
        image = (torch.rand(shape) * 200).to(dtype)
        kernel = torch.randn(3, 4)
        ours = tilewise.filter2d(image, kernel, border="mirror", flip=True, anchor=(0, 3))
        theirs = tilewise.filter2d(image.numpy(), kernel.numpy(), border="mirror", flip=True,
                                   anchor=(0, 3))
        assert ours.dtype == dtype
        assert np.array_equal(ours.numpy(), theirs)


def test_layouts_are_kept():
    kernel = torch.randn(5, 5)
    nchw = torch.randn(2, 3, 20, 30)
    images = nchw.permute(0, 2, 3, 1)
    expected = tilewise.filter2d(images.contiguous(), kernel)
    assert expected.is_contiguous()
    found = tilewise.filter2d(images, kernel)
    assert torch.equal(found, expected)
    assert found.stride() == images.stride()
    last = nchw.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    assert tilewise.filter2d(last, kernel).is_contiguous()


def test_out_and_types():
    image, kernel = torch.rand(12, 13), torch.rand(3, 3)
    out = torch.empty(12, 13, dtype=torch.float64)
    assert tilewise.filter2d(image, kernel, out=out) is out
    assert out.dtype == torch.float64
    assert tilewise.filter2d(image, kernel, dtype=torch.uint8).dtype == torch.uint8
    with pytest.raises(InvalidProblem, match="gradient"):
        tilewise.filter2d(image, kernel.requires_grad_(), out=out)


@pytest.mark.parametrize("border", BORDERS)
def test_gradients(border):
    torch.manual_seed(0)
    for shape in SHAPES:
        image = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        kernel = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

        def run(image, kernel):
            return tilewise.filter2d(image, kernel, border=border, anchor=(2, 0), flip=True,
                                     value=0.7 if border == "constant" else None)

        assert torch.autograd.gradcheck(run, (image, kernel))


def test_gradients_of_larger_kernels_and_again():
    image = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    kernel = torch.randn(7, 9, dtype=torch.float64, requires_grad=True)

    def run(image, kernel):
        return tilewise.filter2d(image, kernel, border="mirror")

    assert torch.autograd.gradcheck(run, (image, kernel))
    assert torch.autograd.gradgradcheck(run, (image[:3, :2].detach().requires_grad_(),
                                              kernel[:2, :2].detach().requires_grad_()))


def test_the_operator_is_well_formed():
    image = torch.randn(2, 8, 9, 3, requires_grad=True)
    kernel = torch.randn(3, 3, requires_grad=True)
    for x in (image, image.detach().permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)):
        torch.library.opcheck(torch.ops.tilewise.filter2d.default,
                              (x, kernel, "reflect", 0.0, [1, 1], None, None))


def test_in_a_compiled_model():
    kernel = torch.ones(3, 3) / 9

    @torch.compile(backend="eager", fullgraph=True)
    def blurred(image):
        return tilewise.filter2d(image * 2, kernel, border="replicate") + 1

    image = torch.randn(16, 17)
    expected = tilewise.filter2d(image * 2, kernel, border="replicate") + 1
    torch.testing.assert_close(blurred(image), expected)


def test_other_devices_go_through_torch():
    """The code for them, on the CPU: no other device is at hand."""
    from tilewise.image.tensors import _by_torch

    image, kernel = torch.randn(2, 11, 12, 3), torch.randn(4, 3)
    for border in BORDERS:
        value = 1.5 if border == "constant" else None
        expected = tilewise.filter2d(image, kernel, border=border, value=value)
        found = _by_torch(image, kernel, border, value or 0.0, [2, 1], None)
        torch.testing.assert_close(found, expected)
    photo = (image * 90 + 100).clamp(0, 255).to(torch.uint8)
    expected = tilewise.filter2d(photo, kernel).int()
    found = _by_torch(photo, kernel, "reflect", 0.0, [2, 1], None).int()
    assert (found - expected).abs().max() <= 1


@pytest.mark.parametrize("change, message", [
    ({"image": torch.zeros(5)}, "image has shape"),
    ({"image": torch.zeros(5, 5, dtype=torch.int64)}, "needs one of bool, uint8"),
    ({"kernel": torch.ones(3)}, "kernel has shape"),
    ({"border": "edge"}, "border is 'edge'"),
    ({"anchor": (0, 3)}, "the anchor's column is 3"),
])
def test_what_is_refused(change, message):
    options = {"image": torch.zeros(5, 5), "kernel": torch.ones(3, 3), **change}
    with pytest.raises(InvalidProblem, match=message):
        tilewise.filter2d(options.pop("image"), options.pop("kernel"), **options)


def test_the_operator_is_there_from_the_start():
    import subprocess
    import sys

    code = "import torch, tilewise; print(torch.ops.tilewise.filter2d.default)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "tilewise.filter2d" in done.stdout

"""Images in another type by our kernel: as torch casts them, whatever their strides."""

from __future__ import annotations

import pytest
import torch

from tilewise.runtime.casting import cast
from tilewise.runtime.types import element_of

LAST = torch.channels_last
TYPES = [t for t in (torch.bfloat16, torch.float16) if element_of(t)]
pytestmark = pytest.mark.skipif(not TYPES, reason="this machine has no kernels for 16 bits")
types = pytest.mark.parametrize("dtype", TYPES or [torch.bfloat16])


def shapes() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 37, 41, 23, generator=generator)
    return [x, x.contiguous(memory_format=LAST), x.contiguous(memory_format=LAST)[:, 3:20],
            x[:1, :1, :1, :1].clone(), x[0, 0], torch.randn(1, 5, 7, 1001, generator=generator)]


@types
@pytest.mark.parametrize("number", range(6))
def test_both_ways(dtype: torch.dtype, number: int) -> None:
    x = shapes()[number]
    found = cast(x, dtype)
    assert found is not None
    assert found.dtype == dtype
    assert torch.equal(found, x.to(dtype))
    back = cast(found, torch.float32)
    assert back is not None
    assert torch.equal(back, found.float())
    if x.is_contiguous() or x.is_contiguous(memory_format=LAST):
        assert found.stride() == back.stride() == x.stride()


@types
def test_every_number_of_16_bits_is_kept(dtype: torch.dtype) -> None:
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = cast(every.view(256, 256), torch.float32)
    assert wide is not None
    back = cast(wide, dtype)
    assert back is not None
    want, back = every.float(), back.flatten().float()
    tiny = want.abs() < 2.0 ** -126  # zero, where the processor's instruction rounds
    assert torch.equal(back[~tiny].nan_to_num(7), want[~tiny].nan_to_num(7))
    assert torch.equal(back.isnan(), want.isnan())


@types
def test_what_is_torchs(dtype: torch.dtype) -> None:
    assert cast(torch.zeros(4, 4, dtype=torch.float64), dtype) is None
    assert cast(torch.zeros(4, 4, dtype=dtype), dtype) is None
    assert cast(torch.zeros(0, 4), dtype) is None
    assert cast(torch.zeros(8, 8)[:, ::2], dtype) is None

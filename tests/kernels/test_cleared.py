"""Zeros everywhere in a result, and nowhere beyond it."""

from __future__ import annotations

import pytest
from support.cases import ROWS

from tilewise.bench.guarded import launch_guarded
from tilewise.core.isa import ISA
from tilewise.kernels.cpu.between import cleared
from tilewise.kernels.cpu.emit.launch import launch_of


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("values", [1, 17, 64, cleared.WORTH - 1, cleared.WORTH + 1,
                                    3 * cleared.WORTH + 5])
def test_between_unmapped_pages(row: str, values: int) -> None:
    """Of results that begin as NaN."""
    kernel = launch_of(cleared.request_of(ISA[row]), cleared.sizes(values))
    for batch, threads, side in ((1, 1, "start"), (3, 2, "end")):
        made = launch_guarded(kernel, {}, {"y": batch * values}, batch, threads, side)
        assert not made["y"].ne(0).any()


@pytest.mark.parametrize("values", [1, 100, 1 << 20])
def test_parts_are_all_of_it(values: int) -> None:
    whole, parts, part = cleared.sizes(values)
    assert whole == values
    assert (parts - 1) * part < values + parts * cleared.LINE
    assert parts * part >= values

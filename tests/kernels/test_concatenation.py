"""Channels behind each other: every bit in its place, no byte beside them."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from support import faults

from tilewise.bench.guarded import UNTOUCHED, Mismatch, launch_guarded
from tilewise.core import Target
from tilewise.core.isa import ISA
from tilewise.core.schedule import Schedule
from tilewise.kernels.cpu.between import concatenation, pointwise
from tilewise.kernels.cpu.between.concatenation import Parts, make
from tilewise.kernels.cpu.emit.launch import launch_of
from tilewise.kernels.cpu.emit.requests import Request
from tilewise.runtime.concatenation import _share

HOST = Target.host(threads=2)
ROWS = [name for name, row in ISA.items() if row.lanes <= HOST.lanes
        and HOST.row.machines == row.machines and not row.matrix]
WORDS = ("x", "weight", "bias", "residual")
COLUMNS = ((1,), (3, 1), (16, 32), (24, 70, 5), (64, 1, 17, 130), (8, 8, 8, 8))


class Mutation(NamedTuple):
    apply: faults.Patch


def check(mutation: Mutation) -> None:
    with faults.patched(mutation.apply):
        check_guarded(ROWS[0])


def without_rest(*args: Any) -> None:
    if len(args) < 6:
        WHOLE(*args)


WHOLE = pointwise._vectors
MUTATIONS = {
    "the rest of a row is left out": Mutation(
        faults.replaced(pointwise, "_vectors", without_rest)),
    "the rest of a row is stored whole": Mutation(
        faults.replaced(pointwise, "_vectors", lambda *args: WHOLE(*args[:5]))),
    "the first part's pitch is the second's too": Mutation(faults.changed(
        concatenation, "sizes", lambda words: [*words[:9], words[8], *words[10:]])),
    "small numbers lose a task": Mutation(
        faults.replaced(concatenation, "ceil_div", lambda a, b: a // b or 1)),
}


def spread(x: torch.Tensor, gap: int) -> torch.Tensor:
    """Rows so many floats apart; nothing lies behind the last."""
    held = torch.nn.functional.pad(x.view(torch.int32), (0, gap), value=UNTOUCHED)
    return held.flatten()[:held.numel() - gap].view(torch.float32)


def check_guarded(row: str) -> None:
    for rows, columns in ((r, c) for c in COLUMNS for r in (1, 7, 1001)):
        torch.manual_seed(rows)
        parts = [torch.randint(-2**31, 2**31 - 1, (rows, c), dtype=torch.int32) for c in columns]
        gaps = [i + rows % 3 for i in range(len(columns))]
        pitch = sum(columns) + rows % 2 * 5
        words = concatenation.sizes(rows, columns, [c + gap for c, gap in zip(columns, gaps)],
                                    pitch)
        request = Request(make, Parts(len(columns)), Schedule(), ISA[row], (), True)
        kernel = launch_of(request, words)
        wanted = spread(torch.cat(parts, 1).view(torch.float32), pitch - sum(columns))
        given: Any = {word: spread(x.view(torch.float32), gap)
                      for word, x, gap in zip(WORDS, parts, gaps)}
        for side in ("start", "end"):
            y = launch_guarded(kernel, given, {"y": wanted.numel()}, 1, 2, side)["y"]
            if not torch.equal(y.view(torch.int32), wanted.view(torch.int32)):
                raise Mismatch(f"{columns} columns of {rows} rows on {row}: not their bits")


@pytest.mark.parametrize("row", ROWS)
def test_every_bit_in_its_place(row: str) -> None:
    check_guarded(row)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_concatenation")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])


def test_which_slices_share_memory():
    whole = torch.zeros(2, 10, 4, 4).to(memory_format=torch.channels_last)
    a = whole[:, 2:5]
    for first, stop, shares in ((5, 9, False), (5, 10, False), (0, 2, False), (4, 6, True),
                                (0, 3, True), (2, 5, True), (0, 10, True)):
        b = whole[:, first:stop]
        assert _share(a, b) == _share(b, a) == shares, (first, stop)
    assert not _share(whole[:1, :4, 1:], whole[:1, 4:, :3])
    assert not _share(whole[:1], whole[1:])
    assert _share(whole[:, :3], whole.permute(0, 2, 3, 1)[:, :, :, 5:])  # of another pitch

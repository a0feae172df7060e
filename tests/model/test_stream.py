"""tilewise.stream on the CPU: order, errors, bounds; a GPU runs the same code with overlap."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise.model import stream as module

MODEL = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU())


def batches(*sizes: int, layout: torch.memory_format = torch.contiguous_format):
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(n, 3, 10, 9, generator=rng).contiguous(memory_format=layout)
            for n in sizes]


@pytest.mark.parametrize("segment", [1, 2, 3, 64])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_results_come_in_order(segment, layout):
    given = batches(5, 1, 7, 2, layout=layout)
    found = list(tilewise.stream(MODEL, given, segment=segment))
    assert [y.shape[0] for y in found] == [5, 1, 7, 2]
    with torch.no_grad():
        for x, y in zip(given, found):
            torch.testing.assert_close(y, MODEL(x))


def test_an_optimised_model_is_streamed():
    fast, given = tilewise.optimize(MODEL), batches(5, 4)
    with torch.no_grad():
        for x, y in zip(given, tilewise.stream(fast, given, segment=2)):
            torch.testing.assert_close(y, MODEL(x), rtol=1e-4, atol=1e-5)


def test_nothing_is_read_before_it_is_needed():
    read = []

    def source():
        for i in range(100):
            read.append(i)
            yield torch.full((1, 3, 4, 4), float(i))

    results = tilewise.stream(MODEL, source(), segment=1)
    assert read == []
    next(results)
    assert len(read) <= module.FLYING + 1


def test_segments_do_not_share_results():
    """A later segment uses the memory of an earlier one, but not of what was handed over."""
    given = [torch.full((1, 3, 4, 4), float(i)) for i in range(8)]
    found = list(tilewise.stream(lambda x: x + 1, given, segment=1))
    assert [float(y.mean()) for y in found] == [float(i + 1) for i in range(8)]


def test_an_error_of_the_model_is_raised_in_its_place():
    def model(x):
        if x.mean() == 3:
            raise ValueError("three")
        return x

    results = tilewise.stream(model, [torch.full((1, 3, 4, 4), float(i)) for i in range(6)],
                              segment=1)
    assert [float(next(results).mean()) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="three"):
        next(results)


def test_an_error_of_the_source_is_raised_after_what_came_before():
    def source():
        yield from batches(2, 2)
        raise OSError("disk")

    results = tilewise.stream(MODEL, source(), segment=1)
    assert [next(results).shape[0] for _ in range(2)] == [2, 2]
    with pytest.raises(OSError, match="disk"):
        next(results)


def test_sizes_may_change_and_be_empty():
    given = [*batches(3), torch.randn(2, 3, 20, 20), *batches(0, 1)]
    found = list(tilewise.stream(MODEL, given, segment=2))
    assert [tuple(y.shape) for y in found] == [(3, 8, 10, 9), (2, 8, 20, 20), (0, 8, 10, 9),
                                               (1, 8, 10, 9)]


@pytest.mark.parametrize("segment, given", [(0, []), (2, ["no tensor"])])
def test_wrong_arguments_are_named(segment, given):
    with pytest.raises(tilewise.TilewiseError, match="needs"):
        list(tilewise.stream(MODEL, given, segment=segment))


def test_places_are_aligned():
    arena = module._Arena(torch.device("cpu"))
    for place in range(module.FLYING):
        assert arena.like(place, torch.empty(3, 5)).data_ptr() % module.ALIGNMENT == 0

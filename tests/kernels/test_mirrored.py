"""Weights prepared by strides: the same bits as from a tensor, and as torch packs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import ROWS

from tilewise.algorithms import ALGORITHMS, common
from tilewise.bench.guarded import launch_guarded
from tilewise.core import Problem, Schedule, Target
from tilewise.core.isa import ISA
from tilewise.kernels.cpu.conv.direct_geometry import Geometry
from tilewise.kernels.cpu.emit.launch import launch_of
from tilewise.kernels.cpu.prepare import direct, winograd
from tilewise.kernels.cpu.prepare.mirrored import Mirrored, mirror, mirrored

T = Target.host(threads=2)
BY_STRIDES = [a for a in ALGORITHMS if a.by_strides and a.is_for(T)]


def prepared(algorithm: Any, p: Problem, weight: Any, **tunables: Any) -> torch.Tensor:
    s = algorithm.default(p, T)
    q, of_weight = algorithm.weight_of(p, Schedule(**{**dict(s), **tunables}))
    made: torch.Tensor = algorithm.prepare(q, T, of_weight, weight)
    return made


SHAPES = [(5, 7, 3, 3), (33, 16, 2, 5), (16, 40, 3, 1), (33, 20, 1, 1)]


def problem(k: int, c: int, r: int, s: int) -> Problem:
    return Problem(1, k, 12, 12, c, r, s)


@pytest.mark.parametrize(("algorithm", "shape"), [
    (a, shape) for a in BY_STRIDES for shape in SHAPES if not a.reject(problem(*shape), T)],
    ids=lambda value: getattr(value, "name", str(value)))
@pytest.mark.parametrize("large", [0, 1 << 20])
def test_the_same_bits(algorithm: Any, shape: tuple[int, int, int, int], large: int,
                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "LARGE", large)  # by generated code, and by torch
    monkeypatch.setattr(direct, "is_worth", lambda isa: False)
    (k, c, r, s), p = shape, problem(*shape)
    whole = torch.randn(k, c, r, s)
    weights = [whole, whole.contiguous(memory_format=torch.channels_last),
               torch.randn(k, c, 2 * r, 2 * s)[:, :, ::2, 1::2]]
    for weight in weights:
        assert torch.equal(prepared(algorithm, p, Mirrored(weight, 1)),
                           prepared(algorithm, p, mirror(weight, 1)))


def test_who_does_it() -> None:
    assert {"cpu_winograd", "cpu_direct", "cpu_pointwise"} <= {a.name for a in BY_STRIDES}


def test_who_reads_by_strides() -> None:
    weight = torch.randn(8, 2, 3, 3)
    assert isinstance(mirrored(weight, 2, False), torch.Tensor)
    assert isinstance(mirrored(weight, 2, True), Mirrored)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_groups_of_a_mirrored_weight(groups: int) -> None:
    """Each group's filters lie behind those of the group before."""
    algorithm: Any = next(a for a in BY_STRIDES if a.name == "cpu_direct")
    p = Problem(1, 18 * groups, 12, 12, 20 * groups, 3, 3, groups=groups)
    weight = torch.randn(18 * groups, 20, 3, 3)
    q, s = algorithm.weight_of(p, algorithm.default(p, T))
    g = algorithm._geometry(q, T, s)
    for form in (weight, weight.contiguous(memory_format=torch.channels_last)):
        assert torch.equal(direct.Packer(g, T)(Mirrored(form, groups)),
                           g.pack_weight(mirror(weight, groups)))


def test_small_weights_are_packed_by_code_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm: Any = next(a for a in BY_STRIDES if a.name == "cpu_direct")
    p, weight, packed = problem(5, 7, 3, 3), torch.randn(7, 5, 3, 3), []
    monkeypatch.setattr(direct, "is_worth", lambda isa: False)
    expected = prepared(algorithm, p, weight)
    monkeypatch.setattr(direct, "is_worth", lambda isa: True)
    whole = direct.Packer.into
    monkeypatch.setattr(direct.Packer, "into", lambda *args: packed.append(1) or whole(*args))
    assert torch.equal(prepared(algorithm, p, weight), expected)
    assert packed


def test_large_weights_bypass_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values; channels do not fill the last vectors."""
    algorithm: Any = next(a for a in BY_STRIDES if a.name == "cpu_winograd")
    p, weight = Problem(1, 19, 12, 12, 35, 3, 3), torch.randn(35, 19, 3, 3)
    expected = prepared(algorithm, p, weight)
    monkeypatch.setattr(winograd, "LARGE", 0)
    assert winograd.maker(p, algorithm.default(p, T), T.row) is winograd.make_streaming
    assert torch.equal(prepared(algorithm, p, weight), expected)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("k", "c", "taps", "groups", "vectors", "split"), [
    (33, 20, (3, 3), 1, 2, 1), (40, 24, (2, 1), 2, 3, 2), (7, 5, (1, 1), 1, 1, 1),
    (130, 48, (1, 1), 1, 3, 4), (16, 16, (1, 5), 1, 1, 1), (3, 64, (1, 1), 1, 4, 1)])
def test_panels_between_unmapped_pages(row: str, k: int, c: int, taps: tuple[int, int],
                                       groups: int, vectors: int, split: int) -> None:
    """Of weights whose filters, channels or neither lie side by side, read and written exactly."""
    p = Problem(1, c, 9, 9, k, *taps, groups=groups).weight
    g = Geometry(p, Schedule(vectors=vectors, split=split), ISA[row].lanes)
    words = [groups * split, p.group_k, g.slice_c, p.r, p.s, split, vectors, g.k_vectors]
    kernel = launch_of(direct.request_of(ISA[row]), words)
    plain = torch.randn(k, c // groups, *taps)
    for order in ((0, 1, 2, 3), (0, 2, 3, 1), (1, 2, 3, 0)):
        flat = plain.permute(order).contiguous()
        weight = flat.permute([order.index(axis) for axis in range(4)])
        assert torch.equal(weight, plain)
        strides = torch.tensor(
            (p.group_k * weight.stride(0), *weight.stride())).view(torch.float32)
        for threads, side in ((1, "start"), (2, "end")):
            made = launch_guarded(kernel, {"x": strides, "weight": flat.flatten()},
                                  {"y": groups * split * g.panel_floats}, 1, threads, side)
            assert torch.equal(made["y"], g.pack_weight(plain).flatten())

"""tilewise.filter2d against its definition, scipy.ndimage and OpenCV."""

from __future__ import annotations

import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from support.harness import in_process, sample
from support.on_disk import growth_on_disk

import tilewise
from tilewise.algorithms import FILTERS
from tilewise.bench.filter_cases import (
    SIZES,
    TYPES,
    Case,
    check,
    definition,
    guarded,
    judge,
    random_case,
    random_format,
    random_kernel,
    random_pixels,
    released,
)
from tilewise.core import InvalidProblem, NoAlgorithm, Target
from tilewise.core.filter import Filter
from tilewise.core.isa import available
from tilewise.core.lowrank import factors, rank_of
from tilewise.image.arrays import ENGINE
from tilewise.runtime.filters import View

CASES = sample(500, 156)  # of a process
IMAGES = sample(10, 6)  # of a format, which share their code
ROWS = [row.name for row in available() if row.name != "amx"]
SCIPY = {**{name: name for name in ("reflect", "nearest", "mirror", "wrap", "constant")},
         "zero": "constant", "replicate": "nearest"}


@pytest.fixture
def row(request, monkeypatch):
    """An instruction set for the whole process."""
    monkeypatch.setenv("TILEWISE_ISA", request.param)
    forget()
    yield request.param
    forget()


def forget() -> None:
    ENGINE.ready.clear()
    ENGINE.calls.clear()


def run_cases(seed: str) -> dict[str, Any]:
    """Random cases, some of each format: how often each algorithm ran, and what was drawn."""
    rng, seen, drawn = random.Random(seed), Counter(), []
    for number in range(CASES // IMAGES):
        format = random_format(rng, SIZES[number % len(SIZES):][:1])._replace(
            kind=TYPES[number % len(TYPES)])
        for i in range(IMAGES):
            with released():
                case = random_case(rng, format)
                print(case.text)
                seen[check(case, side="start" if i % 2 else "end")] += 1
                check_with_scipy(case)
                drawn.append((*format, case.border, case.image.ndim))
    return {"seen": seen, "drawn": drawn}


def check_with_scipy(case: Case) -> None:
    """The definition that cases are judged by, against another one."""
    from scipy import ndimage

    x, sizes = case.image.astype(np.float64), case.kernel.shape
    axes = {2: (0, 1), 3: (0, 1), 4: (1, 2)}[x.ndim]
    weights = np.expand_dims(case.kernel, [a for a in range(x.ndim) if a not in axes])
    anchor = case.anchor or (sizes[0] // 2, sizes[1] // 2)
    origin = [0] * x.ndim
    for axis, size, at in zip(axes, sizes, anchor):
        origin[axis] = at - size // 2
    function = ndimage.convolve if case.flip else ndimage.correlate
    # scipy 1.17 reflects at -1 what lies twice two sizes before an image; NumPy does not
    far = case.border == "reflect" and any(4 * x.shape[axis] <= size
                                           for axis, size in zip(axes, sizes))
    beside = [sizes[axes.index(a)] if far and a in axes else 0 for a in range(x.ndim)]
    theirs = function(np.pad(x, [(width, width) for width in beside], "symmetric"), weights,
                      mode=SCIPY[case.border], origin=origin,
                      cval=case.value or 0.0)
    theirs = theirs[tuple(slice(width, width + size) for width, size in zip(beside, x.shape))]
    np.testing.assert_allclose(definition(case), theirs, rtol=1e-9,
                               atol=1e-9 * (1 + abs(theirs).max()))


@pytest.mark.parametrize("isa, seeds", [("avx512", sample(2, 1)), ("avx2", 1), ("generic", 1)])
def test_random_cases_and_scipy(isa, seeds, monkeypatch):
    if isa not in ROWS:
        pytest.skip(f"this machine has no {isa}")
    pytest.importorskip("scipy")
    monkeypatch.setenv("TILEWISE_ISA", isa)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = list(pool.map(lambda seed: in_process("test_filter2d:run_cases", f"{isa} {seed}"),
                             range(seeds)))
    seen = sum((Counter(run["seen"]) for run in runs), Counter())
    assert sum(seen.values()) == CASES * seeds
    assert seen["filter_direct"] > CASES // 3
    assert seen["filter_separable"] > CASES // 40
    for run in runs:
        kinds, dtypes, channels, sizes, ranks, borders, axes = map(set, zip(*(
            [*format[:3], tuple(format[3]), *format[4:]] for format in run["drawn"])))
        assert kinds == dtypes == set(TYPES)
        assert (channels, sizes, ranks) == ({1, 3, 4}, set(SIZES), {0, 1, 2})
        assert (borders, axes) == (set(SCIPY), {2, 3, 4})
        assert len({tuple(map(str, format[:5])) for format in run["drawn"]}) >= 0.9 * CASES / IMAGES


def test_as_opencv():
    cv2 = pytest.importorskip("cv2")
    borders = {"zero": cv2.BORDER_CONSTANT, "reflect": cv2.BORDER_REFLECT,
               "mirror": cv2.BORDER_REFLECT_101, "replicate": cv2.BORDER_REPLICATE}
    rng, data = random.Random(6), np.random.default_rng(6)
    for i in range(sample(300, 120)):
        kind = rng.choice(("uint8", "uint8", "uint16", "int16"))
        shape = (rng.randint(1, 90), rng.randint(1, 90), *rng.choice(((), (3,), (4,))))
        image = random_pixels(shape, kind, data)
        (r, s), integers = rng.choice(SIZES), i % 2 == 0
        kernel = random_kernel(data, r, s, integers, rng.choice((0, 1)))
        border = rng.choice(tuple(borders))
        row, column = rng.randrange(r), rng.randrange(s)
        theirs = cv2.filter2D(image, -1, kernel.astype(np.float32), anchor=(column, row),
                              borderType=borders[border])
        ours = tilewise.filter2d(image, kernel.astype(np.float32), border=border,
                                 anchor=(row, column))
        off = abs(ours.astype(int) - theirs.reshape(shape).astype(int)).max()
        # sums of small integers are exact in both; OpenCV sums large kernels by Fourier transforms
        exact = integers and kind == "uint8" and r * s < 50
        assert off <= (0 if exact else 1), (kind, shape, kernel.shape, border, row, column)


def test_ties_go_to_even_and_the_rest_saturates():
    image = np.array([[1, 3, 5, 200, 255]], np.uint8)
    assert tilewise.filter2d(image, [[0.5]]).tolist() == [[0, 2, 2, 100, 128]]
    assert tilewise.filter2d(image, [[-1.0]]).tolist() == [[0] * 5]
    assert tilewise.filter2d(image, [[2.0]]).tolist() == [[2, 6, 10, 255, 255]]
    assert tilewise.filter2d(image, [[-300.0]], dtype=np.int16).tolist() == [
        [-300, -900, -1500, -32768, -32768]]
    nan = np.array([[np.nan, np.inf, -np.inf]], np.float32)
    assert tilewise.filter2d(nan, [[1.0]], dtype=np.uint8).tolist() == [[0, 255, 0]]


@pytest.mark.parametrize("row", ROWS, indirect=True)
@pytest.mark.parametrize("dtype", TYPES)
def test_every_pair_of_types(row, dtype):
    data = np.random.default_rng(1)
    for kind in TYPES:
        with released():
            image = guarded((19, 37), kind, "end")
            image[:] = random_pixels((19, 37), kind, data)
            kernel = random_kernel(data, 3, 3, False, 0)
            check(Case(image, kernel, "mirror", None, None, False, dtype, f"{kind} to {dtype}"))


@pytest.mark.parametrize("name", [a.name for a in FILTERS if "sum" in a.forms])
@pytest.mark.parametrize("row", ROWS, indirect=True)
def test_every_algorithm(row, name):
    """Ranks, borders and types through one algorithm; a floor of what it must accept."""
    rng, ran = random.Random(9), 0
    for _ in range(tried := sample(40, 20)):
        with released():
            case = random_case(rng, random_format(rng, ((5, 5), (7, 7), (11, 13))), 60)
            with suppress(NoAlgorithm):  # counted below
                check(case, name)
                ran += 1
    assert ran >= (tried // 4 if name == "filter_separable" else tried)


@pytest.mark.parametrize("name", ["filter_direct", "filter_separable"])
@pytest.mark.parametrize("row", ROWS, indirect=True)
def test_schedules(row, name):
    """A sample of the space, its ends included, on one image of several strips and bands."""
    algorithm = next(a for a in FILTERS if a.name == name)
    rng, data = random.Random(2), np.random.default_rng(2)
    h, w = 35, 700
    kernel = random_kernel(data, 7, 7, False, 1 if name == "filter_separable" else 0)
    p = Filter(1, h, w, 1, 7, 7, (3, 3), "reflect", rank=1 if "sep" in name else 0, in_lines=True)
    t = Target.host(threads=2)
    space, start = algorithm.space(p, t), algorithm.default(p, t)
    drawn = {space.sample(rng, start) for _ in range(14)} | {start}
    drawn |= {s for s in space if s.rows in (1, 16) and s.chunk in (1, 7) and s.strip == 256
              and s.vectors in (1, 4)}
    assert len(drawn) > 12
    with released():
        image = guarded((h, w), "float32", "end")
        image[:] = random_pixels((h, w), "float32", data)
        case = Case(image, kernel, "reflect", None, None, False, "float32", name)
        expected, x = definition(case), image[None, :, :, None]
        for s in drawn:
            y = guarded((h, w), "float32", "start")
            run = ENGINE.build_for(ENGINE.planner.plan(p, t, algorithm=name, schedule=s),
                                   View(x.strides), View(y[None, :, :, None].strides))
            run(x, y[None, :, :, None], run.prepare(kernel), 0.0)
            judge(Case(*[*vars(case).values()][:-1], str(s)), y, expected, run.plan.error)


def test_outputs_that_pass_the_caches_by():
    """Large enough to be streamed, from every offset into a cache line."""
    data, n = np.random.default_rng(3), 1 << 22
    image = data.standard_normal((n // 1024, 1024)).astype(np.float32)
    kernel = data.standard_normal((3, 3))
    expected = tilewise.filter2d(image[:, :1000], kernel, border="wrap")
    memory = np.full(n + 64, np.nan, np.float32)
    for offset in (0, 1, 5, 15):
        out = memory[offset:offset + n].reshape(image.shape)
        tilewise.filter2d(image, kernel, border="wrap", out=out)
        np.testing.assert_array_equal(out[:, 1:999], expected[:, 1:999])
        assert np.isnan(memory[:offset]).all()
        assert np.isnan(memory[offset + n:]).all()
        memory[:] = np.nan
    plan = last_plan()
    assert plan.problem.w == 1024
    assert plan.schedule.stream or plan.target.lanes < 16


def last_plan() -> Any:
    """Of the filter that was built last."""
    return next(reversed(ENGINE.ready._entries.values()))[0].plan


def test_same_bits_for_every_number_of_threads():
    import torch

    image = np.random.default_rng(4).standard_normal((301, 277, 3)).astype(np.float32)
    kernel = np.random.default_rng(5).standard_normal((9, 7))
    threads, found = torch.get_num_threads(), []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        found.append(tilewise.filter2d(image, kernel, border="mirror"))
    torch.set_num_threads(threads)
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_in_place_and_strange_outputs():
    image = np.random.default_rng(7).standard_normal((40, 50, 3)).astype(np.float32)
    kernel = np.ones((3, 3)) / 9
    expected = tilewise.filter2d(image, kernel)
    strange = np.zeros((40, 100, 3), np.float32)
    view = strange[:, ::2][:, ::-1]
    assert tilewise.filter2d(image, kernel, out=view) is view
    assert np.array_equal(view, expected)
    assert not strange[:, 1::2].any()
    planes = np.zeros((3, 40, 50), np.float32)
    tilewise.filter2d(image, kernel, out=planes.transpose(1, 2, 0))
    assert np.array_equal(planes.transpose(1, 2, 0), expected)
    assert tilewise.filter2d(image, kernel, out=image) is image
    assert np.array_equal(image, expected)


def test_empty_images():
    for shape in ((0, 5), (5, 0), (0, 4, 5, 3), (4, 5, 0)):
        assert tilewise.filter2d(np.zeros(shape, np.uint8), np.ones((3, 3))).shape == shape


@pytest.mark.parametrize("change, message", [
    ({"image": np.zeros(5)}, r"needs \(H, W\)"),
    ({"image": np.zeros((5, 5), np.int64)}, "image is int64, needs one of bool, uint8"),
    ({"image": np.zeros((5, 5), ">f4")}, "needs one of"),
    ({"kernel": np.ones(3)}, "kernel has shape"),
    ({"kernel": np.ones((0, 3))}, "kernel has shape"),
    ({"border": "symmetric"}, "border is 'symmetric'"),
    ({"anchor": (3, 0)}, "the anchor's row is 3"),
    ({"anchor": (0, -1)}, "the anchor's column is -1"),
    ({"dtype": np.int64}, "the result is int64, needs one of uint8"),
    ({"out": np.zeros((5, 4), np.float32)}, "out has shape"),
    ({"out": np.zeros((5, 5), np.uint8), "dtype": np.float32}, "need one type"),
    ({"out": np.broadcast_to(np.float32(0), (5, 5))}, "read-only"),
])
def test_what_is_refused(change, message):
    options = {"image": np.zeros((5, 5), np.float32), "kernel": np.ones((3, 3)), **change}
    with pytest.raises(InvalidProblem, match=message):
        tilewise.filter2d(options.pop("image"), options.pop("kernel"), **options)


def test_rank():
    data = np.random.default_rng(8)
    columns, rows = data.standard_normal((9, 2)), data.standard_normal((2, 7))
    assert rank_of(columns @ rows, "f32") == 2
    assert rank_of((columns @ rows).astype(np.float32), "f32") == 2
    assert rank_of(columns @ rows + 1e-5 * data.standard_normal((9, 7)), "f32") == 7
    assert rank_of(np.zeros((4, 5)), "f32") == 1
    assert rank_of(np.full((4, 5), np.nan), "f32") == 4
    left, right = factors(columns @ rows, 2)
    np.testing.assert_allclose(left @ right, columns @ rows, atol=1e-14)
    sobel = np.outer([1, 2, 1], [1, 0, -1])
    left, right = factors(sobel, 1)
    assert np.array_equal(left @ right, sobel)


def test_the_planner_chooses_by_rank_and_size():
    t = Target("cpu", "avx512", threads=2)

    def chosen(size: int, rank: int) -> str:
        p = Filter(1, 2048, 2048, 1, size, size, (0, 0), rank=rank)
        return ENGINE.plan_filter(p, t).algorithm

    assert chosen(3, 0) == "filter_direct"
    assert chosen(31, 1) == "filter_separable"
    assert chosen(31, 31) == "filter_direct"
    assert chosen(301, 301) == "filter_fft"
    small = Filter(1, 64, 64, 1, 5, 5, (2, 2), rank=1)
    measured = ENGINE.planner.plan(small, Target.host(threads=1), effort="measure")
    assert measured.source == "measured"
    ENGINE.planner.wisdom.forget()


def filter_on_disk(directory: str, size: int, kernel: int, rank: int) -> int:
    """Filters a memory-mapped image; how much the peak of anonymous memory grew."""
    weights = np.ones((kernel, kernel)) / kernel ** 2
    weights += np.eye(kernel) / kernel * (rank > 1)
    return growth_on_disk(directory, size,
                          lambda source, out: tilewise.filter2d(source, weights, out=out))


@pytest.mark.parametrize("kernel, rank", [(5, 5), (9, 1), (129, 129)])
def test_memory_stays_bounded(tmp_path, kernel, rank):
    grown = in_process("test_filter2d:filter_on_disk", str(tmp_path), 6000, kernel, rank)
    assert grown < 60 << 20  # the image has 36 MB, as float32 144 MB

"""Code with bounds checks: right results, and faults that it finds."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from typing import Any

import llvmlite.binding as llvm
import pytest
from support.pages import ROOT

from tilewise.algorithms import ALGORITHMS
from tilewise.core.isa import ISA
from tilewise.core.places import CHECKED, Place, placed
from tilewise.core.problem import Problem
from tilewise.core.schedule import Schedule
from tilewise.core.target import Target
from tilewise.kernels.cpu.between import norms
from tilewise.kernels.cpu.emit import checks, requests, threads
from tilewise.kernels.cpu.emit.requests import Request
from tilewise.planner.planner import inner_problem

# a memory, a mask, an offset and a word of a frame; the command runs 50
SEEDS = ("75", "33", "11", "55")
PROGRAM = """
import json, numpy as np, torch, tilewise
from tilewise.core.errors import OutOfBounds
from tilewise.core.places import Place
from tilewise.runtime import program, sweeps

def said(call):
    try:
        call()
        return "passed"
    except OutOfBounds as found:
        return str(found)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(),
                            torch.nn.MaxPool2d(3, 2, 1), torch.nn.Conv2d(16, 8, 3)).eval()
x = torch.randn(1, 3, 12, 13)
programs = []
run = program.Program.__call__
program.Program.__call__ = lambda self, inputs: programs.append(self) or run(self, inputs)
with torch.no_grad():
    fast, expected = tilewise.optimize(model, x), model(x)
    error = max(float((fast(x) - expected).abs().max()) for _ in range(4))
    for root in [p.root for p in programs[-1]._steps[-1].places if p.root.kind == "fresh"]:
        root.bytes -= 4
    in_a_row = said(lambda: fast(x))
image = np.arange(400, dtype=np.uint8).reshape(20, 20)
images = torch.ones(2, 9, 19, 21).permute(0, 3, 1, 2)
alone = said(lambda: tilewise.runtime.pools.max_pool2d(images, 3, 2, 1))
sweeps.address = lambda t: Place.of(t.data_ptr(), t.data_ptr(), t.nbytes - 4)
print(json.dumps({"error": error, "programs": len(programs), "in_a_row": in_a_row,
                  "alone": alone, "short": said(lambda: tilewise.runtime.pools.max_pool2d(
                      images, 3, 2, 1)),
                  "filter": int(tilewise.image.median(image, 3).sum())}))
"""


SHORT = """
import numpy as np
from tilewise import image
from tilewise.core.errors import OutOfBounds
from tilewise.core.places import Place
from tilewise.runtime import filters

pixels = np.random.default_rng(0).integers(0, 256, (64, 90), dtype=np.uint8)
out, placed = np.empty_like(pixels), filters.placed

def short(first, *rest):
    place = placed(first, *rest)
    return Place.of(int(place), place.start, 10) if int(first) == out.ctypes.data else place

filters.placed = short
for run in (lambda: image.median(pixels, 25, output=out),
            lambda: image.median(pixels, 3, output=out),
            lambda: image.uniform(pixels, 5, output=out),
            lambda: image.gaussian(pixels, 1.0, output=out)):
    try:
        run()
        print("passed")
    except OutOfBounds:
        print("found")
"""
LATER = """
import os
import torch
import tilewise

os.environ["TILEWISE_CHECK"] = "1"  # too late for this process, and for those that it starts
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Conv2d(c, c + 8, 3) for c in (8, 16, 24, 32))).eval()
x = torch.randn(1, 8, 16, 16)
with torch.no_grad():
    expected, fast = model(x), tilewise.optimize(model)
    print(max(float((fast(x) - expected).abs().max()) for _ in range(3)) < 1e-5)
"""


def run_checked(*command: str) -> str:
    environment = {**os.environ, "TILEWISE_CHECK": "1", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True,
                          env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def request() -> Request:
    return Request(norms.make, Problem(1, 1, 1, 1, 1, 1, 1), Schedule(), ISA["generic"], (1, 1),
                   True)


def test_a_seeded_fault_is_found() -> None:
    lines = run_checked("scripts/prove_checks.py", "--seeds", *SEEDS).splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["found"] * len(SEEDS)


def test_users_are_told_what_was_found() -> None:
    found = json.loads(run_checked("-c", PROGRAM).splitlines()[-1])
    assert found["error"] < 1e-5
    assert found["programs"] > 0
    assert found["filter"] > 0
    assert found["alone"] == "passed"
    assert "pools" in found["short"]
    assert "of y, which has" in found["short"]
    assert "in rows, written by between/" in found["short"]
    assert found["in_a_row"].startswith("kernel ")
    assert "of y, which has" in found["in_a_row"]


def test_filters_that_write_too_far_are_found() -> None:
    assert run_checked("-c", SHORT).split() == ["found"] * 4


def test_the_mode_is_that_of_the_start(tmp_path: Any) -> None:
    environment = {**os.environ, "TILEWISE_CHECK": "0", "TILEWISE_CACHE_DIR": str(tmp_path)}
    for code in (LATER, LATER.replace('"] = "1"', '"] = "0"')):  # both by the same files
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              env=environment)
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]


def test_checked_code_has_another_key_and_plain_code_no_checks(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests.places, "CHECKED", False)
    plain, key = request().module(), request().key
    assert plain.sites is None
    monkeypatch.setattr(requests.places, "CHECKED", True)
    checked = request().module()
    assert request().key != key
    assert checked.sites
    assert {site.verb for site in checked.sites} == {"loads", "stores"}
    assert str(plain.ir).count("load") < str(checked.ir).count("load")


def test_checked_code_of_the_matrix_unit_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be run only where there is one."""
    monkeypatch.setattr(requests.places, "CHECKED", True)
    p = Problem.parse("n1c64h9w9k64r3s3p1_f32_forward+bias")
    t = Target("cpu", "amx", 2, l1=48 << 10, l2=2 << 20, l3=32 << 20)
    algorithm: Any = next(a for a in ALGORITHMS if a.name == "cpu_direct_bf16")
    inner = inner_problem(algorithm, p)
    module = algorithm.request(inner, t, algorithm.default(inner, t)).module()
    llvm.parse_assembly(str(module.ir)).verify()
    tiles = re.findall(r"call void @\"?llvm.x86.tile(?:load|store)d\w*\"?\(.*", str(module.ir))
    assert tiles
    # the address and the pitch are what a check chose
    assert all(len(re.findall(r"%\"?[.\w]+", text)) == 2 for text in tiles), tiles[0]


@pytest.mark.skipif(CHECKED, reason="this process checks")
def test_the_mode_is_off_by_default() -> None:
    assert type(requests.places.address(_Tensor())) is int


class _Tensor:
    def data_ptr(self) -> int:
        return 64


def test_a_frame_has_a_word_for_the_table() -> None:
    assert threads.FOUND < checks.CHECKS < threads.SIZES
    assert ctypes.sizeof(threads.Frame) == 8 * checks.FRAME
    assert checks.ROWS + 2 * threads.MASK + 1 < checks.ZEROS


@pytest.mark.parametrize("shape, strides, memory", [
    ((2, 3), (12, 4), (1000, 24)),
    ((2, 3), (-12, 4), (988, 24)),
    ((2, 3), (24, -8), (984, 44)),
    ((0, 3), (12, 4), (1000, 0)),
])
def test_a_place_is_in_the_memory_of_its_array(shape: Any, strides: Any, memory: Any) -> None:
    place = placed(1000, shape, strides, 4)
    assert (place, place.start, place.bytes) == (1000, *memory)
    moved: Any = place + 8
    assert (moved, moved.start, moved.bytes) == (1008, *memory)
    assert type(8 + place) is Place

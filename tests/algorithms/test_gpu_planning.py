"""Plans for GPUs on a machine without one, without Triton and without a driver."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from support.harness import random_problem
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewise
from tilewise import Problem, Target, TilewiseError
from tilewise.algorithms import ALGORITHMS
from tilewise.algorithms.gpu_table import KINDS, TABLE, products_between, rows
from tilewise.algorithms.gpu_winograd import MOST_SCRATCH, GpuWinograd
from tilewise.conv import devices
from tilewise.conv.running import ENGINE
from tilewise.core.gpu import GPUS
from tilewise.models import vgg16
from tilewise.planner.planner import inner_problem

GPU = [a for a in ALGORITHMS if a.device == "cuda"]
DIRECTIONS = ("forward", "backward_data", "backward_weight")
LAYER = "n8c64h56w56k128r3s3p1_{}_{}"
each_gpu = pytest.mark.parametrize("gpu", GPUS)


def test_importing_tilewise_does_not_import_triton():
    code = ("import sys, tilewise, torch\n"
            "gpu = tilewise.Target.gpu('sm_90')\n"
            "tilewise.explain('n1c8h8w8k8r3s3p1_f16_forward', target=gpu)\n"
            "tilewise.conv2d(torch.randn(1, 4, 8, 8), torch.randn(4, 4, 3, 3))\n"
            "tilewise.optimize(torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3)))\n"
            "assert not [name for name in sys.modules if name.split('.')[0] == 'triton']\n"
            "assert 'tilewise.kernels.gpu' not in sys.modules\n")
    subprocess.run([sys.executable, "-c", code], check=True)


@each_gpu
@pytest.mark.parametrize("algorithm", GPU, ids=lambda a: a.name)
def test_every_default_is_legal_and_costs_something(gpu, algorithm):
    rng, t, planned = random.Random(gpu), Target.gpu(gpu), 0
    for _ in range(60):
        p = random_problem(rng, flops=1e9).with_(
            dtype=rng.choice(("f32", "f16", "bf16")), direction=rng.choice(DIRECTIONS))
        if p.direction != "forward":
            p = p.with_(epilogue=tilewise.Epilogue())
        if algorithm.name.startswith("gpu_winograd"):
            p = p.with_(r=3, s=3, stride=(1, 1), padding=(1,) * 4, dilation=(1, 1), groups=1)
        p = inner_problem(algorithm, p)
        if algorithm.reject(p, t):
            continue
        s = algorithm.default(p, t)
        assert s in algorithm.space(p, t)
        assert 0 < algorithm.error(p, t, s) < (0.02 if p.c >= 64 else 0.05)
        assert 0 < algorithm.cost(p, t, s) < math.inf
        assert algorithm.workspace(p, t, s) >= 0
        planned += 1
    assert planned >= 5 or algorithm.precision not in GPUS[gpu].precisions


def test_few_channels_are_taken_flat():
    for text, flat in (("n8c3h64w64k64r3s3p1_f16_forward", True), (LAYER.format("f16", "forward"),
                                                                  False)):
        plan = ENGINE.plan(Problem.parse(text), Target.gpu("sm_90"), algorithm="gpu_implicit_gemm")
        assert plan.schedule.flat is flat


@each_gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_table_has_every_product_of_the_gpu(gpu, direction):
    have = {kind for kind in KINDS if rows(direction, kind, gpu)}
    assert have == {"half", *GPUS[gpu].precisions}
    assert {name for name, *_ in TABLE[direction]} == set(KINDS)
    for kind in have:
        assert {row.flat for row in rows(direction, kind, gpu)} == {False, True}


def winograd(dtype: str, direction: str, **changes: object) -> tilewise.Plan:
    p = Problem.parse(LAYER.format(dtype, direction)).with_(**changes)
    return ENGINE.plan(p, Target.gpu("sm_90"), algorithm="gpu_winograd")


def test_winograd_computes_gradients_of_the_input_as_a_mirrored_problem():
    plan = winograd("f32", "backward_data")
    assert plan.inner.direction == "forward"
    assert (plan.inner.c, plan.inner.k) == (128, 64)


def test_winograd_rounds_half_types_only_in_its_smaller_tile():
    assert winograd("f32", "forward").schedule.tile == 4
    for dtype, most in (("f16", 4e-3), ("bf16", 2e-2)):
        plan = winograd(dtype, "forward")
        assert plan.schedule.tile == 2
        assert plan.error < most


def test_winograd_takes_no_more_scratch_for_a_larger_batch():
    algorithm, t = GpuWinograd(), Target.gpu("sm_90")
    for n in (1, 64, 4096):
        plan = winograd("f32", "forward", n=n)
        assert algorithm.workspace(plan.inner, t, plan.schedule) <= MOST_SCRATCH


@pytest.mark.parametrize("changes, reason", [
    ({"stride": (2, 2)}, "stride is (2, 2), needs 1"),
    ({"dilation": (2, 2)}, "dilation is (2, 2), needs 1"),
    ({"groups": 2}, "groups is 2, needs 1"),
    ({"r": 5, "s": 5}, "filter is 5x5, needs 3x3"),
    ({"direction": "backward_weight"}, "direction is backward_weight"),
    ({"n": 1, "h": 2500, "w": 2500}, "2**31 elements or more"),
])
def test_what_winograd_refuses(changes, reason):
    p = Problem.parse(LAYER.format("f32", "forward")).with_(**changes)
    assert reason in "; ".join(GpuWinograd().reject(p, Target.gpu("sm_90")))


@each_gpu
@pytest.mark.parametrize("shape", ["n32c256h56w56k256", "n1c512h14w14k3", "n2c128h7w7k256"])
def test_winograd_is_not_chosen_by_an_estimate(gpu, shape):
    p = Problem.parse(f"{shape}r3s3p1_f32_forward+bias+residual+relu+pool2")
    assert "winograd" not in ENGINE.plan(p, Target.gpu(gpu)).algorithm


@each_gpu
def test_winograd_has_products_for_every_kind(gpu):
    for kind in ("half", *GPUS[gpu].precisions):
        assert len(products_between(kind, gpu)) >= 2


@pytest.mark.parametrize("setting, admitted, refused", [
    ("highest", "gpu_implicit_gemm", "gpu_implicit_gemm_tf32"),
    ("high", "gpu_implicit_gemm_tf32", "none"),
])
def test_torchs_precision_setting_decides_which_products_may_be_used(setting, admitted, refused):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        found = {c.algorithm: c for c in tilewise.explain(
            LAYER.format("f32", "forward"), target=Target.gpu("sm_90")).candidates}
    finally:
        torch.set_float32_matmul_precision(before)
    assert found[admitted].plan
    assert refused not in found or "products keep 11 bits" in "; ".join(found[refused].reasons)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_types_are_admitted_whatever_the_setting(dtype):
    found = tilewise.explain(LAYER.format(dtype, "forward"), target=Target.gpu("sm_90")).candidates
    plans = {c.algorithm for c in found if c.plan}
    assert {"vendor", "gpu_implicit_gemm"} <= plans


def test_amd_has_no_tf32():
    found = {c.algorithm: c for c in tilewise.explain(
        LAYER.format("f32", "forward"), target=Target.gpu("gfx942")).candidates}
    assert "needs one that gfx942 has" in found["gpu_implicit_gemm_tf32x3"].reasons[0]
    assert found["gpu_implicit_gemm_bf16x6"].plan


def test_unknown_architectures_are_torchs():
    plan = ENGINE.plan(Problem.parse(LAYER.format("f16", "forward")), Target.gpu("sm_75"))
    assert plan.algorithm == "vendor"
    assert str(plan.target) == "cuda:sm_75"


def test_too_large_tensors_are_refused():
    p = Problem.parse("n4096c64h224w224k64r3s3p1_f16_forward")
    assert "fewer than 2**31" in GPU[0].reject(p, Target.gpu("sm_90"))[0]


def test_timing_without_a_driver_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    with pytest.raises(TilewiseError, match="needs a GPU and its driver"):
        tilewise.explain(LAYER.format("f16", "forward"), target=Target.gpu("sm_90"),
                         effort="measure")


def test_the_benchmark_says_in_one_line_that_there_is_no_driver(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    pytest.importorskip("typer")
    from tilewise.cli import main

    assert main(["bench", "--device", "cuda"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said == ("bench --device cuda needs a GPU and its driver; torch finds none on this "
                    "machine")


@pytest.mark.parametrize("found, hip, name", [
    (SimpleNamespace(major=9, minor=0), None, "cuda:sm_90"),
    (SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-"), "6.3", "cuda:gfx942"),
    (SimpleNamespace(major=7, minor=5), None, "cuda:sm_75"),
])
def test_a_tensor_names_its_gpu(found, hip, name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(devices, "find_spec", lambda name: object())
    devices._gpu.cache_clear()
    try:
        assert str(devices.target_of(_fake("cuda"))) == name
        monkeypatch.setattr(devices, "find_spec", lambda name: None)
        devices._gpu.cache_clear()
        assert "without triton" in str(devices.target_of(_fake("cuda")))
    finally:
        devices._gpu.cache_clear()


def _fake(device: str) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(2, 8, 12, 12, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_fake_tensors_on_a_gpu_pass_through(dtype, layout):
    with FakeTensorMode():
        x = torch.empty(2, 8, 12, 12, device="cuda", dtype=dtype).to(memory_format=layout)
        weight = torch.empty(16, 8, 3, 3, device="cuda", dtype=dtype)
        y = tilewise.conv2d(x, weight, padding=1, activation="relu", pool=2)
        assert y.device.type == "cuda"
        assert y.shape == (2, 16, 6, 6)
        assert y.dtype == dtype
        assert y.is_contiguous(memory_format=layout)
        # called by its name: without a driver, torch aborts at any autograd.Function on a GPU
        grads = torch.ops.tilewise.conv2d_backward(
            torch.empty(2, 16, 12, 12, device="cuda", dtype=dtype), x, weight, None, [1, 1],
            [1, 1, 1, 1], [1, 1], 1, None, 1, [True, True, True, False], None)
        assert [g.shape for g in grads[:3]] == [x.shape, weight.shape, (16,)]
        assert {g.device.type for g in grads} == {"cuda"}


def test_the_operator_passes_opcheck():
    x, weight = torch.randn(2, 8, 9, 9), torch.randn(4, 8, 3, 3)
    torch.library.opcheck(torch.ops.tilewise.conv2d.default,
                          (x, weight, torch.randn(4), None, [1, 1], [1, 1, 1, 1], [1, 1], 1,
                           "relu", 1, None, None))


def test_the_operator_passes_opcheck_on_a_gpu_that_is_not_there():
    with FakeTensorMode():
        x, weight = (torch.empty(shape, device="cuda") for shape in ((2, 8, 9, 9), (4, 8, 3, 3)))
        bias = torch.empty(4, device="cuda")
    found = torch.library.opcheck(torch.ops.tilewise.conv2d.default,
                                  (x, weight, bias, None, [1, 1], [1, 1, 1, 1], [1, 1], 1, "relu",
                                   2, None, None))
    assert len(found) >= 4
    assert set(found.values()) == {"SUCCESS"}


def test_an_optimised_vgg16_is_exported_for_a_gpu_that_is_not_there():
    with torch.device("meta"):
        model = vgg16().eval()
    with FakeTensorMode(), torch.no_grad():
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                there = torch.empty(parameter.shape, device="cuda")
                setattr(module, name, torch.nn.Parameter(there, requires_grad=False))
        x = torch.empty(2, 3, 224, 224, device="cuda")
        fast = tilewise.optimize(model)
        assert fast(x).device.type == "cuda"
        exported = torch.export.export(fast, (x,))
    calls = [node for node in exported.graph.nodes if node.op == "call_function"]
    ours = [node for node in calls if node.target is torch.ops.tilewise.conv2d.default]
    assert [node.args[8] for node in ours] == ["relu"] * 13
    assert sum(node.args[9] == 2 for node in ours) == 5
    assert {node.meta["val"].device.type for node in calls} == {"cuda"}
    assert calls[-1].meta["val"].shape == (2, 1000)

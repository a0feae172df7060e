"""Models of the zoo in other engines, through one ONNX file: each as it does its best."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Run = Callable[[], Any]


def exported(model: nn.Module, x: Tensor, directory: Path) -> Path:
    path = directory / "model.onnx"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), str(path), dynamo=False, opset_version=17)
    return path


def onnxruntime(path: Path, x: Tensor, threads: int) -> Run:
    import onnxruntime as engine

    options = engine.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = engine.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    given = {session.get_inputs()[0].name: x.numpy()}
    return lambda: [torch.from_numpy(y) for y in session.run(None, given)]


def openvino(path: Path, x: Tensor, threads: int, **hints: str) -> Run:
    import openvino as engine

    model = engine.Core().compile_model(
        str(path), "CPU",
        {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", **hints})
    request = model.create_infer_request()
    request.set_input_tensor(0, engine.Tensor(x.numpy(), shared_memory=True))

    def run() -> Any:
        request.infer()
        return [torch.from_numpy(request.get_output_tensor(i).data)
                for i in range(len(model.outputs))]

    return run


ENGINES: dict[str, Callable[[Path, Tensor, int], Run]] = {
    "onnxruntime": onnxruntime,
    "openvino": lambda *a: openvino(*a, INFERENCE_PRECISION_HINT="f32"),
    "openvino_default": openvino}  # in the precision that it takes by itself


def engines(names: list[str], model: nn.Module, x: Tensor, threads: int) -> dict[str, Run]:
    """Those that take the model, by name."""
    if not names:
        return {}
    with tempfile.TemporaryDirectory() as directory:
        path = exported(model, x, Path(directory))
        return {name: ENGINES[name](path, x, threads) for name in names}

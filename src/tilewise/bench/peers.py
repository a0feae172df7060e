"""Other engines: how each is started so that it does its best, in float32 unless it is named."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.errors import NotInstalled, TilewiseError
from .contenders import Contender
from .graph import CannotExport, Graph
from .ncnn_file import write_ncnn
from .onnx_file import write_onnx

Start = Callable[[Graph, Tensor, int, Path], Contender]


def start(name: str, graph: Graph, x: Tensor, threads: int, directory: Path) -> Contender:
    """A peer with the model loaded, by its name; `tensorflow=PYTHON` names an interpreter."""
    name, _, interpreter = name.partition("=")
    if interpreter:
        from .remote import start_remote

        return start_remote(name, interpreter, graph, x, threads, directory)
    check(name)
    return PEERS[name][1](graph, x, threads, directory)


def check(name: str) -> None:
    """Complain about a peer that is unknown, or not installed."""
    name, _, interpreter = name.partition("=")
    if name in REMOTE:
        if not interpreter:
            raise NotInstalled(f"{name} runs in an interpreter of its own: "
                              f"--against {name}=/path/to/its/python")
        return
    if name not in PEERS:
        known = ", ".join(["torch", *PEERS, *(f"{other}=PYTHON" for other in REMOTE)])
        raise TilewiseError(f"peer is {name!r}, needs one of {known}")
    lacking = [package for package in PEERS[name][0] if not importlib.util.find_spec(package)]
    if lacking:
        raise NotInstalled(f"{name} needs {' and '.join(lacking)}: pip install 'tilewise[bench]'")


def _openvino(graph: Graph, x: Tensor, threads: int, directory: Path) -> Contender:
    return _openvino_with("openvino", {"INFERENCE_PRECISION_HINT": "f32"}, graph, x, threads,
                          directory)


def _openvino_default(graph: Graph, x: Tensor, threads: int, directory: Path) -> Contender:
    """In the precision that it takes by itself: bfloat16, where the processor has it."""
    return _openvino_with("openvino_default", {}, graph, x, threads, directory)


def _openvino_with(name: str, hints: dict[str, str], graph: Graph, x: Tensor, threads: int,
                   directory: Path) -> Contender:
    import openvino

    model = openvino.Core().compile_model(
        str(write_onnx(graph, directory / "model.onnx")), "CPU",
        {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", **hints})
    request, images = model.create_infer_request(), x.numpy()
    request.set_input_tensor(0, openvino.Tensor(images, shared_memory=True))

    def run() -> Any:
        request.infer()
        return request.get_output_tensor(0).data

    return Contender(name, name, run, lambda y: torch.from_numpy(y.copy()), images)


def _onnxruntime(graph: Graph, x: Tensor, threads: int, directory: Path) -> Contender:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(
        str(write_onnx(graph, directory / "model.onnx")), options,
        providers=["CPUExecutionProvider"])
    images = {"x": x.numpy()}
    return Contender("onnxruntime", "onnxruntime", lambda: session.run(None, images)[0],
                     torch.from_numpy)


def _ncnn(graph: Graph, x: Tensor, threads: int, directory: Path) -> Contender:
    import ncnn

    net = ncnn.Net()
    options = net.opt
    options.num_threads, options.use_vulkan_compute = threads, False
    for name in ("fp16_packed", "fp16_storage", "fp16_arithmetic", "bf16_storage", "bf16_packed"):
        if hasattr(options, f"use_{name}"):
            setattr(options, f"use_{name}", False)
    text, weights = write_ncnn(graph, directory / "model")
    if net.load_param(str(text)) or net.load_model(str(weights)):
        raise CannotExport("ncnn does not read the model")
    images = x.numpy()
    inputs = [ncnn.Mat(image) for image in images]  # it knows no batches

    def one(image: Any) -> Any:
        extractor = net.create_extractor()
        extractor.input("x", image)
        return extractor.extract("y")[1]

    def result(y: Any) -> Tensor:
        return torch.stack([torch.from_numpy(image.numpy().copy()) for image in y])

    return Contender("ncnn", "ncnn", lambda: [one(image) for image in inputs], result, images)


# not the script of that name, which installs packages and reports what it converted
MNN_CONVERT = "import sys, MNN, _tools; _tools.mnnconvert(sys.argv)"


def _mnn(graph: Graph, x: Tensor, threads: int, directory: Path) -> Contender:
    import MNN

    source = write_onnx(graph, directory / "model.onnx")
    converted = directory / "model.mnn"
    said = subprocess.run(
        [sys.executable, "-c", MNN_CONVERT, "-f", "ONNX", "--modelFile", str(source),
         "--MNNModel", str(converted), "--bizCode", "tilewise"], capture_output=True, text=True)
    if not converted.exists():
        raise CannotExport(f"MNN does not convert the model: {said.stdout[-300:]}")
    net = MNN.Interpreter(str(converted))
    session = net.createSession({"backend": "CPU", "numThread": threads, "precision": "high"})
    source_, sink = net.getSessionInput(session), net.getSessionOutput(session)
    images = x.numpy()
    given = MNN.Tensor(images.shape, MNN.Halide_Type_Float, images,
                       MNN.Tensor_DimensionType_Caffe)
    shape = tuple(sink.getShape())
    empty = torch.zeros(shape).numpy()
    taken = MNN.Tensor(shape, MNN.Halide_Type_Float, empty, MNN.Tensor_DimensionType_Caffe)

    def run() -> Any:
        source_.copyFrom(given)
        net.runSession(session)
        sink.copyToHostTensor(taken)
        return taken

    return Contender("mnn", "mnn", run, lambda y: torch.tensor(y.getNumpyData()).reshape(shape),
                     (images, empty, given))


# what must be importable, and what starts it
PEERS: dict[str, tuple[tuple[str, ...], Start]] = {
    "openvino": (("openvino", "onnx"), _openvino),
    "openvino_default": (("openvino", "onnx"), _openvino_default),
    "onnxruntime": (("onnxruntime", "onnx"), _onnxruntime),
    "ncnn": (("ncnn",), _ncnn),
    "mnn": (("MNN", "onnx"), _mnn),
}
REMOTE = ("tensorflow", "jax")

"""A graph as an ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .graph import Graph, Node

OPERATORS = {"conv": "Conv", "linear": "Gemm", "relu": "Relu", "maxpool": "MaxPool",
             "mean": "GlobalAveragePool", "flatten": "Flatten", "add": "Add"}


def write_onnx(graph: Graph, path: Path) -> Path:
    """Write the file; input x, output y, the batch fixed."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    tensors = [numpy_helper.from_array(array, _tensor(node, key))
               for node in graph.nodes for key, array in node.arrays.items()]
    last = graph.nodes[-1].name
    nodes = [helper.make_node(
        OPERATORS[node.op],
        [_operand(graph, name) for name in node.inputs]
        + [_tensor(node, key) for key in node.arrays],
        ["y" if node.name == last else node.name], node.name, **_attributes(node))
        for node in graph.nodes if node.op != "constant"]
    body = helper.make_graph(
        nodes, "tilewise",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(graph.input_shape))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], tensors)
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8  # what all of the peers read
    onnx.save(model, str(path))
    return path


def _operand(graph: Graph, name: str) -> str:
    made = next((node for node in graph.nodes if node.name == name), None)
    return _tensor(made, "value") if made is not None and made.op == "constant" else name


def _tensor(node: Node, key: str) -> str:
    return f"{node.name}.{key}"


def _attributes(node: Node) -> dict[str, Any]:
    a = node.attributes
    if node.op == "conv":
        return {"kernel_shape": list(node.arrays["weight"].shape[2:]), "strides": a["stride"],
                "pads": a["padding"] * 2, "dilations": a["dilation"], "group": a["groups"]}
    if node.op == "maxpool":
        return {"kernel_shape": a["size"], "strides": a["stride"], "pads": a["padding"] * 2}
    return {"linear": {"transB": 1}, "flatten": {"axis": 1}}.get(node.op, {})

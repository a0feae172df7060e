"""A graph as ncnn's pair of files: a text that lists layers, and their weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from .graph import CannotExport, Graph, Node

MAGIC = 7767517
RAW = b"\0\0\0\0"  # before weights: they follow as plain float32


def write_ncnn(graph: Graph, base: Path) -> tuple[Path, Path]:
    """Write both files; the input is the blob x, the output y."""
    text, weights = base.with_suffix(".param"), base.with_suffix(".bin")
    lines, blobs = _Layers(graph).lines()
    text.write_text("\n".join([str(MAGIC), f"{len(lines)} {blobs}", *lines]) + "\n")
    with weights.open("wb") as file:
        for node in graph.nodes:
            if node.op in ("conv", "linear"):
                file.write(RAW + node.arrays["weight"].tobytes() + node.arrays["bias"].tobytes())
    return text, weights


class _Layers:
    """Lines of the text; a blob that is read twice is split, a ReLU joins what is before it."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = graph.nodes
        self.readers = Counter(name for node in graph.nodes for name in node.inputs)
        self.taken: Counter[str] = Counter()
        self.blobs = 0
        self.out: list[str] = []

    def lines(self) -> tuple[list[str], int]:
        self._layer("Input", "x", [], "x", "")
        joined: dict[str, str] = {}
        last = self.nodes[-1].name
        for node in self.nodes:
            if node.name in joined:
                continue
            relu = self._relu_after(node)
            if relu is not None:
                joined[relu.name] = node.name
            result = relu.name if relu else node.name
            kind, parameters = _layer(node, relu is not None)
            self._layer(kind, node.name, [self._read(name) for name in node.inputs], result,
                        parameters, "y" if result == last else result)
        return self.out, self.blobs

    def _relu_after(self, node: Node) -> Node | None:
        if node.op not in ("conv", "linear") or self.readers[node.name] != 1:
            return None
        return next((other for other in self.nodes
                     if other.op == "relu" and other.inputs == (node.name,)), None)

    def _layer(self, kind: str, name: str, inputs: list[str], result: str, parameters: str,
               blob: str = "") -> None:
        blob = blob or result
        self.out.append(f"{kind} {name} {len(inputs)} 1 {' '.join([*inputs, blob])} "
                        f"{parameters}".rstrip())
        self.blobs += 1
        count = self.readers[result]
        if count > 1:
            parts = [f"{result}_part{i}" for i in range(count)]
            self.out.append(f"Split split_{name} 1 {count} {blob} {' '.join(parts)}")
            self.blobs += count

    def _read(self, name: str) -> str:
        if self.readers[name] == 1:
            return name
        self.taken[name] += 1
        return f"{name}_part{self.taken[name] - 1}"


def _layer(node: Node, relu: bool) -> tuple[str, str]:
    """ncnn's name of an operation, and its numbered parameters."""
    a = node.attributes
    if node.op == "conv":
        weight = node.arrays["weight"]
        k, _, r, s = weight.shape
        (down, across), (top, left), (dh, dw) = a["stride"], a["padding"], a["dilation"]
        text = (f"0={k} 1={s} 11={r} 2={dw} 12={dh} 3={across} 13={down} 4={left} 14={top} 5=1 "
                f"6={weight.size} 9={int(relu)}")
        return (("Convolution", text) if a["groups"] == 1
                else ("ConvolutionDepthWise", f"{text} 7={a['groups']}"))
    if node.op == "linear":
        weight = node.arrays["weight"]
        return "InnerProduct", f"0={weight.shape[0]} 1=1 2={weight.size} 9={int(relu)}"
    if node.op == "maxpool":
        (h, w), (down, across), (top, left) = a["size"], a["stride"], a["padding"]
        return "Pooling", (f"0=0 1={w} 11={h} 2={across} 12={down} 3={left} 13={top} 14={left} "
                           f"15={top} 5=1")
    known = {"relu": ("ReLU", ""), "mean": ("Pooling", "0=1 4=1"), "flatten": ("Flatten", ""),
             "add": ("BinaryOp", "0=0")}
    if node.op not in known:
        raise CannotExport(f"{node.op} is not written for ncnn")
    return known[node.op]

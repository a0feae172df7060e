"""Peers in interpreters of their own: TensorFlow and JAX do not live beside a pinned torch."""

from __future__ import annotations

import json
import subprocess
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import TilewiseError
from .contenders import Contender
from .graph import Graph

WORKER = Path(__file__).with_name("worker.py")


def start_remote(name: str, interpreter: str, graph: Graph, x: Tensor, threads: int,
                 directory: Path) -> Contender:
    """The peer in a process of `interpreter`; a call is one line to it and one back."""
    _write(graph, x, directory)
    try:
        process = subprocess.Popen(
            [interpreter, str(WORKER), name, str(directory), str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        raise TilewiseError(f"cannot start {interpreter}: {error}") from error
    worker = Worker(name, process)
    worker.ask("ready")
    return Contender(name, name, lambda: worker.ask("run"), lambda _: worker.result(directory))


class Worker:
    """A process that answers every line with one, "done"."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name, self.process = name, process
        weakref.finalize(self, process.kill)

    def ask(self, word: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # its last words are read below
        if self.process.stdout.readline().strip() != "done":
            self.process.kill()
            said = self.process.communicate()[1].strip().splitlines()
            raise TilewiseError(f"{self.name}: {said[-1] if said else 'its process has ended'}")

    def result(self, directory: Path) -> Tensor:
        self.ask("save")
        return torch.from_numpy(np.load(directory / "y.npy"))


def _write(graph: Graph, x: Tensor, directory: Path) -> None:
    """The graph as one JSON and one npz file, which need no torch to read."""
    nodes: list[dict[str, Any]] = [
        {"op": node.op, "name": node.name, "inputs": node.inputs, "attributes": node.attributes}
        for node in graph.nodes]
    (directory / "graph.json").write_text(json.dumps(nodes))
    arrays: Any = {f"{node.name}.{key}": array for node in graph.nodes
                   for key, array in node.arrays.items()}
    np.savez(directory / "arrays.npz", x=x.numpy(), **arrays)

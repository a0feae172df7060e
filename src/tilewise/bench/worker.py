"""Run by another interpreter, with TensorFlow or JAX and without torch or tilewise.

    python worker.py tensorflow|jax DIRECTORY THREADS

Reads graph.json and arrays.npz, then answers each line on stdin: ready, run, or save (to y.npy).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np


def evaluate(nodes: list[dict[str, Any]], arrays: Any, x: Any, ops: dict[str, Any]) -> Any:
    """The result of the last node; images are channels-last, as both engines like them."""
    values = {"x": x}
    for node in nodes:
        name = node["name"]
        own = {key.rpartition(".")[2]: arrays[key] for key in arrays
               if key.rpartition(".")[0] == name}
        operands = [values[i] for i in node["inputs"]]
        values[name] = ops[node["op"]](*operands, **node["attributes"], **own)
    return values[nodes[-1]["name"]]


def last(array: Any) -> Any:
    """Planes as channels-last."""
    return array.transpose(0, 2, 3, 1) if array.ndim == 4 else array


def flat(y: Any, transpose: Any, reshape: Any) -> Any:
    """In torch's order: channels before pixels."""
    return reshape(transpose(y, (0, 3, 1, 2)), (y.shape[0], -1))


def tensorflow(nodes: Any, arrays: Any, x: Any, threads: int) -> Any:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)

    def conv(y: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any,
             groups: int) -> Any:
        (top, left), filter_ = padding, tf.constant(weight.transpose(2, 3, 1, 0))
        sides = [[0, 0], [top, top], [left, left], [0, 0]]
        return tf.nn.bias_add(tf.nn.conv2d(y, filter_, stride, sides, dilations=dilation), bias)

    def maxpool(y: Any, size: Any, stride: Any, padding: Any) -> Any:
        (top, left) = padding
        y = tf.pad(y, [[0, 0], [top, top], [left, left], [0, 0]], constant_values=y.dtype.min)
        return tf.nn.max_pool2d(y, size, stride, "VALID")

    ops = {"conv": conv, "maxpool": maxpool, "relu": tf.nn.relu, "add": tf.add,
           "linear": lambda y, weight, bias: tf.linalg.matmul(y, tf.constant(weight.T)) + bias,
           "mean": lambda y: tf.reduce_mean(y, (1, 2), keepdims=True),
           "flatten": lambda y: flat(y, tf.transpose, tf.reshape),
           "constant": lambda value: tf.constant(last(value))}
    call = tf.function(lambda x: evaluate(nodes, arrays, x, ops), jit_compile=False)
    images = tf.constant(last(x))
    return lambda: call(images).numpy()


def jax(nodes: Any, arrays: Any, x: Any, threads: int) -> Any:
    os.environ.setdefault("NPROC", str(threads))
    import jax
    import jax.numpy as jnp
    from jax import lax

    def conv(y: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any,
             groups: int) -> Any:
        (top, left) = padding
        return bias + lax.conv_general_dilated(
            y, weight.transpose(2, 3, 1, 0), stride, [(top, top), (left, left)],
            rhs_dilation=dilation, dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups, precision="highest")

    def maxpool(y: Any, size: Any, stride: Any, padding: Any) -> Any:
        (top, left) = padding
        return lax.reduce_window(y, -jnp.inf, lax.max, (1, *size, 1), (1, *stride, 1),
                                 [(0, 0), (top, top), (left, left), (0, 0)])

    ops = {"conv": conv, "maxpool": maxpool, "relu": jax.nn.relu, "add": jnp.add,
           "linear": lambda y, weight, bias: jnp.matmul(y, weight.T, precision="highest") + bias,
           "mean": lambda y: jnp.mean(y, (1, 2), keepdims=True),
           "flatten": lambda y: flat(y, jnp.transpose, jnp.reshape),
           "constant": last}
    call = jax.jit(lambda x: evaluate(nodes, arrays, x, ops))
    images = jnp.asarray(last(x))
    return lambda: np.asarray(call(images).block_until_ready())


def main(peer: str, directory: Path, threads: int) -> None:
    nodes = json.loads((directory / "graph.json").read_text())
    with np.load(directory / "arrays.npz") as file:
        arrays = dict(file)
    call = {"tensorflow": tensorflow, "jax": jax}[peer](nodes, arrays, arrays["x"], threads)
    y: Any = None
    for line in sys.stdin:
        if line.strip() == "run":
            y = call()
        elif line.strip() == "save":
            result = y.transpose(0, 3, 1, 2) if y.ndim == 4 else y
            np.save(directory / "y.npy", np.ascontiguousarray(result))
        print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))

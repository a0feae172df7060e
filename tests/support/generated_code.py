"""Hashes of the IR that some schedules give on x86: in vectors, and on the matrix unit.

    PYTHONPATH=src python tests/support/generated_code.py > tests/support/generated_code.json

records the default schedules and their hashes; a change that is meant to alter generated code
records anew and says so. Schedules are recorded too, so that other estimates change nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from tilewise.algorithms import ALGORITHMS
from tilewise.core import Algorithm, Problem, Schedule, Target
from tilewise.planner.planner import inner_problem

ROWS = ("avx512", "avx2", "generic")
PROBLEMS = tuple(map(Problem.parse, (
    "n8c64h56w56k64r3s3p1_f32_forward+bias+relu",
    "n8c64h28w28k64r3s3p1_f32_forward+bias+relu+pool2",
    "n1c512h14w14k512r3s3p1_f32_forward+bias+residual+relu",
    "n8c256h28w28k300r3s3p1_f32_forward",
    "n2c33h17w19k70r3s3u2p1_f32_forward+bias",
    "n1c512h28w28k128r1s1_f32_forward+bias+relu",
    "n2c24h9w9k40r1s1u2_f32_forward",
    "n8c64h56w56k64r3s3p1_f32_backward_weight",
    "n8c512h14w14k512r3s3p1_f32_backward_weight",
    "n2c33h17w19k70r3s3u2p1_f32_backward_weight",
    "n2c24h28w28k40r1s1_f32_backward_weight",
)))


def recorded() -> Iterator[tuple[Algorithm, Problem, Target]]:
    """What is recorded: where few machines have a matrix unit, code that cannot be run is read."""
    yield from kernels()
    yield from (kernel for kernel in kernels(("amx", "avx512_bf16")) if kernel[0].unit == "matrix")


def kernels(rows: tuple[str, ...] = ROWS) -> Iterator[tuple[Algorithm, Problem, Target]]:
    for row in rows:
        target = Target("cpu", row, 2, l1=48 << 10, l2=2 << 20, l3=32 << 20)
        for p in PROBLEMS:
            for algorithm in ALGORITHMS:
                inner = inner_problem(algorithm, p)
                if algorithm.takes == "addresses" and not algorithm.reject(inner, target):
                    yield algorithm, inner, target


def name_of(algorithm: Algorithm, p: Problem, t: Target) -> str:
    return f"{algorithm.name} {p} {t.isa}"


def hash_of(algorithm: Any, p: Problem, t: Target, s: Schedule) -> str:
    module = algorithm.request(p, t, s).module()
    return hashlib.sha256(str(module.ir).encode()).hexdigest()[:16]


def record() -> dict[str, Any]:
    found = {}
    for kernel in recorded():
        s = kernel[0].default(*kernel[1:])
        found[name_of(*kernel)] = {"schedule": dict(s), "hash": hash_of(*kernel, s)}
    return found


if __name__ == "__main__":
    print(json.dumps(record(), indent=1))

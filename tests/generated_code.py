"""Hashes of the IR that default schedules give on the rows without a matrix unit.

    PYTHONPATH=src python tests/generated_code.py > tests/generated_code.json

records them; a change that is meant to alter generated code records anew and says so.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tilewise.algorithms import ALGORITHMS
from tilewise.core import Problem, Target
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
)))


def hashes(rows: tuple[str, ...] = ROWS, name: str | None = None) -> dict[str, str]:
    """The IR of every default kernel, by algorithm, problem and row (or by `name` for the row)."""
    found = {}
    for row in rows:
        target = Target("cpu", row, 2, l1=48 << 10, l2=2 << 20, l3=32 << 20)
        for p in PROBLEMS:
            for algorithm in ALGORITHMS:
                inner = inner_problem(algorithm, p)
                if algorithm.takes == "addresses" and not algorithm.reject(inner, target):
                    text = str(_module(algorithm, inner, target).ir)
                    key = f"{algorithm.name} {inner} {name or row}"
                    found[key] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def _module(algorithm: Any, p: Problem, t: Target) -> Any:
    s = algorithm.default(p, t)
    return algorithm._module(s).make(algorithm.seen_by_kernel(p), s, t.row)


if __name__ == "__main__":
    print(json.dumps(hashes(), indent=1))

"""Thousands of random problems on every emulated Arm machine, against float64.

    python scripts/emulate_arm.py -o arm.json                 # all machines, in half an hour
    python scripts/emulate_arm.py neon sve256 -o arm.json     # some; others stay in the file
    python scripts/emulate_arm.py neon --share 0.02 -o arm.json    # few problems, to try it

Needs the packages of tests/support/emulated.py. Kernels are compiled for Arm here and run under
qemu between unmapped pages: every algorithm in every direction, by default and by random
schedules, then the faults of tests/kernels/test_mutations.py and of the matrix unit, which must be
noticed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
COMMAND = "python scripts/emulate_arm.py -o arm.json"
# shapes of a machine, and batch sizes that share one; some shapes are also run without images
SHAPES = {"forward": (200, 8), "backward_data": (70, 10), "backward_weight": (70, 10)}
FLOPS = 2e5  # of an image with such products, which the emulator computes bit by bit
PRODUCTS = 1000  # problems for each number of products of a matrix unit
# machines on which faults are planted, and the tests that have them
FAULTS = {"neon": "test_emulated", "bf16": "test_emulated_matrix"}
CHUNKS = 2
LIMIT = 3600  # seconds of a process


def jobs(machine: str, row: str, share: float) -> list[tuple[str, tuple[Any, ...]]]:
    """What a job's problems are called, and a function of the tests in a process of its own."""
    from tilewise.core import ISA

    def some(count: int) -> int:
        return max(4, round(count * share))

    if unit := ISA[row].matrix:  # all other kernels of such a row are those of the row below it
        found = [("", ("test_amx:run_random", products, chunk, row, some(PRODUCTS), FLOPS))
                 for products in unit.products for chunk in range(CHUNKS)]
        found.append(("in several passes", ("test_amx:run_deep", row)))
    else:
        found = [("", ("support.cases:run_cases", row, direction, some(shapes), sizes, chunk,
                       CHUNKS, some(shapes))) for direction, (shapes, sizes) in SHAPES.items()
                 for chunk in range(CHUNKS)]
        found += [("masks", ("test_gradients:run_masks", row)),
                  ("masks", ("test_gradients:run_fused_masks", row)),
                  ("prepared weights", ("test_gradients:run_prepared", row)),
                  ("few rows", ("test_few_rows:run_random", row)),
                  ("phases", ("test_grids:run_random", row, max(12, some(80))))]
    return [(name, ("support.emulated:run", machine, *job)) for name, job in found]


def counted(name: str, ran: Any) -> dict[str, int]:
    """How many problems a job ran; those without a name are told apart by their algorithms."""
    if name:
        return {name: ran if isinstance(ran, int) else len(ran)}
    return {algorithm: some if isinstance(some, int) else len(set(some))
            for algorithm, some in ran.items()}


def emulate(machine: str, share: float) -> dict[str, Any]:
    """One row of the result."""
    from support.emulated import MACHINES
    from support.harness import in_process

    start, known = time.monotonic(), MACHINES[machine]
    asked = jobs(machine, known.row, share)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda job: in_process(*job[1], limit=LIMIT),
                                asked))
    counts: Counter[str] = Counter()
    for (name, _), result in zip(asked, results, strict=True):
        counts.update(counted(name, result["ran"]))
    return {"machine": machine, "isa": known.row, "cpu": known.cpu,
            "problems": sum(counts.values()), "algorithms": counts,
            "calls": sum(result["calls"] for result in results),
            "failures": [text for result in results for text in result["failures"]],
            "worst": max(result["worst"] for result in results),
            "seconds": round(time.monotonic() - start)}


def plant(tests: str) -> dict[str, Any]:
    """How many faults there are, and which of them nobody noticed."""
    from support import faults

    said = faults.outcomes(tests)
    unseen = []
    for name, lines in said.items():
        try:
            faults.assert_noticed(lines)
        except (AssertionError, ValueError):
            unseen.append(f"{name}: {lines}")
    return {"planted": len(said), "unseen": unseen}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machines", nargs="*")
    parser.add_argument("--share", type=float, default=1.0, help="of the problems")
    parser.add_argument("-o", type=Path, required=True, dest="path", help="result file")
    asked = parser.parse_args()
    if asked.share == 1:
        os.environ["TILEWISE_LONG"] = "1"  # before the tests are imported
    from support.emulated import MACHINES, missing

    if wrong := [*missing(), *(set(asked.machines) - set(MACHINES))]:
        print(f"not there: {', '.join(wrong)}; machines are {', '.join(MACHINES)}",
              file=sys.stderr)
        return 2
    rows = {}
    for name in asked.machines or MACHINES:
        rows[name] = emulate(name, asked.share)
        if name in FAULTS:
            rows[name]["faults"] = plant(FAULTS[name])
        print(json.dumps(rows[name]), flush=True)
        save(asked.path, rows)
    faults = [row["faults"]["unseen"] for row in rows.values() if "faults" in row]
    return int(any(row["failures"] for row in rows.values()) or any(faults))


def save(path: Path, rows: dict[str, Any]) -> None:
    """Beside what the file has of other machines."""
    from support.emulated import MACHINES

    from tilewise.bench.machine import versions

    old = json.loads(path.read_text())["rows"] if path.exists() else []
    known = {row["machine"]: row for row in old} | rows
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({
        "kind": "arm", "command": COMMAND, "date": datetime.date.today().isoformat(),
        "machine": {"versions": {name: text for name, text in versions().items()
                                 if name in ("python", "torch", "llvm", "llvmlite")}
                    | {"qemu": qemu_version()}},
        "settings": {}, "rows": [known[name] for name in MACHINES if name in known],
    }, indent=1) + "\n")


def qemu_version() -> str:
    said = subprocess.run(["qemu-aarch64-static", "--version"], capture_output=True, text=True,
                          check=True).stdout
    return said.split()[2]


if __name__ == "__main__":
    sys.exit(main())

"""Thousands of random problems on every emulated Arm machine, against float64.

    python scripts/emulate_arm.py -o arm.json                 # all machines, in half an hour
    python scripts/emulate_arm.py neon sve256 -o arm.json     # some; others stay in the file
    python scripts/emulate_arm.py neon --share 0.02 -o arm.json    # few problems, to try it

Needs the packages of tests/support/emulated.py. Kernels are compiled for Arm here and run under
qemu between unmapped pages: every algorithm without a matrix unit, in every direction, by default
and by random schedules, then the faults of tests/kernels/test_mutations.py, which must be noticed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
COMMAND = "python scripts/emulate_arm.py -o arm.json"
# shapes of a machine, and batch sizes that share one; some shapes are also run without images
SHAPES = {"forward": (200, 8), "backward_data": (70, 10), "backward_weight": (70, 10)}
FAULTS = "neon"  # the machine on which they are planted
CHUNKS = 2


def jobs(machine: str, row: str, share: float) -> list[tuple[Any, ...]]:
    """Functions of the tests, which run in processes of their own."""
    def some(count: int) -> int:
        return max(4, round(count * share))

    cases = [("support.cases:run_cases", row, direction, some(shapes), sizes, chunk, CHUNKS,
              some(shapes)) for direction, (shapes, sizes) in SHAPES.items()
             for chunk in range(CHUNKS)]
    others = [("test_gradients:run_masks", row), ("test_gradients:run_fused_masks", row),
              ("test_gradients:run_prepared", row), ("test_few_rows:run_random", row),
              ("test_grids:run_random", row, max(12, some(80)))]
    return [("support.emulated:run", machine, *job) for job in (*cases, *others)]


def emulate(machine: str, share: float) -> dict[str, Any]:
    """One row of the result."""
    from support.emulated import MACHINES
    from support.harness import in_process

    start, known = time.monotonic(), MACHINES[machine]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda job: in_process(*job), jobs(machine, known.row, share)))
    algorithms: dict[str, set[str]] = {}
    for result in results[:CHUNKS * len(SHAPES)]:
        for name, ran in result["ran"].items():
            algorithms.setdefault(name, set()).update(ran)
    masks, fused, weights, few, phases = (
        result["ran"] for result in results[CHUNKS * len(SHAPES):])
    counts = {name: len(problems) for name, problems in algorithms.items()}
    counts |= {"masks": masks + len(fused), "prepared weights": weights, "few rows": few,
               "phases": phases}
    return {"machine": machine, "isa": known.row, "cpu": known.cpu,
            "problems": sum(counts.values()), "algorithms": counts,
            "calls": sum(result["calls"] for result in results),
            "failures": [text for result in results for text in result["failures"]],
            "worst": max(result["worst"] for result in results),
            "seconds": round(time.monotonic() - start)}


def plant() -> dict[str, Any]:
    """How many faults there are, and which of them nobody noticed."""
    from support import faults

    said = faults.outcomes("test_emulated")
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
        if name == FAULTS:
            rows[name]["faults"] = plant()
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

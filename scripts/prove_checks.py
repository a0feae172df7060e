"""Checked code (TILEWISE_CHECK=1) must find every seeded fault that leaves its memory.

    python scripts/prove_checks.py -o checked_faults.json        # 50 faults, about six minutes
    python scripts/prove_checks.py --seeds 3 7                   # these alone

Seeds draw faults (offsets, masks, words of a frame, sizes of memories) in kernels of convolutions,
gradients, models and filters. One counts if code without checks is killed by a page that is not
mapped, or writes beside its memory. All calls also run with checks and without a fault: nothing may
be reported.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def proven(seeds: list[int], wanted: int) -> list[dict[str, Any]]:
    """What became of seeds, until so many of their faults are real."""
    from support import seeded

    rows: list[dict[str, Any]] = []
    for seed in seeds or itertools.count():
        row = seeded.prove(seed)
        rows.append(row)
        state = {None: "not real", True: "found", False: "MISSED"}[row["found"]]
        print(f"{seed:4} {state:9} {row['fault']}: {row['without']}", flush=True)
        if not seeds and sum(row["found"] is not None for row in rows) == wanted:
            break
    return rows


def false_alarms() -> list[str]:
    """Calls without a fault in which checks report something."""
    from support import seeded

    said = {call: seeded.ran(seeded.Fault(number), None, checked=True)
            for number, call in enumerate(seeded.CALLS)}
    return [f"{call}: {text}" for call, text in said.items() if text != "passed"]


def save(path: Path, rows: list[dict[str, Any]], alarms: list[str], seconds: int) -> None:
    from support import seeded

    from tilewise.bench.machine import facts
    from tilewise.bench.results import Result

    settings = {"calls": len(seeded.CALLS), "false_alarms": alarms, "seconds": seconds}
    Result("checked-faults", f"python scripts/prove_checks.py -o {path.name}",
           date.today().isoformat(), facts(os.cpu_count() or 1, limits=False), settings,
           rows).save(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=50, help="that are real")
    parser.add_argument("--seeds", type=int, nargs="*", default=[], help="these instead")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    os.environ.update({"TILEWISE_CHECK": "1", "OMP_WAIT_POLICY": "passive"})
    sys.path.insert(0, str(ROOT / "tests"))
    start = time.monotonic()
    rows = proven(args.seeds, args.faults)
    alarms = [] if args.seeds else false_alarms()
    seconds = round(time.monotonic() - start)
    if args.output:
        save(args.output, rows, alarms, seconds)
    real = [row for row in rows if row["found"] is not None]
    missed = [row for row in real if not row["found"]]
    print(f"{len(rows)} faults drawn, {len(real)} leave their memory, {len(missed)} of these "
          f"missed, {len(alarms)} false alarms, {seconds} s")
    for text in [row["fault"] for row in missed] + alarms:
        print(text)
    return 1 if missed or alarms else 0


if __name__ == "__main__":
    sys.exit(main())

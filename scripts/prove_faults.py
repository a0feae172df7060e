"""Kills, hostile files and scarce resources: nothing is lost, executed or left hanging.

    python scripts/prove_faults.py -o faults.json                # 500 kills, 2,000 files
    python scripts/prove_faults.py --kills 10 --files 30 --only compile wisdom

Work is ended by SIGKILL, half of the times at a random moment and half before a random change of a
file. Afterwards all files can be read, all that had been saved is there, and the next run is right.
Files of every kind are spoilt by a grammar, as bytes and on disk; each is used or refused. And the
same work is done on a full disk, on a read-only one and with little memory. Kills and files that
the result file has without a fault are not run again.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SHARES = {"compile": 0.25, "plans": 0.3, "bundle": 0.12, "infer": 0.18, "train": 0.15}


def kills(count: int, only: list[str], place: Path, seed: int,
          known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from support import killed

    rows, left = [], count
    for i, (name, share) in enumerate(SHARES.items()):
        mine = left if i == len(SHARES) - 1 else round(count * share)
        left -= mine
        done = [row for row in known if row["what"] == killed.WORKS[name].name]
        rows += done
        if mine and not done and (not only or name in only):
            (place / name).mkdir()
            rows.append(told({"part": "kills", **killed.campaign(name, mine, place / name, seed)}))
    return rows


def files(count: int, only: list[str], place: Path, seed: int,
          known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from support import hostile_files

    done = [row["what"] for row in known]
    kinds = [kind for kind in hostile_files.KINDS if kind.name not in done
             and (not only or kind.__name__.lower() in only)]
    (place / "files").mkdir()
    each = [count // len(hostile_files.KINDS) + (i < count % len(hostile_files.KINDS))
            for i in range(len(hostile_files.KINDS))]
    found = [told({"part": "files", **hostile_files.campaign(
        kind, mine, place / "files", 1_000_000 * seed)})
        for kind, mine in zip(hostile_files.KINDS, each) if kind in kinds and mine]
    return [*(row for row in known if row["part"] == "files"), *found]


def scarce(place: Path) -> list[dict[str, Any]]:
    from support import limited

    (place / "limits").mkdir()
    return [told({"part": "limits", **row}) for row in limited.campaign(place / "limits")]


def told(row: dict[str, Any]) -> dict[str, Any]:
    counts = ", ".join(f"{name} {value}" for name, value in row.items()
                       if name not in ("part", "what", "faults"))
    print(f"{row['part']}: {row['what']}: {counts}", flush=True)
    for fault in row.get("faults", []):
        print(f"    {fault}", flush=True)
    return row


def kept(path: Path | None, seed: int) -> tuple[list[dict[str, Any]], int]:
    """Rows of kills and files that a result file has without a fault; and the seconds."""
    from tilewise.bench.results import Result

    if path is None or not path.exists():
        return [], 0
    found = Result.load(path).of("faults", path=path)
    same = found.settings["seed"] == seed
    rows = [row for row in found.rows if row["part"] != "limits" and not row["faults"]]
    return (rows, found.settings["seconds"]) if same else ([], 0)


def save(path: Path, rows: list[dict[str, Any]], seconds: int, seed: int) -> None:
    from tilewise.bench.machine import facts
    from tilewise.bench.results import Result

    Result("faults", f"python scripts/prove_faults.py -o {path.name}", date.today().isoformat(),
           facts(os.cpu_count() or 1, limits=False), {"seconds": seconds, "seed": seed},
           rows).save(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--only", nargs="*", default=[], help="these kinds alone, without limits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    # one thread: a process whose OpenMP has threads cannot be forked
    os.environ.update({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"})
    sys.path.insert(0, str(ROOT / "tests"))
    start, only = time.monotonic(), [name.lower() for name in args.only]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        os.environ["TILEWISE_CACHE_DIR"] = f"{name}/cache"
        place = Path(name)
        known, before = kept(args.output, args.seed)
        rows = kills(args.kills, only, place, args.seed, known)
        rows += files(args.files, only, place, args.seed, known)
        rows += scarce(place) if not only or "limits" in only else []
    seconds = before + round(time.monotonic() - start)
    if args.output:
        save(args.output, rows, seconds, args.seed)
    faults = sum(len(row.get("faults", [])) for row in rows)
    print(f"{sum(row.get('kills', 0) for row in rows)} kills, "
          f"{sum(row.get('files', 0) for row in rows)} hostile files, {faults} faults, {seconds} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

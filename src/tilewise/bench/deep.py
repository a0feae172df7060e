"""`tilewise selftest --deep`: random problems, networks and filters, as many as one likes.

The work is cut into shards: a part, an ISA row and a seed. Each runs in a process of its own, so
that code which ends its process is told, too. What is done is in the result file, and is not done
again.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ..core.errors import TilewiseError
from ..core.isa import available
from ..core.progress import Tell, silent
from .results import Result, understood

PROBLEMS, SHARED = 800, 400  # of each algorithm in a shard; of those, with one code
NETWORKS, SIZES = 2000, 3  # of a shard, which are a family; most sizes that each runs with
LEARNING = 500  # networks of a shard that learn
FILTERS, FORMATS = 60, 3  # of a shard; types and sizes that filters share
LIMIT = 4 * 3600  # seconds of a shard, which may have little of a core
KIND = "deep"


class Shard(NamedTuple):
    """What one process does."""

    part: str
    row: str
    seed: int


def shards(parts: list[str], rows: list[str], seeds: range) -> Iterator[Shard]:
    for name, known in (("part", (parts, list(PARTS))), ("row", (rows, rows_here()))):
        unknown = [one for one in known[0] if one not in known[1]]
        if unknown:
            raise TilewiseError(f"{name} is {unknown[0]!r}, needs one of {', '.join(known[1])}")
    return (Shard(part, row, seed) for seed in seeds for row in rows for part in parts)


def rows_here() -> list[str]:
    """ISA rows that this machine can run."""
    return [row.name for row in available() if row.name != "scalar"]


def run(wanted: list[Shard], path: Path, processes: int, checked: bool, command: str,
        machine: dict[str, Any], tell: Tell = silent) -> Result:
    """All shards that the file has not; it is written after each."""
    result = Result.load(path) if path.exists() else Result(
        KIND, command, date.today().isoformat(), machine, {"checked": checked}, [])
    if (result.kind, result.settings.get("checked")) != (KIND, checked):
        raise TilewiseError(f"{path} is of kind {result.kind!r} with {result.settings}, needs "
                            f"{KIND!r} with checked={checked}; name another file")
    _same_code(result, machine, path)
    with understood(path):
        done = {Shard(row["part"], row["row"], row["seed"]) for row in result.rows}
    left = [shard for shard in wanted if shard not in done]
    if left:
        result = replace(result, command=_joined(result.command, command))
    children = Children()
    with ThreadPoolExecutor(processes) as pool:
        running = [pool.submit(apart, shard, checked, children) for shard in left]
        try:
            for number, ended in enumerate(as_completed(running)):
                result.rows.append(ended.result())
                result.save(path)
                tell("testing", number, len(left))
        except BaseException:  # an interrupt, or a disk that is full: what is begun is worth little
            pool.shutdown(wait=False, cancel_futures=True)
            children.end()
            raise
    return result


def _same_code(result: Result, machine: dict[str, Any], path: Path) -> None:
    """A file counts tests of one processor and one version of everything."""
    for name in ("processor", "versions"):
        if result.machine.get(name) != machine.get(name):
            raise TilewiseError(f"{path} has tests of {name} {result.machine.get(name)}, this is "
                                f"{machine.get(name)}; name another file")


class Children:
    """Processes that end with the one that began them."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._lock, self._over = threading.Lock(), False

    def run(self, command: list[str], environment: dict[str, str], place: Path,
            limit: float) -> tuple[int, str, str]:
        """Exit code, and what it printed. Its standard input is a pipe, which it watches."""
        with open(place / "out", "w+") as out, open(place / "err", "w+") as err:
            with self._lock:
                if self._over:
                    return 1, "", "not begun"
                child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err,
                                         text=True, env=environment)
                self._running.add(child)
            try:
                code = child.wait(limit)
            except subprocess.TimeoutExpired:
                child.kill()
                raise
            finally:
                with self._lock, child:  # waits for it, and closes the pipe
                    self._running.discard(child)
            return code, (place / "out").read_text(), (place / "err").read_text()

    def end(self) -> None:
        with self._lock:
            self._over = True
            for child in self._running:
                child.kill()


def _end_with_parent() -> None:
    """However it ends: its end of the pipe is closed then."""
    def watch() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _joined(before: str, command: str) -> str:
    """All commands that made a file, in their order."""
    return before if command in before.split(" && ") else f"{before} && {command}"


def apart(shard: Shard, checked: bool, children: Children) -> dict[str, Any]:
    """A shard in a process of its own, with a cache of its own: nobody needs its code again."""
    start = time.monotonic()
    try:
        with TemporaryDirectory(prefix="tilewise-deep-") as place:
            environment = {**os.environ, "TILEWISE_ISA": shard.row, "OMP_WAIT_POLICY": "passive",
                           "TILEWISE_CHECK": str(int(checked)), "TILEWISE_CACHE_DIR": place}
            code, out, err = children.run([sys.executable, "-m", __name__, *map(str, shard)],
                                          environment, Path(place), LIMIT)
        found = json.loads(out.splitlines()[-1]) if code == 0 else _empty(
            f"{shard} ended with {code}: {err[-1000:]}")
    except subprocess.TimeoutExpired:
        found = _empty(f"{shard} took more than {LIMIT} s")
    return {**shard._asdict(), **found, "seconds": round(time.monotonic() - start, 1)}


def _empty(wrong: str) -> dict[str, Any]:
    return {"ran": {}, "runs": {}, "codes": 0, "cpu": 0.0, "worst": {}, "wrong": [wrong]}


class Found:
    """Counts and the worst share of a bound, by name.

    What runs with images of several sizes is counted once in `ran`, and each time in `runs`.
    """

    def __init__(self) -> None:
        self.ran: dict[str, int] = {}
        self.runs: dict[str, int] = {}
        self.codes, self.cpu = 0, 0.0  # compiled for them; seconds of a core
        self.worst: dict[str, float] = {}
        self.wrong: list[str] = []

    def add(self, name: str, share: float, count: int = 1, runs: int = 0) -> None:
        self.ran[name] = self.ran.get(name, 0) + count
        self.runs[name] = self.runs.get(name, 0) + (runs or count)
        self.worst[name] = max(self.worst.get(name, 0.0), share)


def _problems(shard: Shard, found: Found) -> None:
    from ..core.target import Target
    from .selftest import able_on, tried

    t = Target.host(isa=shard.row, threads=2)
    for algorithm in able_on(t):
        one = tried(algorithm.name, t, PROBLEMS, math.inf, f" on {shard.row}, {shard.seed}",
                    SHARED)
        if one.ran:
            found.add(algorithm.name, one.worst, one.ran[algorithm.name])
        found.wrong += one.wrong


def _networks(shard: Shard, found: Found) -> None:
    from .networks import Family, judged

    family = Family(f"{shard.seed} on {shard.row}")
    for seed in range(NETWORKS * shard.seed, NETWORKS * (shard.seed + 1)):
        try:
            share, bound, runs = judged(seed, family, SIZES)
            found.add("networks" if bound else "networks without a program", share, runs=runs)
        except Exception as problem:
            found.wrong.append(f"network {seed} on {shard.row}: {problem!r}")


def _learning(shard: Shard, found: Found) -> None:
    from .learning import Unable, learned
    from .networks import Family

    family = Family(f"{shard.seed} on {shard.row}")
    for seed in range(LEARNING * shard.seed, LEARNING * (shard.seed + 1)):
        try:
            found.add("networks that learn", learned(seed, family))
        except Unable:
            continue
        except Exception as problem:
            found.wrong.append(f"network {seed} on {shard.row}, learning: {problem!r}")


def _filters(shard: Shard, found: Found) -> None:
    from .filter_cases import checked, random_case, random_format, released

    rng = random.Random(f"filters on {shard.row}, {shard.seed}")
    for _ in range(FORMATS):
        format_ = random_format(rng)
        for number in range(FILTERS // FORMATS):
            with released():
                case = random_case(rng, format_, largest=100)
                try:
                    found.add(*checked(case, side="start" if number % 2 else "end"))
                except Exception as problem:
                    found.wrong.append(f"{case.text} on {shard.row}, {shard.seed}: {problem!r}")


PARTS: dict[str, Callable[[Shard, Found], None]] = {
    "problems": _problems, "networks": _networks, "learning": _learning, "filters": _filters}


def totals(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """By part and name: how many ran on each row, and the worst share of a bound on any."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        for name, count in row["ran"].items():
            one = found.setdefault((row["part"], name), {"ran": {}, "runs": 0, "worst": 0.0})
            one["ran"][row["row"]] = one["ran"].get(row["row"], 0) + count
            one["runs"] += row.get("runs", row["ran"])[name]  # files of 0.2 tell no runs
            one["worst"] = max(one["worst"], row["worst"][name])
    return found


def _main(shard: Shard) -> None:
    """What a shard's process does; on one core, since others have the rest."""
    import torch

    from ..kernels.cpu.emit import jit, workers

    torch.set_num_threads(1)
    workers.MOST = 0
    found = Found()
    PARTS[shard.part](shard, found)
    found.codes, found.cpu = jit.compiled, round(time.process_time(), 1)
    print(json.dumps(found.__dict__))


if __name__ == "__main__":
    _end_with_parent()
    _main(Shard(sys.argv[1], sys.argv[2], int(sys.argv[3])))

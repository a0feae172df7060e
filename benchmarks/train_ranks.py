"""Data-parallel training, many times: the losses of one process, and no rank that aborts.

    python benchmarks/train_ranks.py                                  # 200 runs; half an hour
    python benchmarks/train_ranks.py --runs 8 --ranks 2 -o train_ranks.json

Each run is `torchrun -m tilewise train` of a small net, with two and four ranks in turn. In every
fifth run one rank is ended by SIGKILL at a random moment. The job must then end by itself, a rank
that is left must say why, and the same command must go on; with two ranks to the bits of a run that
nothing disturbed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilewise.bench.machine import facts
from tilewise.bench.results import Result
from tilewise.training import checkpoint

IMAGES, BATCH, EPOCHS = 50, 16, 3  # the last batch of an epoch has two images
APART = 1e-4  # losses of ranks and of one process, relative
KILLED = 5  # every so many runs one rank is killed
LIMIT = 240  # seconds for a job, which must not hang
HUNG = -1000  # instead of an exit code
LOST = "lost the others"  # what a rank that is left says


@dataclass
class Found:
    """What the runs of one number of ranks gave."""

    runs: int = 0
    apart: float = 0.0
    killed: int = 0
    told: int = 0  # of those that were killed, how many said why they end
    others: int = 0  # weights that are not those of an undisturbed run
    exits: Counter = field(default_factory=Counter)  # of ranks that nobody killed


def draw(place: Path) -> None:
    """Images like Fashion-MNIST's, as idx files."""
    place.mkdir()
    for part, count in (("train", IMAGES), ("t10k", 16)):
        labels = np.arange(count, dtype=np.uint8) % 3
        images = np.random.default_rng(0).integers(0, 128, (count, 28, 28), dtype=np.uint8)
        images += labels[:, None, None] * np.uint8(60)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (place / f"{part}-{name}-ubyte").write_bytes(header + array.tobytes())


def start(data: Path, output: Path, ranks: int) -> subprocess.Popen:
    """A job; ranks have a second to tell why they end before torchrun ends them."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--monitor-interval", "1",
                "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "tilewise", "train", str(data), "-o", str(output),
         "--model", "lenet_b", "--batch", str(BATCH), "--epochs", str(EPOCHS), "--save-every", "2",
         "--lines-every", "1"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True)


def finish(job: subprocess.Popen) -> tuple[int, str]:
    """Its exit code and what it said on stderr."""
    try:
        said = job.communicate(timeout=LIMIT)[1]
    except subprocess.TimeoutExpired:
        job.terminate()  # torchrun ends its ranks
        return HUNG, job.communicate()[1]
    return job.returncode, said


def kill_a_rank(job: subprocess.Popen, chance: random.Random) -> None:
    """After some steps, at any moment of the next."""
    for _ in range(chance.randrange(2, 8)):
        assert job.stdout.readline(), "it ended before a rank could be killed"
    time.sleep(chance.uniform(0, 0.05))
    ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(chance.choice(ranks)), signal.SIGKILL)


def exits(said: str) -> list[int]:
    """Of the ranks that failed, as torchrun tells."""
    return [int(code) for code in re.findall(r"^ *exitcode *: (-?\d+)", said, re.MULTILINE)]


def one_run(data: Path, output: Path, ranks: int, kill: bool, chance: random.Random,
            found: Found) -> dict[str, Any] | None:
    """The checkpoint of a run, which was perhaps disturbed."""
    found.runs += 1
    if kill:
        found.killed += 1
        job = start(data, output, ranks)
        kill_a_rank(job, chance)
        code, said = finish(job)
        failed = exits(said)
        if -signal.SIGKILL in failed:  # ours
            failed.remove(-signal.SIGKILL)
        found.told += LOST in said
        found.exits.update(code for code in (*failed, *([HUNG] if code == HUNG else []))
                           if code < 0 and code != -signal.SIGTERM)
    code, said = finish(start(data, output, ranks))
    found.exits.update(exits(said) or ([code] if code else []))
    if code:
        print(said, file=sys.stderr)
        return None
    return checkpoint.load(output)


def same_bits(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["history"]["losses"] == other["history"]["losses"] and all(
        torch.equal(one["model"][name], value) for name, value in other["model"].items())


def compare(state: dict[str, Any], first: dict[str, Any], alone: list[float],
            found: Found) -> None:
    """Losses with those of one process, weights with those of the first run of as many ranks."""
    losses = state["history"]["losses"]
    assert len(losses) == len(alone), (len(losses), len(alone))
    found.apart = max(found.apart, *(abs(a - b) / abs(b) for a, b in zip(losses, alone)))
    found.others += not same_bits(state, first)


def measure(args: argparse.Namespace) -> dict[int, Found]:
    found = {ranks: Found() for ranks in args.ranks}
    first: dict[int, Any] = {}
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        draw(place / "data")
        code, said = finish(start(place / "data", place / "alone", 1))
        assert code == 0, said
        alone = checkpoint.load(place / "alone")["history"]["losses"]
        for number in range(args.runs):
            ranks = args.ranks[number % len(args.ranks)]
            kill = ranks in first and number // len(args.ranks) % KILLED == KILLED - 1
            output = place / f"run{number}"
            state = one_run(place / "data", output, ranks, kill, chance, found[ranks])
            if state is not None:
                compare(state, first.setdefault(ranks, state), alone, found[ranks])
            shutil.rmtree(output, ignore_errors=True)
            if sys.stderr.isatty() or number % 20 == 19:
                print(f"{number + 1} of {args.runs}: {found}", file=sys.stderr, flush=True)
            if args.output:
                save(args, found)
    return found


def rows(found: dict[int, Found]) -> list[dict[str, str]]:
    """A claim a line."""
    made = []
    for ranks, one in found.items():
        failed = sum(one.exits.values())
        aborted = one.exits[-signal.SIGABRT]
        made += [
            {"what": f"{one.runs} runs with {ranks} ranks", "wanted": "no rank aborts or fails",
             "found": f"{aborted} ended by SIGABRT, {failed - aborted} otherwise"},
            {"what": f"their losses against one process, {ranks} ranks",
             "wanted": f"within {APART:.0e}", "found": f"{one.apart:.0e} apart at most"},
            {"what": f"one of {ranks} ranks ended by SIGKILL, {one.killed} times",
             "wanted": "the job ends and says why; the next goes on"
                       + (" to the same bits" if ranks == 2 else ""),
             "found": f"said {one.told} times; {one.others} other weights"}]
    return made


def is_good(one: Found) -> bool:
    """More than two ranks may differ in bits: DDP regroups gradients after its first step."""
    return not sum(one.exits.values()) and one.apart <= APART and one.told == one.killed


def save(args: argparse.Namespace, found: dict[int, Found]) -> None:
    Result("claims", shlex.join(["python", *sys.argv]), datetime.date.today().isoformat(),
           facts(2, limits=False), {"images": IMAGES, "batch": BATCH, "epochs": EPOCHS},
           rows(found)).save(args.output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seed", type=int, default=0, help="of the moments of kills")
    parser.add_argument("-o", "--output", type=Path, help="a result file to write")
    args = parser.parse_args()
    found = measure(args)
    print(*(f"{row['what']}: {row['found']}" for row in rows(found)), sep="\n")
    same = not found.get(2, Found()).others
    return 0 if same and all(map(is_good, found.values())) else 1


if __name__ == "__main__":
    sys.exit(main())

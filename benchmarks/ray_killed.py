"""Batch inference on Ray that is killed at random moments, and then goes on.

    python benchmarks/ray_killed.py                  # ten kills: actors, drivers, nodes
    python benchmarks/ray_killed.py -o ray_killed.json

Images are drawn at random, run once undisturbed in one process, and then on a Ray of three nodes:
three raylets on this machine. Actors, whole nodes (a raylet and all of its workers) and the driver
with all of its Ray are ended by SIGKILL, in turn and at random moments. A driver that ended is
started again; a job that is done before the last kill begins anew in another directory. In the
end every row of every job must be there once, with the same bits.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
FORM = (1, 70, 70)
GAVE_UP = "driver that gave up"


def model() -> Any:
    import torch

    from tilewise.models import lenet_b

    torch.manual_seed(1)
    return lenet_b().eval()


def draw(place: Path, count: int) -> None:
    from PIL import Image

    place.mkdir()
    generator = np.random.default_rng(0)
    for i in range(count):
        Image.fromarray(generator.integers(0, 256, (70, 70), np.uint8)).save(place / f"{i:06}.png")


def drive(source: str, output: str, temporary: str) -> None:
    """A driver: a Ray of its own with three nodes, and two actors of one thread."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    os.environ["RAY_TMPDIR"] = temporary
    import ray
    from ray.cluster_utils import Cluster

    store = {"num_cpus": 2, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**store, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(**store)
    ray.init(address=cluster.address, log_to_driver=False)
    infer(source, output, 2, True)


def infer(source: str | Path, output: str | Path, workers: int, ray: bool) -> None:
    from tilewise.scale import infer as run
    from tilewise.scale.images import Form

    run(model, source, output, form=Form(*FORM), rows=100, batch=8, workers=workers, threads=1,
        ray=ray)


def read(output: Path) -> dict[str, Any]:
    """Rows by name; raises if one is there twice."""
    from pyarrow import parquet

    found: dict[str, Any] = {}
    for file in sorted(output.glob("*.parquet")):
        for row in parquet.read_table(file).to_pylist():
            assert row["name"] not in found, row["name"]
            found[row["name"]] = row["output"]
    return found


def processes(session: int) -> dict[int, bytes]:
    """Commands of the processes of a session."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(path.name)) == session:
                found[int(path.name)] = (path / "cmdline").read_bytes()
        except OSError:
            continue
    return found


def parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def kill(*victims: int) -> None:
    for victim in victims:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def strike(kind: str, driver: int, chance: random.Random) -> bool:
    """Kill one of a kind; False if there is none yet."""
    known = processes(driver)
    actors = [number for number, command in known.items() if b"MapWorker" in command]
    if not actors:
        return False
    one = chance.choice(actors)
    if kind == "actor":
        kill(one)
    elif kind == "node":
        raylet = parent(one)
        kill(raylet, *(number for number in known if parent(number) == raylet))
    else:
        kill(driver, *known)
    return True


def start(source: Path, output: Path, temporary: str) -> subprocess.Popen[bytes]:
    with open(output.with_suffix(".log"), "ab") as log:
        return subprocess.Popen([sys.executable, __file__, "--drive", str(source), str(output),
                                 temporary], start_new_session=True, stdout=log, stderr=log)


def job(source: Path, output: Path, kinds: list[str], chance: random.Random,
        end: float) -> Counter[str]:
    """One job until it is done; kinds of kills are taken from the list."""
    told: Counter[str] = Counter()
    while time.monotonic() < end and told[GAVE_UP] < 5:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            driver = start(source, output, temporary)
            try:
                moment = time.monotonic() + chance.uniform(0, 10)
                while driver.poll() is None and time.monotonic() < end:
                    time.sleep(0.05)
                    if kinds and time.monotonic() > moment and strike(kinds[0], driver.pid, chance):
                        told[kinds.pop(0)] += 1
                        moment = time.monotonic() + chance.uniform(0, 5)
                if driver.poll() == 0:
                    return told
                told[GAVE_UP] += driver.poll() not in (None, -signal.SIGKILL)
            finally:
                kill(driver.pid, *processes(driver.pid))
                driver.wait()
    last = output.with_suffix(".log").read_text(errors="replace")[-4000:]
    raise TimeoutError(f"not done, with {dict(told)}; the driver said:\n{last}")


def rows(count: int, kills: int, patience: float = 900) -> list[dict[str, str]]:
    chance, told, jobs, wrong = random.Random(0), Counter[str](), 0, 0
    kinds = [("actor", "node", "actor", "driver")[i % 4] for i in range(kills)]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        draw(place / "in", count)
        infer(place / "in", place / "alone", 1, False)
        expected = read(place / "alone")
        assert len(expected) == count
        while kinds or not jobs:
            told += job(place / "in", place / f"out{jobs}", kinds, chance, begin + patience)
            wrong += read(place / f"out{jobs}") != expected
            jobs += 1
    victims = ", ".join(f"{number} x {kind}" for kind, number in sorted(told.items()))
    return [{"what": f"jobs of {count} images on Ray with SIGKILL ({victims}) that have not every "
                     "row once with the same bits", "wanted": "0",
             "found": f"{wrong} of {jobs} ({time.monotonic() - begin:.0f} s)"}]


def main() -> int:
    if sys.argv[1:2] == ["--drive"]:
        from ray_killed import drive as again  # functions of __main__ would go by value

        again(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    found = rows(args.images, args.kills)
    print(*(f"{row['what']}: {row['found']}" for row in found), sep="\n")
    from tilewise.bench.claims import save_claims  # brings torch, which workers import apart

    save_claims(args, found)
    return int(not found[0]["found"].startswith("0 "))


if __name__ == "__main__":
    sys.exit(main())

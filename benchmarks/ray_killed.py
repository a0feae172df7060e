"""Batch inference on Ray that is killed at random moments, and then goes on.

    python benchmarks/ray_killed.py                  # ten kills: of actors and of the driver
    python benchmarks/ray_killed.py -o ray_killed.json

Images are drawn at random, run once undisturbed in one process, and then on Ray. Actors and the
driver itself, with all of its Ray, are ended by SIGKILL. After each kill of the driver the job is
started again. In the end every row must be there once, with the same bits.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
FORM = (1, 70, 70)


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
    """A driver: a Ray of its own with two actors of one thread."""
    import ray

    from tilewise.scale import infer
    from tilewise.scale.images import Form

    ray.init(num_cpus=3, include_dashboard=False, _temp_dir=temporary, log_to_driver=False,
             runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(
                 [str(Path(__file__).parent), *sys.path])}})
    infer(partial(_made), source, output, form=Form(*FORM), rows=100, batch=8, workers=2,
          threads=1, ray=True)


def _made() -> Any:
    from ray_killed import model as again

    return again()


def read(output: Path) -> dict[str, Any]:
    """Rows by name; raises if one is there twice."""
    from pyarrow import parquet

    found: dict[str, Any] = {}
    for file in sorted(output.glob("*.parquet")):
        for row in parquet.read_table(file).to_pylist():
            assert row["name"] not in found, row["name"]
            found[row["name"]] = row["output"]
    return found


def actors(group: int) -> list[int]:
    """Processes of a session that are Ray's actors."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes()
            if os.getsid(int(path.name)) == group and b"Worker" in command:
                found.append(int(path.name))
        except (OSError, ProcessLookupError):
            continue
    return found


def end(driver: subprocess.Popen[bytes]) -> None:
    """The driver and all that it started, by the session that it leads."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(path.name)) == driver.pid:
                os.kill(int(path.name), signal.SIGKILL)
        except (OSError, ProcessLookupError):
            continue
    driver.wait()


def start(source: Path, output: Path, temporary: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--drive", str(source), str(output),
                             temporary], start_new_session=True, stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL)


def disturbed(source: Path, output: Path, kills: int, patience: float) -> dict[str, int]:
    """Run until it is done; kill something now and then."""
    chance, told, begin = random.Random(0), {"actor": 0, "driver": 0}, time.monotonic()
    while time.monotonic() - begin < patience:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            driver = start(source, output, temporary)
            try:
                while driver.poll() is None and time.monotonic() - begin < patience:
                    time.sleep(chance.uniform(0.5, 2.0))
                    running = actors(driver.pid)
                    if sum(told.values()) >= kills or not running:
                        continue
                    if chance.random() < 0.6:
                        os.kill(chance.choice(running), signal.SIGKILL)
                        told["actor"] += 1
                    else:
                        told["driver"] += 1
                        break
                if driver.poll() == 0:
                    return told
            finally:
                end(driver)
    raise TimeoutError(f"not done after {patience:.0f} s and {told}")


def rows(count: int, kills: int) -> list[dict[str, str]]:
    from tilewise.scale import infer
    from tilewise.scale.images import Form

    with tempfile.TemporaryDirectory() as place:
        source, alone, output = (Path(place) / name for name in ("in", "alone", "out"))
        draw(source, count)
        infer(model, source, alone, form=Form(*FORM), rows=100, batch=8, threads=1)
        begin = time.monotonic()
        told = disturbed(source, output, kills, 500)
        same = read(alone) == read(output)
        return [{"what": f"{count} images on Ray; {told['actor']} actors and {told['driver']} "
                         "drivers with their whole Ray ended by SIGKILL",
                 "wanted": "every row once, same bits",
                 "found": f"{len(read(output))} rows, {'the same bits' if same else 'OTHERS'} "
                          f"({time.monotonic() - begin:.0f} s)"}]


def main() -> int:
    if sys.argv[1:2] == ["--drive"]:
        drive(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    found = rows(args.images, args.kills)
    print(*(f"{row['what']}: {row['found']}" for row in found), sep="\n")
    if args.output:
        import torch

        from tilewise.bench.machine import facts
        from tilewise.bench.results import Result

        Result("claims", "python " + " ".join(sys.argv), datetime.date.today().isoformat(),
               facts(torch.get_num_threads(), limits=False), vars(args) | {
                   "output": str(args.output)}, found).save(args.output)
    return int("OTHERS" in found[0]["found"])


if __name__ == "__main__":
    sys.exit(main())

"""Forks, threads and processes, many of them: no hang, no wrong row, no damaged file.

    python benchmarks/stress.py                      # 1,000 forks, 100 threads, 50 processes
    python benchmarks/stress.py -o stress.json       # and kept
    python benchmarks/stress.py --forks 20 --threads 8 --processes 4

Every result is compared bit by bit with the first one. Whoever does not end in time is a hang.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import tilewise
from tilewise.bench.claims import save_claims
from tilewise.models import lenet_b

PATIENCE = 1200.0  # seconds: fifty processes share two cores, and each imports torch
PROCESS = """
import sys, torch, tilewise
sys.path.insert(0, sys.argv[1])
from stress import model, images
torch.set_num_threads(1)
fast = tilewise.optimize(model())
with torch.inference_mode():
    torch.save([fast(images(i)) for i in range(3)], sys.argv[2])
"""


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return lenet_b().eval()


def images(seed: int) -> torch.Tensor:
    return torch.randn(1 + seed % 3, 1, 70, 70, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def forks(count: int) -> tuple[int, str]:
    """Children of a process that has used the model on its threads: each calls it, and exits."""
    fast, before = tilewise.optimize(model()), torch.get_num_threads()
    torch.set_num_threads(1)  # torch's linear layer has other bits on two
    expected = [fast(images(i)) for i in range(3)]
    torch.set_num_threads(before)
    used = [fast(images(i % 3)) for i in range(9)]
    wrong, seconds = 0, time.monotonic()
    for i in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(60)
                torch.set_num_threads(1)  # a forked child has no threads of OpenMP
                code = 0 if torch.equal(fast(images(i % 3)), expected[i % 3]) else 2
            finally:
                os._exit(code)
        wrong += os.waitpid(child, 0)[1] != 0
    wrong += sum(not torch.equal(fast(images(i)), used[i]) for i in range(3))  # the parent goes on
    return wrong, f"{time.monotonic() - seconds:.0f} s"


def threads(count: int, calls: int = 50) -> tuple[int, str]:
    """All of them call one model, which nobody has called before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    fast, plain = tilewise.optimize(model()), tilewise.optimize(model())
    with torch.inference_mode():
        expected = [plain(images(i)) for i in range(9)]

    def work(number: int) -> int:
        torch.set_num_threads(1)
        with torch.inference_mode():
            return sum(not torch.equal(fast(images(i % 9)), expected[i % 9])
                       for i in range(number, number + calls))

    start = time.monotonic()
    with ThreadPoolExecutor(count) as pool:
        wrong = sum(pool.map(work, range(count), timeout=PATIENCE))
    torch.set_num_threads(before)
    return wrong, f"{count * calls} calls, {time.monotonic() - start:.0f} s"


def processes(count: int) -> tuple[int, str]:
    """All of them compile into one empty cache at once."""
    with tempfile.TemporaryDirectory() as place:
        cache = Path(place) / "cache"
        environment = {**os.environ, "TILEWISE_CACHE_DIR": str(cache),
                       "OMP_WAIT_POLICY": "passive"}
        start = time.monotonic()
        running = [subprocess.Popen([sys.executable, "-c", PROCESS, str(Path(__file__).parent),
                                     f"{place}/{i}.pt"], env=environment) for i in range(count)]
        wrong = 0
        for process in running:
            try:
                wrong += process.wait(PATIENCE) != 0
            except subprocess.TimeoutExpired:
                process.kill()
                wrong += 1
        results = [torch.load(path) for path in sorted(Path(place).glob("*.pt"))]
        wrong += sum(not all(map(torch.equal, results[0], other)) for other in results)
        objects = list(cache.glob("*.o"))
        wrong += sum(not is_whole(path) for path in objects)
        wrong += len([path for path in cache.iterdir() if path.suffix == ".tmp"])
        return wrong + count - len(results), (f"{len(objects)} files, "
                                              f"{time.monotonic() - start:.0f} s")


def is_whole(path: Path) -> bool:
    """Whether it begins as an object; its checksum needs a digest that is not in the file."""
    content = path.read_bytes()
    return len(content) > 32 and content[32:36] == b"\x7fELF"


def rows(args: Any) -> list[dict[str, str]]:
    found = []
    for what, (wrong, more) in (
            (f"{args.forks} forks after use: each child calls the model and exits",
             forks(args.forks)),
            (f"{args.threads} threads call one new model", threads(args.threads)),
            (f"{args.processes} processes start on one empty cache",
             processes(args.processes))):
        found.append({"what": what, "wanted": "0 wrong", "found": f"{wrong} wrong ({more})"})
        print(f"{what}: {wrong} wrong ({more})", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forks", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=100)
    parser.add_argument("--processes", type=int, default=50)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    found = rows(args)
    save_claims(args, found)
    return int(any(not row["found"].startswith("0 wrong") for row in found))


if __name__ == "__main__":
    sys.exit(main())

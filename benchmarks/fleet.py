"""What an image costs with 1, 2 and 4 workers of one thread, and under a quota of one core.

    python benchmarks/fleet.py                       # ResNet-50, batches of 8
    python benchmarks/fleet.py -o fleet.json         # and kept
    python benchmarks/fleet.py --seconds 2 --model resnet18

Workers start from one bundle, wait for each other, and then run batches for some seconds. CPU time
is that of the processes. The quota is that of a control group where one can be made, else the
process is bound to one core; contenders with one thread, with `tilewise.threads()` and with
torch's own number take turns, and the least time of a batch counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BATCH, CORES, IMAGES = 8, 1000, 10 ** 9
OURS, THEIRS = "tilewise.threads()", "torch's own"
GROUPS = (("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "100000"),
          ("/sys/fs/cgroup", "cpu.max", "100000 100000"))


def private() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) << 10 for line in text.splitlines()
               if line.startswith(("Private_Clean", "Private_Dirty")))


def work(model: str, bundle: str, seconds: float, barrier: Any, told: Any) -> None:
    """One worker: batches for some seconds, all workers at the same time."""
    begin = time.perf_counter()
    import torch

    import tilewise
    from tilewise.bench.subjects import SHAPES, USUAL
    from tilewise.models import MODELS

    torch.set_num_threads(1)
    fast = tilewise.bundle.load(bundle, MODELS[model])
    x = torch.randn(BATCH, *SHAPES.get(model, USUAL)).contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        fast(x)
        ready = time.perf_counter() - begin
        barrier.wait()
        start, cpu, count = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - start < seconds:
            fast(x)
            count += BATCH
        took = time.perf_counter() - start
        told.put((count / took, (time.process_time() - cpu) / count, ready, private()))
        barrier.wait()  # memory is shared only while all are there


def fleet(workers: int, model: str, bundle: str, seconds: float) -> tuple[float, ...]:
    """Images a second of all, core-seconds an image, start and private bytes of one."""
    context = multiprocessing.get_context("spawn")
    barrier, told = context.Barrier(workers), context.Queue()
    running = [context.Process(target=work, args=(model, bundle, seconds, barrier, told))
               for _ in range(workers)]
    for process in running:
        process.start()
    rate, cost, ready, memory = zip(*(told.get(timeout=300) for _ in running))
    for process in running:
        process.join()
    return sum(rate), statistics.mean(cost), statistics.median(ready), statistics.median(memory)


@contextmanager
def one_core() -> Iterator[str]:
    """This process, and what it starts, gets the time of one core."""
    for root, name, text in GROUPS:
        group = Path(root) / f"tilewise-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        home = Path(root) / _group(root).lstrip("/")
        try:
            (group / name).write_text(text)
            (group / "cgroup.procs").write_text(str(os.getpid()))
            yield "a quota of one core"
            return
        except OSError:
            continue
        finally:
            (home / "cgroup.procs").write_text(str(os.getpid()))
            group.rmdir()
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield "one core to run on"
    os.sched_setaffinity(0, before)


def _group(root: str) -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers.split(",")[0] == ("cpu" if root.endswith("cpu") else ""):
            return name
    return "/"


def bounded(model: str, seconds: float, told: Any) -> None:
    """Under a quota: seconds of a batch for numbers of threads."""
    import torch

    with one_core() as how:
        import tilewise
        from tilewise.bench.subjects import SHAPES, USUAL
        from tilewise.models import MODELS

        counts = {"one thread": 1, OURS: tilewise.threads(), THEIRS: torch.get_num_threads()}
        fast = tilewise.optimize(MODELS[model]().eval())
        x = torch.randn(BATCH, *SHAPES.get(model, USUAL))
        times: dict[str, list[float]] = {name: [] for name in counts}
        with torch.inference_mode():
            for _ in range(max(2, int(seconds))):
                for name, count in counts.items():
                    torch.set_num_threads(count)
                    fast(x)
                    start = time.perf_counter()
                    for _ in range(4):  # a quota is given anew ten times a second
                        fast(x)
                    times[name].append((time.perf_counter() - start) / 4)
        told.put((how, counts, {name: min(seen) for name, seen in times.items()}))


def rows(model: str, seconds: float) -> list[dict[str, str]]:
    import tilewise
    from tilewise.bench.subjects import subject

    found: list[dict[str, str]] = []

    def tell(what: str, text: str, wanted: str = "") -> None:
        found.append({"what": what, "wanted": wanted, "found": text})
        print(what, text, sep=": ", flush=True)

    with tempfile.TemporaryDirectory() as place:
        what = subject(model, batch=BATCH)
        tilewise.bundle.save(what.model, what.example, f"{place}/bundle")
        known = {}
        for workers in (1, 2, 4):
            rate, cost, ready, memory = known[workers] = fleet(workers, model, f"{place}/bundle",
                                                               seconds)
            tell(f"{model}, {workers} worker(s) of one thread on {os.cpu_count()} cores",
                 f"{rate:.1f} images/s, {cost * 1e3:.1f} core-ms an image, {cost * 1e6 / 3600:.1f} "
                 f"core-hours a million; start {ready:.1f} s, {memory / 1e6:.0f} MB private each")
    _, cost, ready, memory = known[min(2, os.cpu_count() or 1)]
    share = IMAGES // CORES
    tell(f"on paper: 10^9 images on {CORES:,} cores, one worker each",
         f"{share:,} images each x {cost * 1e3:.1f} ms = {share * cost / 3600:.1f} h; start "
         f"{ready:.1f} s = {ready / (share * cost + ready):.2%} of it; "
         f"{memory * CORES / 1e9:.0f} GB of private memory in all")
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    process = context.Process(target=bounded, args=(model, seconds, told))
    process.start()
    how, counts, times = told.get(timeout=300)
    process.join()
    ratio = {name: seen / times["one thread"] for name, seen in times.items()}
    tell(f"{model}, batch of {BATCH} under {how}: tilewise.threads() against one thread",
         f"{ratio[OURS]:.2f} of the time ({counts[OURS]} thread(s)); torch's own "
         f"{counts[THEIRS]} thread(s): {ratio[THEIRS]:.2f}", "at most 1.10")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    found = rows(args.model, args.seconds)
    from tilewise.bench.claims import save_claims  # brings torch, which workers import apart

    save_claims(args, found)


if __name__ == "__main__":
    main()

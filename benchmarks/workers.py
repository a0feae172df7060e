"""Workers that start from a bundle: how soon the first result is there, and what memory each adds.

    python benchmarks/workers.py                     # ResNet-50, one image
    python benchmarks/workers.py -o workers.json     # and kept

Each worker is a new process with an empty cache directory. Time is counted from the end of
`import torch`. Private memory is that of smaps_rollup (Private_Clean and Private_Dirty) with all
workers running, after three calls. What a process has that imported torch and made one small
convolution is torch's own; blocks of tilewise's pool are activations.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WORKER = """
import sys, time
import torch
start = time.perf_counter()
threads, model, bundle = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(threads)
if model == "none":
    with torch.inference_mode():
        torch.nn.functional.conv2d(torch.randn(1, 3, 64, 64), torch.randn(8, 3, 3, 3))
    print("{}", flush=True)
    sys.stdin.readline()
    sys.exit()
import tilewise
from tilewise.bench.subjects import SHAPES, USUAL
from tilewise.kernels.cpu.emit import jit
from tilewise.kernels.cpu.memory import POOL
from tilewise.models import MODELS
from tilewise.runtime import weights
imported = time.perf_counter()
if bundle:
    fast = tilewise.bundle.load(bundle, MODELS[model])
else:
    fast = tilewise.optimize(MODELS[model]().eval())
loaded = time.perf_counter()
x = torch.randn(1, *SHAPES.get(model, USUAL))
with torch.inference_mode():
    fast(x)
    ended = time.perf_counter()
    compiled, made = jit.compiled, weights.made_here
    for _ in range(3):
        fast(x)
import json
print(json.dumps({"import": imported - start, "load": loaded - imported, "call": ended - loaded,
                  "first": ended - start, "compiled": compiled, "prepared": made,
                  "activations": POOL.kept}), flush=True)
sys.stdin.readline()
"""


class Worker:
    """A process that answers once and then waits."""

    def __init__(self, model: str, bundle: str, threads: int, cache: str) -> None:
        environment = {**os.environ, "TILEWISE_CACHE_DIR": cache}
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(threads), model, bundle], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def private(self) -> int:
        """Bytes that no other process shares."""
        text = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text()
        return sum(int(line.split()[1]) << 10 for line in text.splitlines()
                   if line.startswith(("Private_Clean", "Private_Dirty")))

    def end(self) -> None:
        self._process.communicate("\n", timeout=60)


def starts(model: str, bundle: str, threads: int, times: int, cache: str = "") -> dict[str, Any]:
    """The median of new processes."""
    found = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as empty:
            worker = Worker(model, bundle, threads, cache or empty)
            found.append(worker.answer())
            worker.end()
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def memory(model: str, bundle: str, count: int) -> dict[str, float]:
    """Private bytes of each of some workers at once, in the median, and what they are for."""
    with tempfile.TemporaryDirectory() as empty:
        # two of the others each: what a single process maps is not shared with anybody
        bare = [Worker("none", "", 1, empty) for _ in range(2)]
        workers = [Worker(model, bundle, 1, empty) for _ in range(count)]
        answers = [worker.answer() for worker in (*bare, *workers)][2:]
        private = statistics.median(worker.private() for worker in workers)
        own = statistics.median(worker.private() for worker in bare)
        for worker in (*bare, *workers):
            worker.end()
    activations = statistics.median(answer["activations"] for answer in answers)
    return {"private": private, "torch": own, "activations": activations,
            "more": private - own - activations}


def rows(model: str, times: int) -> list[dict[str, str]]:
    import torch

    import tilewise
    from tilewise.bench.subjects import subject

    what = subject(model, batch=1)
    with tempfile.TemporaryDirectory() as place:
        bundle, warm = f"{place}/bundle", f"{place}/cache"
        saved = tilewise.bundle.save(what.model, what.example, bundle)
        threads = torch.get_num_threads()
        plain = starts(model, "", threads, 2, warm)  # the first compiles
        plain = starts(model, "", threads, times, warm)
        ours = starts(model, bundle, threads, times)
        shared = memory(model, bundle, 3)
        alone = memory(model, "", 3)
    print(json.dumps({"plain": plain, "bundle": ours, "memory": shared, "without": alone}))
    mb = {name: f"{size / 1e6:.0f} MB" for name, size in shared.items()}
    return [
        {"what": f"{model} with a bundle: first result after `import torch`", "wanted": "1 s",
         "found": f"{ours['first']:.2f} s (import tilewise {ours['import']:.2f}, load "
                  f"{ours['load']:.2f}, call {ours['call']:.2f})"},
        {"what": "kernels compiled and weights prepared until then", "wanted": "0 and 0",
         "found": f"{ours['compiled']:.0f} and {ours['prepared']:.0f}"},
        {"what": "the same without a bundle, code in the cache", "wanted": "",
         "found": f"{plain['first']:.2f} s, {plain['compiled']:.0f} and "
                  f"{plain['prepared']:.0f}"},
        {"what": "private memory of each of three workers, beyond torch's own and activations",
         "wanted": "30 MB", "found": f"{mb['more']} ({mb['private']} less {mb['torch']} and "
                                     f"{mb['activations']})"},
        {"what": "the same without a bundle", "wanted": "", "found": f"{alone['more'] / 1e6:.0f} "
                                                                       "MB"},
        {"what": "size of the bundle", "wanted": "", "found": f"{saved.bytes / 1e6:.0f} MB"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--times", type=int, default=3, help="processes of each kind")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    found = rows(args.model, args.times)
    for row in found:
        print(f"{row['what']}: {row['found']}" + (f" (wanted: {row['wanted']})"
                                                  if row["wanted"] else ""))
    from tilewise.bench.claims import save_claims  # brings torch, which workers import apart

    save_claims(args, found)


if __name__ == "__main__":
    main()

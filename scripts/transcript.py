"""What a newcomer types and sees: the commands of docs/quickstart.md, run one after the other.

    python scripts/transcript.py -o quickstart.json
    python scripts/transcript.py --model lenet_a --batch 1

In an empty directory with an empty cache, by the `tilewise` that belongs to this interpreter.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from time import perf_counter

import torch

from tilewise.bench import machine
from tilewise.bench.results import Result

COMMANDS = {
    "doctor": "tilewise doctor",
    "explain": "tilewise explain {model} --batch {batch}",
    "bench": "tilewise bench model {model} --batch {batch} --rounds {rounds} -o {model}.json",
    "report": "tilewise report {model}.json",
}


def run(command: str, directory: Path) -> dict[str, object]:
    started = perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=directory, text=True, check=True,
        stdout=subprocess.PIPE, env={**os.environ, "TILEWISE_CACHE_DIR": str(directory / "cache")})
    print(f"$ {command}\n{done.stdout}", flush=True)
    return {"command": command, "output": done.stdout.replace(str(directory), "~"),
            "wall": perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="vgg16")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, help="a result file to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        rows = [{"name": name, **run(command.format(**vars(args)), Path(place))}
                for name, command in COMMANDS.items()]
    if args.output:
        Result("transcript", shlex.join(["python", *sys.argv]), date.today().isoformat(),
               machine.facts(torch.get_num_threads(), limits=False), {}, rows).save(args.output)


if __name__ == "__main__":
    main()

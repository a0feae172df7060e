"""What a newcomer types and sees: the commands of docs/quickstart.md, run one after the other.

    python scripts/transcript.py -o quickstart.json
    python scripts/transcript.py --model lenet_a --batch 1

In an empty directory with an empty cache, by the `tilewise` that belongs to this interpreter.
"""

from __future__ import annotations

import argparse
import os
import pty
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
    said = on_a_terminal([sys.executable, "-m", *command.split()], directory)
    print(f"$ {command}\n{said}", flush=True)
    return {"command": command, "output": said.replace(str(directory), "~"),
            "wall": perf_counter() - started}


def on_a_terminal(command: list[str], directory: Path) -> str:
    """What a command writes to a terminal of 80 columns, without colours."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TILEWISE_CACHE_DIR": str(directory / "cache"), "TERM": "dumb",
                   "COLUMNS": "80"}
    running = subprocess.Popen(command, cwd=directory, stdout=slave, env=environment)
    os.close(slave)
    said = b"".join(iter(lambda: _read(master), b""))
    os.close(master)
    if running.wait():
        raise SystemExit(f"{shlex.join(command)}: exit code {running.returncode}")
    return said.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # its other end is closed
        return b""


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

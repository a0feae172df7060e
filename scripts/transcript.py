"""What a newcomer types and sees: the commands of docs/quickstart.md, run one after the other.

    python scripts/transcript.py -o quickstart.json
    python scripts/transcript.py --only explain -o quickstart.json
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
from dataclasses import replace
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
    parser.add_argument("--only", choices=["doctor", "explain"],
                        help="run one command, and replace its answer in the result file")
    parser.add_argument("-o", "--output", type=Path, help="a result file to write")
    args = parser.parse_args()
    names = [args.only] if args.only else list(COMMANDS)
    with tempfile.TemporaryDirectory() as place:
        rows = [{"name": name, **run(COMMANDS[name].format(**vars(args)), Path(place))}
                for name in names]
    if args.only and args.output:
        _replace(args.output, rows[0])
    elif args.output:
        Result("transcript", shlex.join(["python", *sys.argv]), date.today().isoformat(),
               machine.facts(torch.get_num_threads(), limits=False), {}, rows).save(args.output)


def _replace(path: Path, new: dict[str, object]) -> None:
    """One answer of a file that has all of them; it gets a date of its own."""
    old = Result.load(path).of("transcript")
    dated = {**new, "date": date.today().isoformat()}
    replace(old, rows=[dated if row["name"] == new["name"] else row for row in old.rows]).save(path)


if __name__ == "__main__":
    main()

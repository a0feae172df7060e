"""Try the wheel with versions of torch and Python, each in an environment that is removed after.

    python scripts/try_torch.py                            # VERSIONS with each of PYTHONS
    python scripts/try_torch.py 2.8 newest --python 3.11 --python 3.13 -o torch_versions.json
    python scripts/try_torch.py --here                     # the torch of this interpreter
    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu python scripts/try_torch.py

The last form takes torch's CPU builds. Without it a version can be a CUDA build, for which 6 GB
of disk are needed at a time. Each Python is looked for on the PATH by its name, as python3.12.
scripts/check_torch.py is what runs in each environment. Pairs that the file has are replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CHECK = ROOT / "scripts" / "check_torch.py"
VERSIONS = ("2.6", "2.8", "2.10", "2.12", "2.13", "newest")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
Row = dict[str, Any]


def requirement(name: str) -> str:
    """What pip is asked for: 2.8 is its last patch release."""
    return "torch" if name == "newest" else f"torch=={name}.*"


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True)


def build_wheel(place: Path) -> Path:
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", place, ROOT)
    return next(place.glob("*.whl"))


def check(python: Path, cache: Path, *flags: str) -> dict[str, Any]:
    """The answer of the check; one that says nothing ended in a crash or at the import."""
    done = subprocess.run([python, *flags, CHECK], capture_output=True, text=True, cwd=cache,
                          env={**os.environ, "TILEWISE_CACHE_DIR": str(cache)})
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return {"versions": {}, "uses": {"import": f"no: {last[:160]}"}}


def interpreter(name: str) -> Path | None:
    """A Python by its version; what stands on the PATH may be an empty shell that cannot start."""
    found = shutil.which(f"python{name}")
    if found is None or subprocess.run([found, "-c", ""], capture_output=True).returncode:
        return None
    return Path(found)


def attempt(torch: str, python: str, wheel: Path) -> Row:
    own, row = interpreter(python), {"asked": torch, "python": python, "versions": {}}
    if own is None:
        return row | {"uses": {"python": f"not tried: no python{python} on the PATH"}}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        run(own, "-m", "venv", place / "venv")
        inside = place / "venv" / "bin" / "python"
        pip = (inside, "-m", "pip", "install", "-q", "--no-compile")
        try:
            run(*pip, requirement(torch))
            run(*pip, wheel)
        except subprocess.CalledProcessError:
            return row | {"uses": {"install": "no: pip failed"}}
        (place / "cache").mkdir(mode=0o700)
        return row | check(inside, place / "cache", "-I")


def rows(torches: list[str], pythons: list[str], here: bool) -> Iterator[Row]:
    if here:
        with tempfile.TemporaryDirectory() as cache:
            yield {"asked": "here", "python": ".".join(platform.python_version_tuple()[:2]),
                   **check(Path(sys.executable), Path(cache))}
        return
    with tempfile.TemporaryDirectory() as directory:
        wheel = build_wheel(Path(directory))
        for torch in torches:
            for python in pythons:
                yield attempt(torch, python, wheel)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help=", ".join(VERSIONS))
    parser.add_argument("--python", action="append", dest="pythons", help=", ".join(PYTHONS))
    parser.add_argument("--here", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    found = []
    for row in rows(args.versions or list(VERSIONS), args.pythons or list(PYTHONS), args.here):
        print(row["asked"], row["python"], row["versions"].get("torch", ""), row["uses"],
              flush=True)
        found.append(row)
        if args.output:
            save(args.output, found)
    failed = [use for row in found for use in row["uses"].values() if use.startswith("no:")]
    return 1 if failed else 0


def save(path: Path, found: list[Row]) -> None:
    """Beside the pairs that the file has already, in the order of the lists above."""
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    known = {(row["asked"], row["python"]): row for row in (*old, *found)}
    order = [*VERSIONS, *dict.fromkeys(torch for torch, _ in known if torch not in VERSIONS)]
    kept = sorted(known.values(), key=lambda row: (order.index(row["asked"]),
                                                   int(row["python"].split(".")[1])))
    result = {"kind": "compatibility", "command": shlex.join(["python", *sys.argv]),
              "date": date.today().isoformat(),
              "machine": {"versions": {"python": platform.python_version()}}, "settings": {},
              "rows": kept, "plans": [], "format": 1}
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

"""Try the wheel with several versions of torch, each in an environment that is removed after.

    python scripts/try_torch.py                            # VERSIONS below
    python scripts/try_torch.py 2.8 newest -o torch_versions.json
    python scripts/try_torch.py --here                     # the torch of this interpreter
    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu python scripts/try_torch.py

The last form takes torch's CPU builds. Without it a version can be a CUDA build, for which 6 GB
of disk are needed at a time. scripts/check_torch.py is what runs in each environment.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
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


def attempt(name: str, wheel: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        run(sys.executable, "-m", "venv", place / "venv")
        python = place / "venv" / "bin" / "python"
        pip = (python, "-m", "pip", "install", "-q", "--no-cache-dir", "--no-compile")
        try:
            run(*pip, requirement(name))
            run(*pip, wheel)
        except subprocess.CalledProcessError:
            return {"asked": name, "versions": {}, "uses": {"install": "no: pip failed"}}
        (place / "cache").mkdir(mode=0o700)
        return {"asked": name, **check(python, place / "cache", "-I")}


def rows(names: list[str], here: bool) -> Iterator[dict[str, Any]]:
    if here:
        with tempfile.TemporaryDirectory() as cache:
            yield {"asked": "here", **check(Path(sys.executable), Path(cache))}
        return
    with tempfile.TemporaryDirectory() as directory:
        wheel = build_wheel(Path(directory))
        for name in names:
            yield attempt(name, wheel)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help=", ".join(VERSIONS))
    parser.add_argument("--here", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    found = []
    for row in rows(args.versions or list(VERSIONS), args.here):
        print(row["asked"], row["versions"].get("torch", ""), row["uses"], flush=True)
        found.append(row)
    if args.output:
        result = {"kind": "compatibility", "command": shlex.join(["python", *sys.argv]),
                  "date": date.today().isoformat(),
                  "machine": {"versions": {"python": platform.python_version()}}, "settings": {},
                  "rows": found, "plans": [], "format": 1}
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    failed = [use for row in found for use in row["uses"].values() if use.startswith("no:")]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

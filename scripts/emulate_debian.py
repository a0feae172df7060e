"""Install the wheel in an emulated Debian for 64-bit Arm, beside torch for Arm, and use it there.

    python scripts/emulate_debian.py -o arm_debian.json             # half an hour, 2 GB of disk
    python scripts/emulate_debian.py readme --place /tmp/debian -o arm_debian.json    # a part

Needs Debian's packages qemu-user-static and debian-archive-keyring, and 1.5 GB from the network.
Nothing is installed on this machine, and no root rights are needed: Debian's packages for arm64
are unpacked into a directory, and qemu runs their Python, with which pip installs wheels for Arm.
A directory that is named by --place is kept, and found again by the next call.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
COMMAND = "python scripts/emulate_debian.py -o arm_debian.json"
SOURCE = ("deb [arch=arm64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] "
          "http://deb.debian.org/debian bookworm main\n")
PACKAGES = ("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "python3.11",
            "python3-pip-whl", "libc6", "libgcc-s1", "libstdc++6", "libgomp1", "zlib1g",
            "libexpat1", "libffi8", "libssl3", "libbz2-1.0", "liblzma5", "libsqlite3-0",
            "libuuid1", "libreadline8", "libtinfo6", "libncursesw6", "libcrypt1", "libdb5.3",
            "libnsl2", "libtirpc3")
TORCH = "torch==2.10.0"  # the last whose wheel for Arm is one for CPUs alone
CPU = "neoverse-n1"
QEMU = "qemu-aarch64-static"
LIMIT = 3600  # seconds of a check
BLOCK = re.compile(r"README\.md:\d+: [\d.]+ s")  # what run_readme.py says of each
# children must find the same Python: this machine cannot run the other one by itself
PYTHON = """#!/bin/sh
export PYTHONPATH={place}/site:{place}/boot PATH={place}/bin
exec {qemu} -L {place}/root -cpu {cpu} {place}/root/usr/bin/python3.11 "$@"
"""
CHECKS = {
    "resnet18": (SCRIPTS / "check_arm.py", "resnet18"),
    "cached": (SCRIPTS / "check_arm.py", "cached"),
    "forked": (SCRIPTS / "check_arm.py", "forked"),
    "uses": (SCRIPTS / "check_torch.py",),
    "readme": (SCRIPTS / "run_readme.py", ROOT / "README.md"),
}
TOLD = {"resnet18": "`optimize(resnet18())` within its bound of float64",
        "cached": "a second process finds all compiled code",
        "forked": "a forked child computes the same bits, and compiles",
        "uses": "the five uses of [Compatibility](compatibility.md)",
        "readme": "the code of README.md"}


def run(*command: object, **more: Any) -> None:
    subprocess.run([str(word) for word in command], check=True, **more)


def unpack_debian(place: Path) -> None:
    """Debian's packages, as files in a directory."""
    apt = place / "apt"
    for name in ("lists/partial", "cache/archives/partial", "debs"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    (apt / "sources.list").write_text(SOURCE)
    facts = {"APT::Architecture": "arm64", "APT::Architectures": "arm64", "Dir::State": apt,
             "Dir::State::lists": apt / "lists", "Dir::State::status": "/dev/null",
             "Dir::Cache": apt / "cache", "Dir::Etc::sourcelist": apt / "sources.list",
             "Dir::Etc::sourceparts": "-", "APT::Sandbox::User": ""}
    options = [word for name, value in facts.items() for word in ("-o", f"{name}={value}")]
    run("apt-get", "-qq", *options, "update")
    run("apt-get", "-qq", *options, "download", *PACKAGES, cwd=apt / "debs")
    for package in sorted((apt / "debs").glob("*.deb")):
        run("dpkg-deb", "-x", package, place / "root")


def make_python(place: Path) -> Path:
    """A command that is Python for Arm; its name must say so, else nobody starts it again."""
    (place / "bin").mkdir(exist_ok=True)
    (place / "boot").mkdir(exist_ok=True)
    python = place / "bin" / "python"
    python.write_text(PYTHON.format(place=place, qemu=shutil.which(QEMU), cpu=CPU))
    python.chmod(0o755)
    (place / "boot" / "sitecustomize.py").write_text(
        f"import sys\nsys.executable = {str(python)!r}\n")
    return python


def install(place: Path, python: Path) -> None:
    """torch and the wheel, by pip for Arm: markers and tags of wheels are its machine's."""
    pip = next((place / "root" / "usr" / "share" / "python-wheels").glob("pip-*.whl")) / "pip"
    into = ("install", "-q", "--no-compile", "--upgrade", "--target", place / "site")
    with tempfile.TemporaryDirectory() as made:
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", made, ROOT)
        wheel = next(Path(made).glob("*.whl"))
        there = (place / "site" / "torch").exists()  # only the wheel may be another one
        run(python, pip, *into, *(["--no-deps", wheel] if there else [TORCH, wheel]))
    if sys.version_info[:2] == (3, 11):  # the same bytecode, in seconds and not in minutes
        run(sys.executable, "-m", "compileall", "-q", "-j0", place / "site",
            place / "root" / "usr" / "lib" / "python3.11", stdout=subprocess.DEVNULL)


def outcome(name: str, place: Path, python: Path) -> dict[str, Any]:
    """One row of the result: what a check said, and how long it took."""
    start = time.monotonic()
    environment = {**os.environ, "TILEWISE_CACHE_DIR": str(place / "cache")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    out, err = place / f"{name}.out", place / f"{name}.err"  # to be read while it runs
    with out.open("w") as to, err.open("w") as errors:
        code = ended([str(word) for word in (python, *CHECKS[name])], cwd=place, stdout=to,
                     stderr=errors, env=environment)
    said = out.read_text().strip().splitlines()
    row = {"check": name, "told": TOLD[name], "passed": code == 0,
           "seconds": round(time.monotonic() - start)}
    if name == "readme":
        row["blocks"] = [line for line in said if BLOCK.match(line)]
    elif said:
        row |= json.loads(said[-1])
    if code is None:
        row["limit"] = LIMIT
    elif code:
        row["stderr"] = err.read_text()[-2000:]
    return row


def ended(command: list[str], **more: Any) -> int | None:
    """Its exit code, or None if it was stopped: emulated code can hang, and so would all after."""
    with subprocess.Popen(command, **more, start_new_session=True) as process:
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its children
            return None


def versions(python: Path) -> dict[str, str]:
    code = ("import importlib.metadata as m, json, platform as p; "
            "print(json.dumps({'machine': p.machine(), 'python': p.python_version(), "
            "'glibc': p.libc_ver()[1], **{n: m.version(n) for n in "
            "('torch', 'numpy', 'llvmlite', 'tilewise')}}))")
    said = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    qemu = subprocess.run([QEMU, "--version"], capture_output=True, text=True, check=True).stdout
    return {**json.loads(said.stdout), "qemu": qemu.split()[2]}


def save(path: Path, found: dict[str, dict[str, Any]], known: dict[str, str]) -> None:
    """Beside what the file has of other checks."""
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {row["check"]: row for row in old} | found
    path.write_text(json.dumps({
        "kind": "arm-debian", "command": COMMAND, "date": date.today().isoformat(),
        "machine": {"versions": known}, "settings": {"cpu": CPU},
        "rows": [rows[name] for name in CHECKS if name in rows],
    }, indent=1) + "\n")


def check_all(place: Path, names: list[str], path: Path) -> bool:
    if not (place / "root").exists():
        unpack_debian(place)
    python = make_python(place)
    install(place, python)
    known, found = versions(python), {}
    assert known["machine"] == "aarch64", known
    if "resnet18" in names:
        shutil.rmtree(place / "cache", ignore_errors=True)
    for name in names:
        found[name] = outcome(name, place, python)
        print(json.dumps(found[name]), flush=True)
        save(path, found, known)
    return all(row["passed"] for row in found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", help=", ".join(CHECKS))
    parser.add_argument("--place", type=Path, help="a directory that is kept")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    if unknown := set(args.checks) - set(CHECKS):
        parser.error(f"{', '.join(unknown)}: needs some of {', '.join(CHECKS)}")
    if platform.system() != "Linux" or not all(map(shutil.which, (QEMU, "apt-get", "dpkg-deb"))):
        parser.error(f"needs {QEMU}, apt-get and dpkg-deb: a Debian with qemu-user-static")
    with tempfile.TemporaryDirectory() as directory:
        place = (args.place or Path(directory)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        return int(not check_all(place, args.checks or list(CHECKS), args.output))


if __name__ == "__main__":
    sys.exit(main())

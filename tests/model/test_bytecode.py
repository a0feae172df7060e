"""What instructions tell of functions, on every Python that is supported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import bytecode_cases

from tilewise.model import bytecode


def test_what_instructions_tell() -> None:
    bytecode_cases.check(bytecode)


@pytest.mark.parametrize("python", [sys.executable, "python3.10", "python3.12", "python3.13"])
def test_on_other_pythons(python: str) -> None:
    found = shutil.which(python)
    if found is None or subprocess.run([found, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"there is no {python}")
    ended = subprocess.run(
        [found, bytecode_cases.__file__], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(bytecode.__file__).parent)})
    assert ended.returncode == 0, ended.stderr

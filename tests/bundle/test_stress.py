"""A small sample of benchmarks/stress.py; docs/scale.md has the whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "stress.py"


def test_forks_threads_and_processes() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(SCRIPT), "--forks", "20", "--threads", "16",
                           "--processes", "2"], capture_output=True, text=True, timeout=300,
                          env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": 0 wrong") == 3

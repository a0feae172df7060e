"""Functions of test modules in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .harness import PLACES


def in_process(function: Callable[..., Any], *args: object, timeout: float = 120,
               **environment: str) -> Any:
    """The JSON-able result of a function of a test module, run in a process of its own."""
    module = Path(function.__code__.co_filename)
    code = (f"import sys, json; sys.path[:0] = {PLACES!r}; import {module.stem}; "
            f"print(json.dumps({module.stem}.{function.__name__}(*json.loads(sys.argv[1]))))")
    done = subprocess.run([sys.executable, "-c", code, json.dumps(args)], timeout=timeout,
                          env={**os.environ, **environment}, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, f"ended with {done.returncode}\n{done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])

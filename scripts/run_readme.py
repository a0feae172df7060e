"""Run the python blocks of Markdown files, each file in one namespace and an empty directory.

    python scripts/run_readme.py README.md docs/quickstart.md

A file without blocks, or with one that fails, is an error. Without arguments it is README.md.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from pathlib import Path

BLOCK = re.compile(r"^```python[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[int, str]]:
    """(line number of its first line, source) of every python block."""
    return [(text.count("\n", 0, m.start(1)) + 1, m[1]) for m in BLOCK.finditer(text)]


def run(path: Path) -> int:
    """Execute the blocks of path and return how many there were."""
    found = blocks(path.read_text(encoding="utf-8"))
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, source in found:
        # leading newlines make a traceback name the line in the file
        code = compile("\n" * (line - 1) + source, str(path), "exec", dont_inherit=True)
        start = time.monotonic()
        exec(code, namespace)
        print(f"{path.name}:{line}: {time.monotonic() - start:.1f} s", flush=True)
    return len(found)


def run_in_empty_directory(path: Path) -> int:
    """How many blocks there were."""
    with tempfile.TemporaryDirectory() as empty:
        before = os.getcwd()
        os.chdir(empty)
        try:
            count = run(path)
        finally:
            os.chdir(before)
    print(f"{path.name}: ran {count} python block{'' if count == 1 else 's'}")
    return count


def main(argv: list[str]) -> int:
    default = [str(Path(__file__).parents[1] / "README.md")]
    paths = [Path(name).resolve() for name in argv[1:] or default]
    counts = [run_in_empty_directory(path) for path in paths]
    return 0 if all(counts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))

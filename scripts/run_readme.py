"""Run the python blocks of a Markdown file in order, in one namespace, from an empty directory."""

from __future__ import annotations

import os
import re
import sys
import tempfile
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
        exec(code, namespace)
    return len(found)


def main(argv: list[str]) -> int:
    default = Path(__file__).parents[1] / "README.md"
    path = Path(argv[1] if len(argv) > 1 else default).resolve()
    with tempfile.TemporaryDirectory() as empty:
        before = os.getcwd()
        os.chdir(empty)
        try:
            count = run(path)
        finally:
            os.chdir(before)
    print(f"{path.name}: ran {count} python block{'' if count == 1 else 's'}")
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))

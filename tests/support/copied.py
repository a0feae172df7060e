"""A copy of the package that pages are tried on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def block(text: str, language: str, after: str) -> str:
    """The first fenced block of a language after a line of a page."""
    found = re.search(rf"^```{language}\n(.*?)^```$", text[text.index(after):],
                      re.MULTILINE | re.DOTALL)
    assert found, f"no {language} block after {after!r}"
    return found[1]


def patched(text: str, diff: str) -> str:
    """The text with the diff's added lines, each below the line that precedes it there."""
    lines, at = text.splitlines(), 0
    for line in diff.splitlines():
        if line.startswith("+"):
            lines.insert(at, line[1:])
            at += 1
        elif line.strip():
            at = lines.index(line[1:], at) + 1
    return "\n".join(lines) + "\n"


class Copy(NamedTuple):
    """A copy of the package that can be changed, and Python processes that import it."""

    path: Path

    @staticmethod
    def into(directory: Path) -> Copy:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "src" / "tilewise", directory / "tilewise", ignore=ignored)
        return Copy(directory)

    def patch(self, name: str, diff: str) -> None:
        """A file of the package, by its name in the repository."""
        file = self.path / Path(name).relative_to("src")
        file.write_text(patched(file.read_text(encoding="utf-8"), diff), encoding="utf-8")

    def python(self, *args: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.path), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run([sys.executable, *args], cwd=self.path, env=environment,
                              capture_output=True, text=True, check=False)

"""Whether a tag names the version of the sources, and the changelog has its section.

    python scripts/check_tag.py v0.2.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = {"pyproject.toml": r'^version = "(.+)"$', "CITATION.cff": r"^version: (.+)$",
          "sbom.cdx.json": r'"purl": "pkg:pypi/tilewise@(.+?)"',
          "CHANGELOG.md": r"^## \[(\d.*?)\] - \d{4}-\d\d-\d\d$"}


def versions(root: Path = ROOT) -> dict[str, str]:
    """What each file says; the changelog's newest section that has a date."""
    found = {name: re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
             for name, pattern in PLACES.items()}
    return {name: match[1] if match else "no version" for name, match in found.items()}


def complaints(tag: str, root: Path = ROOT) -> list[str]:
    return [f"{name} has {version}, the tag {tag} needs {tag.removeprefix('v')}"
            for name, version in versions(root).items() if tag != f"v{version}"]


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("needs one tag, such as v0.2.0")
        return 2
    wrong = complaints(arguments[0])
    print("\n".join(wrong) or f"{arguments[0]} is the version of all files")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

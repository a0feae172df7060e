"""Print the pages of docs that have python blocks to run, for scripts/run_readme.py."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PERFORMED = {"adding-an-algorithm.md"}  # its blocks are files; tests/test_adding_an_algorithm.py


def pages() -> list[Path]:
    return [page for page in sorted(DOCS.glob("*.md"))
            if "```python" in page.read_text(encoding="utf-8") and page.name not in PERFORMED]


if __name__ == "__main__":
    print(" ".join(map(str, pages())))

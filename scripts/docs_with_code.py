"""Print the pages of docs that have python blocks to run, for scripts/run_readme.py."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
# run by tests: its blocks are files (tests/project/test_adding_an_algorithm.py), it needs
# scikit-image (tests/image/test_filter2d_docs.py)
PERFORMED = {"adding-an-algorithm.md", "filter2d.md"}


def pages() -> list[Path]:
    return [page for page in sorted(DOCS.glob("*.md"))
            if "```python" in page.read_text(encoding="utf-8") and page.name not in PERFORMED]


if __name__ == "__main__":
    print(" ".join(map(str, pages())))

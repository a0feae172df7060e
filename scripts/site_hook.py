"""A hook of mkdocs: pages of the site that are files of the repository's root.

A page `<!-- file CHANGELOG.md -->` shows that file. Links into docs become links of the site; links
to other files of the root go to their pages, or become plain text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = re.compile(r"\A<!-- file ([\w.]+) -->\s*\Z")
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
SHOWN = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md",
         "SECURITY.md": "security.md", "README.md": "index.md"}


def as_page(text: str) -> str:
    """Text of a file of the root, with links for a page of the site.

    >>> as_page("[a](docs/faq.md#b) [c](SECURITY.md) [d](LICENSE) [e](#f)")
    '[a](faq.md#b) [c](security.md) d [e](#f)'
    """
    def one(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        place = target.removeprefix("docs/") if target.startswith("docs/") else SHOWN.get(target)
        return f"[{label}]({place}{anchor})" if place else label

    return LINK.sub(one, text)


def on_page_markdown(markdown: str, **_: Any) -> str:
    found = FILE.match(markdown)
    if found is None:
        return markdown
    return as_page((ROOT / found[1]).read_text(encoding="utf-8"))

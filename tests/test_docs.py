"""What is written is true: links lead somewhere, names have examples, pages are run."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from pages import PAGES, ROOT, script

import tilewise

LINK = re.compile(r"\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://")):
            continue
        target, _, anchor = link.partition("#")
        place = (page.parent / target).resolve() if target else page
        assert place.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(place), f"{page.name}: {link}"


def public_names() -> list[tuple[str, object]]:
    """Everything that the API page promises."""
    found = [(name, getattr(tilewise, name)) for name in tilewise.__all__]
    for name in ("nn", "wisdom"):
        module = getattr(tilewise, name)
        found += [(f"{name}.{part}", value) for part, value in vars(module).items()
                  if not part.startswith("_") and getattr(value, "__module__", "") ==
                  module.__name__ and callable(value)]
    return [(name, value) for name, value in found if not inspect.ismodule(value)]


@pytest.mark.parametrize("name, value", public_names(), ids=[name for name, _ in public_names()])
def test_public_names_show_how(name: str, value: object) -> None:
    assert ">>> " in (inspect.getdoc(value) or ""), f"{name} has no example"
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert f"::: tilewise.{name}\n" in page, f"{name} is not on the API page"


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in navigation, page.name


def test_pages_with_code_are_run() -> None:
    names = {page.name for page in script("docs_with_code").pages()}
    assert {"index.md", "quickstart.md", "numerics.md", "training.md"} <= names
    run = script("run_readme")
    assert run.blocks("a\n```python\nb\n```\n") == [(3, "b\n")]

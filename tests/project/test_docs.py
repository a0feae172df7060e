"""What is written is true: links lead somewhere, names have examples, pages are run."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.pages import PAGES, ROOT, script

import tilewise
import tilewise.training

LINK = re.compile(r"\]\(([^)\s]+)\)")
BARE = re.compile(r"\b[a-z]+://[^\s)>]+")
WEB = {  # looked at by people
    "https://keepachangelog.com/en/1.1.0/",
    "https://semver.org/spec/v2.0.0.html",
}


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and mkdocs make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def complaint(page: Path, link: str) -> str | None:
    """What is wrong with a link of a page; there is no network to follow those of the web."""
    if "://" in link:
        return None if link in WEB else f"{link} is not in WEB: look at it, then list it there"
    target, _, anchor = link.partition("#")
    place = (page.parent / target).resolve() if target else page
    if not place.exists():
        return f"{link}: no such file"
    if page.parent == ROOT / "docs" and target and ROOT / "docs" not in place.parents:
        return f"{link}: not on the site"
    return f"{link}: no such heading" if anchor and anchor not in anchors(place) else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = without_code(page.read_text(encoding="utf-8"))
    found = [complaint(page, link) for link in {*LINK.findall(text), *BARE.findall(text)}]
    assert not any(found), f"{page.name}: {[text for text in found if text]}"


@pytest.mark.parametrize("link", ["nowhere.md", "docs/faq.md#nowhere", "#nowhere",
                                  "https://example.org/unknown", "ftp://example.org"])
def test_a_broken_link_is_noticed(link: str) -> None:
    assert complaint(ROOT / "README.md", link)
    assert complaint(ROOT / "README.md", "docs/numerics.md#bits") is None


def test_web_links_are_well_formed_and_used() -> None:
    everything = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for link in WEB:
        parts = urlsplit(link)
        assert parts.scheme == "https", link
        assert re.fullmatch(r"[a-z0-9.-]+\.[a-z]+", parts.netloc), link
        assert link in everything, f"{link} is no longer used"


def public_names() -> list[tuple[str, object]]:
    """Everything that the API page promises."""
    found = [(name, getattr(tilewise, name)) for name in tilewise.__all__]
    for name in ("nn", "wisdom"):
        module = getattr(tilewise, name)
        found += [(f"{name}.{part}", value) for part, value in vars(module).items()
                  if not part.startswith("_") and getattr(value, "__module__", "") ==
                  module.__name__ and callable(value)]
    found += [(f"training.{name}", getattr(tilewise.training, name))
              for name in tilewise.training.__all__]
    return [(name, value) for name, value in found if callable(value)]


@pytest.mark.parametrize("name, value", public_names(), ids=[name for name, _ in public_names()])
def test_public_names_show_how(name: str, value: object) -> None:
    assert ">>> " in (inspect.getdoc(value) or ""), f"{name} has no example"
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert f"::: tilewise.{name}\n" in page, f"{name} is not on the API page"


def test_the_names_are_found() -> None:
    names = {name for name, _ in public_names()}
    assert names >= {"conv2d", "filter2d", "optimize", "explain", "stream", "gpu_audit", "Plan",
                     "wisdom.save", "wisdom.load", "wisdom.merge", "wisdom.forget", "nn.Conv2d",
                     "nn.Block", "set_memory_limit", "set_cache_limit", "training.train"}
    assert {name for name in tilewise.__all__ if not inspect.ismodule(getattr(tilewise, name))
            } <= names


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    beside, _, navigation = text.partition("not_in_nav: |\n")[2].partition("nav:\n")
    assert beside.split() == ["gpu-audit.md"]
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in navigation or page.name in beside, page.name


def test_there_is_one_answer_about_gpus() -> None:
    answer = ("tilewise is for CPUs. Its GPU kernels are tested without a GPU and have never run "
              "on one")
    for name in ("README.md", *(f"docs/{page}.md" for page in (
            "index", "faq", "compatibility", "performance", "gpu", "gpu-audit"))):
        assert answer in (ROOT / name).read_text(encoding="utf-8"), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_merge_was_left_half_done(page: Path) -> None:
    marks = re.findall(r"^(?:<{7}|>{7}|\|{7}) ?", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert not marks


def test_files_of_the_root_become_pages() -> None:
    site = script("site_hook")
    for name in site.SHOWN:
        assert (ROOT / name).exists(), name
    assert site.as_page("[a](docs/faq.md#b) [c](SECURITY.md) [d](LICENSE) [e](#f)") == (
        "[a](faq.md#b) [c](security.md) d [e](#f)")
    shown = site.on_page_markdown((ROOT / "docs" / "changelog.md").read_text())
    assert shown.startswith("# Changelog\n")


def test_pages_with_code_are_run() -> None:
    names = {page.name for page in script("docs_with_code").pages()}
    assert {"index.md", "quickstart.md", "numerics.md", "training.md"} <= names
    run = script("run_readme")
    assert run.blocks("a\n```python\nb\n```\n") == [(3, "b\n")]


@pytest.mark.parametrize("name, value", public_names())
def test_examples_of_docstrings_are_fenced_as_code(name: str, value: object) -> None:
    """Outside of a fence, Markdown takes `>>>` for a quotation, and `[1][0]` for a link."""
    text = inspect.getdoc(value) or ""
    fenced = script("doctest_blocks").fenced(text)
    assert fenced.count("```pycon\n>>> ") == len(re.findall(r"(?:^|\n\n)>>> ", text))
    outside = re.sub(r"^```pycon\n.*?\n```$", "", fenced, flags=re.DOTALL | re.MULTILINE)
    assert ">>>" not in outside
    assert re.sub(r"^```(pycon)?\n|\n```$", "", fenced, flags=re.MULTILINE) == text


def test_the_site_is_built_so_that_warnings_count() -> None:
    """With --quiet, --strict lets warnings pass."""
    for path in (".ci/run", "Makefile", "CONTRIBUTING.md"):
        [line] = [line for line in (ROOT / path).read_text().splitlines()
                  if re.search(r'mkdocs"? build', line)]
        assert "--strict" in line
        assert "--quiet" not in line
    assert "scripts/doctest_blocks.py" in (ROOT / "mkdocs.yml").read_text()


def test_every_word_of_a_schedule_is_explained() -> None:
    """Of the algorithms for CPUs."""
    from tilewise.conv.running import ENGINE
    from tilewise.core import Problem, Target

    table = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    asked = [(algorithm, Problem.parse(text)) for algorithm in ENGINE.planner.algorithms
             for text in ("n1c8h8w8k8r3s3p1_f32_forward", "n1c8h8w8k8r1s1_f32_forward",
                          "n1c8h8w8k8r3s3p1g8_f32_forward", "n1c8h8w8k8r3s3p1_f32_backward_weight")
             if algorithm.device != "cuda"]
    target = Target("cpu", "amx", 2)
    words = {word for algorithm, p in asked if not algorithm.reject(p, target)
             for word in algorithm.space(p, target).tunables}
    assert len(words) > 15
    assert [word for word in sorted(words) if f"`{word}`" not in table] == []

"""docs/architecture.md: its paths exist, its paragraphs are short, its tables are whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pages import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PLACES = (ROOT / "src" / "tilewise", ROOT)  # that paths are written from
PATH = re.compile(r"[\w./-]+/[\w.-]*|[\w-]+\.(?:py|md|json|toml|yml)")
LONGEST = 600  # characters of a paragraph, an item of a list or a cell of a table
CHANGES = ("another activation", "another ISA row", "another matrix unit", "another storage type",
           "another kind of convolution", "another operation between convolutions",
           "another link of a fused chain", "another frontend",
           "another algorithm")
WORDS = ("register tile", "K-block", "panel", "task", "region", "part", "rows", "passes", "groups",
         "GEMV", "dispatcher", "tell")


def paths(text: str) -> list[str]:
    """Paths in backticks, also those of a command."""
    return [word for code in re.findall(r"`([^`\n]+)`", text) for word in code.split()
            if PATH.fullmatch(word)]


def missing(text: str) -> list[str]:
    """Paths that lead nowhere."""
    return [path for path in paths(text)
            if not any((place / path).exists() for place in PLACES)]


def pieces(text: str) -> Iterator[str]:
    """Paragraphs, items of lists and cells of tables."""
    for block in re.split(r"\n\s*\n", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if block.startswith("|"):
            yield from (cell.strip() for cell in re.split(r"[|\n]", block))
        else:
            yield from re.split(r"\n(?=(?:[-*]|\d+\.) )", block)


def table(heading: str) -> dict[str, str]:
    """The rows of a section's tables by their first cell."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \|(.*)\|$", section, re.MULTILINE)
    return {first: rest for first, rest in rows if set(first) != {"-"}}


def test_every_path_exists() -> None:
    assert len(paths(PAGE)) > 150
    assert missing(PAGE) == []


@pytest.mark.parametrize("path", ["few_rows.py", "kernels/nowhere.py", "nowhere/", "tests/no.json"])
def test_a_wrong_path_is_noticed(path: str) -> None:
    assert missing(f"what `{path}` does") == missing(f"what `python {path} --fast` does") == [path]


def test_paragraphs_are_short() -> None:
    assert [piece for piece in pieces(PAGE) if len(piece) > LONGEST] == []


@pytest.mark.parametrize("text", ["a{}", "- a\n- b{}", "1. a\n2. b{}", "| a |\n|---|\n| b | c{} |"])
def test_a_long_paragraph_is_noticed(text: str) -> None:
    assert max(map(len, pieces(text.format(LONGEST * "x")))) > LONGEST
    assert max(map(len, pieces(f"{text}\n\n{text}"))) < 20


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_names_its_files_and_its_proof(change: str) -> None:
    files, proof = table("Which files do I touch?")[change].split("|")
    assert [path for path in paths(files) if path.endswith(".py")]
    assert any(Path(path).parts[0] == "tests" for path in paths(proof))


@pytest.mark.parametrize("word", WORDS)
def test_each_word_is_explained(word: str) -> None:
    assert len(table("Words")[word]) > 20

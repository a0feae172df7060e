"""Every measured table and every picture comes from a result file, and tells its command."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from support.pages import PAGES, ROOT, script

tables, results, figures = script("write_tables"), script("results"), script("figures")
MEASURED = re.compile(r"\d\.\d|\de-\d|\d ?%|\d x\b|\d ms\b")
# tables of what is set, not of what was found: a word of the header
SET = ("torch.set_float32_matmul_precision",)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def hand_written_tables(text: str) -> list[list[str]]:
    """Tables outside of marks and of code, as lines."""
    text = tables.MARK.sub("", text)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    blocks = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    return [block.splitlines() for block in blocks]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_what_their_files_say(page: Path) -> None:
    text = text_of(page)
    assert tables.rewritten(text) == text, "run make figures-tables"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_measured_numbers_are_not_typed_by_hand(page: Path) -> None:
    for table in hand_written_tables(text_of(page)):
        if not any(word in table[0] for word in SET):
            wrong = [line for line in table if MEASURED.search(re.sub(r"`[^`]*`", "", line))]
            assert not wrong, f"{page.name}: {wrong[0]}"


def test_a_table_typed_by_hand_is_noticed() -> None:
    [table] = hand_written_tables("a\n\n| a | b |\n|---|---|\n| c | 1.5 |\n")
    assert any(MEASURED.search(line) for line in table)
    assert not hand_written_tables(text_of(ROOT / "README.md"))


def test_a_stale_table_is_noticed() -> None:
    text = text_of(ROOT / "README.md")
    assert tables.rewritten(text.replace("| **tilewise** | ", "| **tilewise** | 1")) == text


def test_every_mark_has_its_end() -> None:
    for page in PAGES:
        text = text_of(page)
        marks = len(tables.MARK.findall(text))
        assert text.count("<!-- table ") == text.count("<!-- end -->") == marks, page.name


def test_every_result_is_shown_and_can_be_made_again() -> None:
    """By the command that stands in the file, and below the table."""
    shown = {m["name"]: page for page in PAGES for m in tables.MARK.finditer(text_of(page))}
    stored = {path.name for path in tables.RESULTS.glob("*")}
    assert set(shown) == stored == {f"{name}.json" for name in results.MADE}
    for name, made in results.MADE.items():
        result = json.loads((tables.RESULTS / f"{name}.json").read_text())
        assert result["command"] == made.command, f"{name}: make result-{name}"
        if result["kind"] != "transcript":
            assert f"```\n{made.command}\n```" in text_of(shown[f"{name}.json"]), name


def test_the_newcomers_commands_are_shown() -> None:
    rows = json.loads((tables.RESULTS / "quickstart.json").read_text())["rows"]
    assert [row["name"] for row in rows] == list(script("transcript").COMMANDS)
    for row in rows:
        assert f"$ {row['command']}\n" in text_of(ROOT / "docs" / "quickstart.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_picture_tells_its_command(page: Path) -> None:
    for section in re.split(r"^## ", text_of(page), flags=re.MULTILINE):
        for target in PICTURE.findall(section):
            name = Path(target).name
            assert figures.PICTURES[name] in section, f"{page.name}: {target}"


def test_every_picture_is_shown() -> None:
    shown = {Path(target).name for page in PAGES for target in PICTURE.findall(text_of(page))}
    stored = {path.name for path in (ROOT / "docs" / "images").iterdir()}
    assert shown == stored == set(figures.PICTURES)


def test_drawings_are_what_their_script_draws(tmp_path: Path) -> None:
    figures.drawings(tables.RESULTS, tmp_path)
    for name in ("call.svg", "tiles.svg"):
        assert (tmp_path / name).read_bytes() == (ROOT / "docs" / "images" / name).read_bytes()


def test_commands_write_where_they_are_told(tmp_path: Path) -> None:
    for name in results.MADE:
        for quick in (False, True):
            for words in results.commands(name, quick, tmp_path):
                assert str(tmp_path / f"{name}.json") in words, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ladder", "errors", "vgg16"])
def test_results_are_made_and_written_as_tables(name: str, tmp_path: Path) -> None:
    """With small settings: the whole way from a command to a page."""
    results.make(name, quick=True, into=tmp_path)
    page = f"<!-- table {name}.json -->\n<!-- end -->\n"
    written = tables.rewritten(page, tmp_path)
    assert written.count("|") > 20
    assert results.MADE[name].quick in written


def test_the_zoo_is_drawn_with_gains_ties_and_losses() -> None:
    sys.path.append(str(ROOT / "benchmarks"))
    with patch.dict(os.environ):  # what it sets for torch is not for other tests
        import zoo
    median = {"eager": 0.02, "compiled": 0.01, "tilewise": 0.005}
    rows = [{"subject": name, "by_rounds": ratio, "best": "compiled", "median": median}
            for name, ratio in (("vgg16", 2.0), ("resnet50", 1.02), ("convnext_tiny", 0.7))]
    drawn = str(zoo.drawing([*rows, {"subject": "dncnn", "by_rounds": 9.0}]))
    assert [drawn.count(colour) for colour in (zoo.OURS, zoo.TORCH, zoo.LOSS)] == [1, 1, 1]
    assert re.findall(r">(\d\.\d\dx) · 10 → 5 ms<", drawn) == ["2.00x", "1.02x", "0.70x"]
    assert "dncnn" not in drawn

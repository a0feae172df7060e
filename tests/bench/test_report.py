"""The page stands alone, shows every figure and escapes what it is given."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tilewise.bench import report
from tilewise.bench.figures import figures
from tilewise.bench.results import Result
from tilewise.bench.svg import LogAxis
from tilewise.cli import MISSING, OK, USAGE, main

WIDEST = 6.2  # of a character of 11 points, in the widest of the fonts
PROBLEM = "n8c64h56w56k64r3s3p1_f32_forward+bias+relu"
MACHINE = {"processor": "A <fast> one", "system": "Linux x86_64", "cores": 2, "threads": 2,
           "isa": "avx512", "lanes": 16, "registers": 32, "l1": 1 << 15, "l2": 1 << 20,
           "l3": 1 << 25, "huge_pages": "madvise", "versions": {"torch": "2"}, "peak": 3e11,
           "bandwidth": 1e10}


def row(contender: str, family: str, ratio: float | None, subject: str = PROBLEM,
        note: str = "") -> dict[str, object]:
    time = None if ratio is None else 0.01 / ratio
    return {"subject": subject, "contender": contender, "family": family, "error": 1e-6,
            "minimum": time, "median": time, "spread": 0.1, "ratio": ratio, "paired": ratio,
            "images": 8, "note": note}


BENCH = Result("bench", "tilewise bench layer 'x & y'", "2026-01-01", MACHINE, {}, [
    row("torch nhwc", "torch", 1.0), row("tilewise", "tilewise", 2.5), row("ncnn", "ncnn", 1.5),
    row("mnn", "mnn", None, note="wrong result: not timed")], [
    {"subject": PROBLEM, "layer": "conv", "problem": PROBLEM, "algorithm": "cpu_winograd",
     "schedule": "tile_h=4", "seconds": 0.004, "source": "estimate", "error": 1e-6}])


def rung(name: str, kind: str, seconds: float | None) -> dict[str, object]:
    rate = None if seconds is None else 1.85 / seconds
    return {"name": name, "kind": kind, "why": "because", "minimum": seconds, "median": seconds,
            "spread": 0.0, "gflops": rate, "share": 0.5, "bytes": 13 << 20, "workspace": 1 << 20,
            "error": 1e-7, "gain": 2.0, "algorithm": "", "schedule": ""}


LADDER = Result("ladder", "tilewise ladder", "2026-01-01", MACHINE, {"problem": PROBLEM}, [
    rung("scalar loops", "rung", 1.0), rung("vectors", "rung", 0.1), rung("F2", "rung", None),
    rung("torch nhwc", "torch", 0.05), rung("limit: memory", "limit", 0.01)])


@pytest.mark.parametrize("result, names", [(BENCH, {"bars", "roofline", "error"}),
                                           (LADDER, {"ladder", "roofline", "error"})])
def test_figures_are_drawings_within_their_frame(result: Result, names: set[str]) -> None:
    found = figures(result)
    assert set(found) == names
    for drawing in found.values():
        tree = ElementTree.fromstring(str(drawing))
        for shape in tree.iter("{http://www.w3.org/2000/svg}circle"):
            assert 0 <= float(shape.get("cx")) <= drawing.width
            assert 0 <= float(shape.get("cy")) <= drawing.height
        for shape in tree.iter("{http://www.w3.org/2000/svg}rect"):
            assert float(shape.get("x")) + float(shape.get("width")) <= drawing.width


def test_bars_are_as_long_as_the_speed_is_great() -> None:
    tree = ElementTree.fromstring(str(figures(BENCH)["bars"]))
    torch, ours, peer = [float(bar.get("width")) for bar
                         in tree.iter("{http://www.w3.org/2000/svg}rect")]
    assert ours / torch == pytest.approx(2.5, rel=0.01)
    assert peer / torch == pytest.approx(1.5, rel=0.01)


def test_the_page_stands_alone_and_escapes() -> None:
    page = report.html([BENCH, LADDER])
    assert not re.search(r"""(src|href)=|url\(|@import|<script""", page)
    assert "A &lt;fast&gt; one" in page
    assert "x &amp; y" in page
    assert page.count("<svg") == 6
    assert "wrong result: not timed" in page
    assert "2.50 times as fast as torch" in page
    assert "10 times as fast as scalar loops" in page


def test_headlines_tell_the_worst_as_well() -> None:
    rows = [*BENCH.rows, row("torch nhwc", "torch", 1.0, "other"),
            row("tilewise", "tilewise", 0.9, "other")]
    text = report.headline(Result("bench", "", "", MACHINE, {}, rows))
    assert "1.50 times" in text
    assert "0.90 at least" in text


def test_axes_have_round_ticks() -> None:
    assert LogAxis([1, 1000], 0, 1).ticks() == [1, 10, 100, 1000]
    assert LogAxis([1.0, 2.0], 0, 1, room=1.0).ticks() == [1.0, 2.0]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    BENCH.save(tmp_path / "bench.json")
    LADDER.save(tmp_path / "ladder.json")
    assert main(["report", "bench.json", "ladder.json", "--json"]) == OK
    said = json.loads(capsys.readouterr().out)
    assert said["bytes"] == Path("report.html").stat().st_size < 3_000_000
    assert main(["report", "none.json"]) == USAGE
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    assert main(["report", "bench.json", "--png", "pictures"]) == MISSING
    assert "tilewise[bench]" in capsys.readouterr().err


def test_labels_of_the_ladder_do_not_collide() -> None:
    """Numbers stand in a column of their own, beside bars and the line of the peak."""
    rows = [rung(name, "rung", seconds) for name, seconds in (
        ("matrix unit, 3 products", 1.85 / 1282), ("register tile", 1.85 / 290), ("vectors", 0.04))]
    tree = ElementTree.fromstring(str(figures(replace(LADDER, rows=rows))["ladder"]))
    space = "{http://www.w3.org/2000/svg}"
    ends = [float(bar.get("x")) + float(bar.get("width")) for bar in tree.iter(f"{space}rect")]
    [line] = tree.iter(f"{space}line")
    starts = [float(text.get("x")) - WIDEST * len(text.text) for text in tree.iter(f"{space}text")
              if "x" in text.text and text.text[0].isdigit()]
    assert len(starts) == 3
    assert min(starts) > max(*ends, float(line.get("x1")))
    names = [text for text in tree.iter(f"{space}text") if text.text in {r["name"] for r in rows}]
    assert all(float(text.get("x")) - WIDEST * len(text.text) >= 0 for text in names)
    [peak] = [text for text in tree.iter(f"{space}text") if "peak" in text.text]
    half = WIDEST * 10 / 11 * len(peak.text) / 2
    assert half <= float(peak.get("x")) <= figures(LADDER)["ladder"].width - half

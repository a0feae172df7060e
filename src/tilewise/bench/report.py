"""One HTML file from one or more result files; it needs no network and no script."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..core.errors import NotInstalled
from .figures import figures
from .results import Result

CAPTIONS = {
    "bars": "Least time of each contender; the bar is its speed, torch's best form being one. "
            "All took turns in one run, and every result was compared with float64 first.",
    "ladder": "GFLOP/s of each rung, counting the operations of the direct method, and the gain "
              "over the rung before. Winograd does fewer operations than are counted, and the "
              "matrix unit has a higher peak: both can pass the line. The planner's choice stands "
              "behind a rung that needs a larger max_error, so its gain can be below one.",
    "roofline": "Each point is a layer, a model or a rung. The slope is the measured memory "
                "bandwidth, the ceiling the measured multiply-add peak; operations are those of "
                "the direct method, so Winograd can lie above it.",
    "error": "Relative root mean square error against float64. Lower is more accurate.",
}
STYLE = """
:root { color-scheme: light }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; color: #1f2933;
  margin: 0 auto; padding: 1.2rem; max-width: 60rem; background: #fff }
h1, h2, p { overflow-wrap: anywhere } h1 { font-size: 1.5rem; line-height: 1.2; margin: .2rem 0 }
h2 { font-size: 1.15rem;
  margin: 2.2rem 0 .4rem; border-top: 1px solid #e3e8ed; padding-top: 1rem }
p.lead { font-size: 1.1rem } .faint, figcaption { color: #667380; font-size: .85rem }
figure { margin: 1rem 0; max-width: 44rem } figcaption { margin-top: .4rem }
svg { width: 100%; height: auto; display: block }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .82rem; width: 100%;
  font-variant-numeric: tabular-nums } th { text-align: left; color: #667380; font-weight: 500 }
td, th { padding: .25rem .7rem .25rem 0; border-bottom: 1px solid #eef1f4; vertical-align: top }
td.n, th.n { text-align: right; white-space: nowrap } tr.ours td { font-weight: 600 }
td.code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .78rem;
  overflow-wrap: anywhere; min-width: 9rem } td.why { min-width: 16rem }
pre { background: #f5f7f9; padding: .7rem; overflow-x: auto; font-size: .82rem;
  white-space: pre-wrap; overflow-wrap: anywhere }
@media print { body { font-size: 10.5pt; max-width: none; padding: 0 } .wide { overflow: visible }
  table { font-size: 7.5pt } figure, tr, pre { break-inside: avoid } h2 { break-after: avoid }
  p.faint { break-after: avoid } td.code { font-size: 6.5pt }
  figure { max-width: 15cm } td.why, td.code { min-width: 0 } }
"""
Cell = tuple[str, str]  # text and the class of its column


def html(results: Sequence[Result]) -> str:
    """The page."""
    title = "tilewise: " + ", ".join(dict.fromkeys(_title(result) for result in results))
    body = "".join(_section(result) for result in results)
    return ("<!doctype html><html lang=en><meta charset=utf-8>"
            "<meta name=viewport content='width=device-width, initial-scale=1'>"
            f"<title>{escape(title)}</title><style>{STYLE}</style>"
            f"<h1>{escape(title)}</h1>{body}</html>\n")


def check_renderer() -> None:
    """Complain where nothing can draw PNG files."""
    if importlib.util.find_spec("resvg_py") is None:
        raise NotInstalled("pictures as PNG need resvg_py: pip install 'tilewise[bench]'")


def write_pngs(results: dict[str, Result], directory: Path, zoom: float = 2.0) -> list[Path]:
    """Every figure of the results, by their names, as a PNG file; returns their paths."""
    check_renderer()
    import resvg_py

    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for stem, result in results.items():
        for name, drawing in figures(result).items():
            path = directory / f"{stem}-{name}.png"
            path.write_bytes(bytes(resvg_py.svg_to_bytes(
                svg_string=str(drawing), width=int(drawing.width * zoom), background="white",
                sans_serif_family="DejaVu Sans")))
            written.append(path)
    return written


def _title(result: Result) -> str:
    if result.kind == "ladder":
        return f"ladder of {result.settings['problem']}"
    subjects = list(dict.fromkeys(row["subject"] for row in result.rows))
    return subjects[0] if len(subjects) == 1 else f"{len(subjects)} layers"


def _section(result: Result) -> str:
    pictures = "".join(f"<figure>{drawing}<figcaption>{CAPTIONS[name]}</figcaption></figure>"
                       for name, drawing in figures(result).items())
    tables = _ladder_table(result) if result.kind == "ladder" else _bench_table(result)
    return (f"<h2>{escape(_title(result))}</h2><p class=lead>{escape(headline(result))}</p>"
            f"{pictures}{tables}{_plans(result)}{_machine(result)}"
            f"<p class=faint>To repeat it:</p><pre>{escape(result.command)}</pre>")


def headline(result: Result) -> str:
    """The result in a sentence."""
    rows = [row for row in result.rows if row.get("minimum")]
    if result.kind == "ladder":
        rungs = [row for row in rows if row["kind"] == "rung"]
        theirs = min(row["minimum"] for row in rows if row["kind"] == "torch")
        last = rungs[-1]
        return (f"{last['name']} is {rungs[0]['minimum'] / last['minimum']:.0f} times as fast as "
                f"{rungs[0]['name']} and {theirs / last['minimum']:.2f} times as fast as torch's "
                "best form.")
    ours = [row["ratio"] for row in rows if row["family"] == "tilewise"]
    mean = math.exp(sum(map(math.log, ours)) / len(ours))
    if len(ours) == 1:
        return f"tilewise runs it {mean:.2f} times as fast as torch's best form."
    return (f"tilewise is {mean:.2f} times as fast as torch's best form in the geometric mean of "
            f"{len(ours)}, {min(ours):.2f} at least and {max(ours):.2f} at most.")


def _bench_table(result: Result) -> str:
    header = [("", ""), ("least ms", "n"), ("median ms", "n"), ("spread", "n"),
              ("of torch's best", "n"), ("by rounds", "n"), ("error", "n"), ("", "")]
    rows = []
    alone = len({row["subject"] for row in result.rows}) == 1
    for row in result.rows:
        name = row["contender"] if alone else f"{row['contender']}, {row['subject']}"
        rows.append(([(name, "" if alone else "code"),
                      (_ms(row["minimum"]), "n"), (_ms(row["median"]), "n"),
                      (_format(row["spread"], ".0%"), "n"), (_format(row["ratio"], ".2f"), "n"),
                      (_format(row["paired"], ".2f"), "n"), (_format(row["error"], ".1e"), "n"),
                      (row["note"], "")], row["family"] == "tilewise"))
    return "<h3>All figures</h3>" + _table(header, rows)


def _ladder_table(result: Result) -> str:
    header = [("rung", ""), ("ms", "n"), ("GFLOP/s", "n"), ("of peak", "n"), ("moved MB", "n"),
              ("workspace MB", "n"), ("error", "n"), ("gain", "n"), ("why", "")]
    rows = [([(row["name"], ""), (_ms(row["minimum"]), "n"), (_format(row["gflops"], ".1f"), "n"),
              (_format(row["share"], ".0%"), "n"), (_mega(row["bytes"]), "n"),
              (_mega(row["workspace"]), "n"), (_format(row["error"], ".1e"), "n"),
              (_format(row["gain"], ".2f"), "n"), (row["why"], "why")], False)
            for row in result.rows]
    return "<h3>All figures</h3>" + _table(header, rows)


def _plans(result: Result) -> str:
    if not result.plans:
        return ""
    header = [("layer", ""), ("problem", ""), ("algorithm", ""), ("schedule", ""), ("ms", "n"),
              ("from", ""), ("error bound", "n")]
    rows = [([(plan["layer"], ""), (plan["problem"], "code"), (plan["algorithm"], ""),
              (plan["schedule"], "code"), (_ms(plan["seconds"]), "n"), (plan["source"], ""),
              (_format(plan["error"], ".0e"), "n")], False) for plan in result.plans]
    return "<h3>Plans</h3>" + _table(header, rows)


def _machine(result: Result) -> str:
    m = result.machine
    facts = [("processor", f"{m['processor']}, {m['cores']} cores, {m['system']}"),
             ("used", f"{m['threads']} threads, {m['isa']}, caches {m['l1'] >> 10} kB, "
                      f"{m['l2'] >> 10} kB, {m['l3'] >> 20} MB, huge pages {m['huge_pages']}"),
             ("measured limits", f"{m['peak'] / 1e9:.0f} GFLOP/s, "
                                 f"{m['bandwidth'] / 1e9:.1f} GB/s"),
             ("versions", ", ".join(f"{name} {text}" for name, text in m["versions"].items())),
             ("date", result.date)]
    return "<h3>Machine</h3>" + _table([], [([(name, ""), (text, "")], False)
                                            for name, text in facts])


def _table(header: Sequence[Cell], rows: Sequence[tuple[Sequence[Cell], bool]]) -> str:
    head = "".join(f"<th class='{kind}'>{escape(text)}</th>" for text, kind in header)
    lines = "".join(
        f"<tr class='{'ours' if ours else ''}'>"
        + "".join(f"<td class='{kind}'>{escape(text)}</td>" for text, kind in cells) + "</tr>"
        for cells, ours in rows)
    return f"<div class=wide><table><tr>{head}</tr>{lines}</table></div>"


def _format(value: Any, how: str) -> str:
    return "-" if value is None else format(value, how)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.4g}"


def _mega(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.2f}"

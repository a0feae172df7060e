"""The pictures of a report, from the rows of a result file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.errors import InvalidProblem
from ..core.problem import Problem
from .results import Result
from .svg import FAINT, GRID, INK, Drawing, LogAxis, number

WIDTH = 520.0  # narrow enough that text stays readable on a phone
OURS, TORCH = "#d9480f", "#8a97a5"
PEERS = ("#1c7ed6", "#2b8a3e", "#7048e8", "#0b7285", "#c2255c", "#5c940d")
Rows = Sequence[dict[str, Any]]


def figures(result: Result) -> dict[str, Drawing]:
    """All pictures that the rows allow, by name."""
    timed = [row for row in result.rows if row.get("minimum")]
    if result.kind == "ladder":
        rungs = [row for row in timed if row["kind"] != "limit"]
        return {"ladder": climb(rungs, result.machine["peak"] / 1e9),
                "roofline": roofline([(row["name"], row["kind"], row["gflops"], row["bytes"],
                                       Problem.parse(result.settings["problem"]).flops)
                                      for row in rungs if row.get("bytes")], result.machine),
                "error": errors([(row["name"], _kind_colour(row["kind"]), 1e3 * row["minimum"],
                                  row["error"]) for row in rungs if row.get("error")],
                                "milliseconds (left is faster)")}
    found = {"bars": bars(timed)}
    points = _points(result, timed)
    if points:
        found["roofline"] = roofline(points, result.machine)
    found["error"] = errors([(f"{row['contender']}, {row['subject']}", colour(row, timed),
                              row["ratio"], row["error"]) for row in timed if row.get("error")],
                            "speed, torch's best = 1 (right is faster)")
    return found


def colour(row: dict[str, Any], rows: Rows) -> str:
    """One for each family: ours, torch's, and the peers in their order."""
    if row["family"] in ("tilewise", "torch"):
        return OURS if row["family"] == "tilewise" else TORCH
    peers = list(dict.fromkeys(r["family"] for r in rows if r["family"] not in
                               ("tilewise", "torch")))
    return PEERS[peers.index(row["family"]) % len(PEERS)]


def _kind_colour(kind: str) -> str:
    return TORCH if kind == "torch" else OURS


def bars(rows: Rows) -> Drawing:
    """Speed of every contender on every subject, torch's best being one."""
    subjects = list(dict.fromkeys(row["subject"] for row in rows))
    height = 8 + sum(30 + 19 * sum(row["subject"] == name for row in rows) for name in subjects)
    drawing = Drawing(WIDTH, height + 14, "speed relative to torch's best")
    left, right = 108.0, WIDTH - 116  # the numbers' column, which no bar and no line reaches
    scale = (right - left) / max(max(row["ratio"] for row in rows), 1.0)
    y = 8.0
    drawing.line(left + scale, y, left + scale, height, FAINT, dashed=True)
    for name in subjects:
        drawing.text(0, y + 14, name, 12, bold=True)
        y += 22
        for row in (row for row in rows if row["subject"] == name):
            ours = row["family"] == "tilewise"
            drawing.text(left - 6, y + 12, row["contender"], 11, "end", INK if ours else FAINT,
                         ours)
            drawing.rect(left, y + 2, scale * row["ratio"], 13, colour(row, rows))
            drawing.text(WIDTH, y + 12, f"{row['ratio']:.2f}x · {_time(row['minimum'])}", 11,
                         "end", INK if ours else FAINT, ours)
            y += 19
        y += 8
    drawing.text(left + scale, height + 10, "torch's best", 10, "middle", FAINT)
    return drawing


def climb(rows: Rows, peak: float) -> Drawing:
    """Operations a second of every rung, and torch's."""
    drawing = Drawing(WIDTH, 40 + 21 * len(rows), "operations a second by rung")
    left, right = 150.0, WIDTH - 90  # the numbers' column, which no bar and no line reaches
    scale = (right - left) / max(*(row["gflops"] for row in rows), peak)
    drawing.line(left + scale * peak, 4, left + scale * peak, 22 + 21 * len(rows), FAINT,
                 dashed=True)
    for i, row in enumerate(rows):
        y, torch = 6 + 21.0 * i, row["kind"] == "torch"
        drawing.text(left - 6, y + 13, row["name"], 11, "end", FAINT if torch else INK)
        drawing.rect(left, y + 2, scale * row["gflops"], 15, _kind_colour(row["kind"]))
        gain = f" · {row['gain']:.2f}x" if row.get("gain") else ""
        rate = f"{row['gflops']:.0f}" if row["gflops"] >= 100 else f"{row['gflops']:.1f}"
        drawing.text(WIDTH, y + 13, rate + gain, 11, "end", FAINT if torch else INK)
    place = min(left + scale * peak, WIDTH - 80)  # the whole label stays in the picture
    drawing.text(place, 34 + 21 * len(rows), f"multiply-add peak, {peak:.0f} GFLOP/s", 10,
                 "middle", FAINT)
    return drawing


def _points(result: Result, rows: Rows) -> list[tuple[str, str, float, float, float]]:
    """(name, family, GFLOP/s, bytes, operations) of ours and of torch's best, by subject."""
    found = []
    for subject in dict.fromkeys(row["subject"] for row in rows):
        problems = _problems(result, subject)
        if not problems:
            continue
        flops, moved = sum(p.flops for p in problems), sum(p.bytes for p in problems)
        for family in ("torch", "tilewise"):
            times = [row["minimum"] for row in rows
                     if row["subject"] == subject and row["family"] == family]
            if times:
                found.append((f"{family}, {subject}", family, flops / min(times) / 1e9,
                              float(moved), float(flops)))
    return found


def _problems(result: Result, subject: str) -> list[Problem]:
    try:
        return [Problem.parse(plan["problem"]) for plan in result.plans
                if plan["subject"] == subject]
    except InvalidProblem:
        return []


def roofline(points: Sequence[tuple[str, str, float, float, float]],
             machine: dict[str, Any]) -> Drawing:
    """Operations a second over operations a byte, under what the machine can do."""
    drawing = Drawing(WIDTH, 320, "roofline")
    peak, bandwidth = machine["peak"] / 1e9, machine["bandwidth"] / 1e9
    intensities = [flops / moved for _, _, _, moved, flops in points]
    rates = [rate for _, _, rate, _, _ in points]
    x = LogAxis([*intensities, peak / bandwidth], 48, WIDTH - 12, room=2)
    y = LogAxis([*rates, peak], 276, 14)
    _axes(drawing, x, y, "operations a byte (of the least traffic)", "GFLOP/s")
    ridge = peak / bandwidth
    low = max(x.low, y.low / bandwidth)
    drawing.line(x(low), y(low * bandwidth), x(ridge), y(peak), INK, 1.5)
    drawing.line(x(ridge), y(peak), x.end, y(peak), INK, 1.5)
    drawing.text(x(ridge), y(peak) - 6, f"multiply-add peak {peak:.0f} GFLOP/s", 10, fill=FAINT,
                 halo=True)
    middle = (low * ridge) ** 0.5
    drawing.text(x(middle) + 8, y(middle * bandwidth) + 12, f"{bandwidth:.0f} GB/s", 10,
                 fill=FAINT)
    for name, family, rate, moved, flops in points:
        drawing.circle(x(flops / moved), y(rate), 5, _kind_colour(family),
                       f"{name}: {rate:.0f} GFLOP/s")
    _legend(drawing, [("tilewise", OURS), ("torch", TORCH)])
    return drawing


def errors(points: Sequence[tuple[str, str, float, float]], across: str) -> Drawing:
    """Relative rms error against float64 over speed."""
    drawing = Drawing(WIDTH, 300, "error against speed")
    x = LogAxis([value for _, _, value, _ in points], 56, WIDTH - 12)
    y = LogAxis([max(error, 1e-9) for *_, error in points], 256, 14)
    _axes(drawing, x, y, across, "relative rms error")
    for name, fill, value, error in points:
        drawing.circle(x(value), y(max(error, 1e-9)), 5, fill, f"{name}: {error:.1e}")
    families: dict[str, str] = {}
    for name, fill, *_ in points:
        label = "tilewise" if fill == OURS else "torch" if fill == TORCH else name.split(",")[0]
        families.setdefault(label, fill)
    _legend(drawing, list(families.items()))
    return drawing


def _axes(drawing: Drawing, x: LogAxis, y: LogAxis, across: str, up: str) -> None:
    for value in x.ticks():
        drawing.line(x(value), y.start, x(value), y.end)
        drawing.text(x(value), y.start + 14, number(value), 10, "middle", FAINT)
    for value in y.ticks():
        drawing.line(x.start, y(value), x.end, y(value))
        drawing.text(x.start - 5, y(value) + 4, number(value), 10, "end", FAINT)
    drawing.line(x.start, y.start, x.end, y.start, GRID)
    drawing.text((x.start + x.end) / 2, y.start + 29, across, 11, "middle", FAINT)
    drawing.text(13, (y.start + y.end) / 2, up, 11, "middle", FAINT, turned=True)


def _legend(drawing: Drawing, entries: Sequence[tuple[str, str]]) -> None:
    x = 52.0
    for name, fill in entries:
        drawing.circle(x, drawing.height - 6, 4, fill)
        drawing.text(x + 8, drawing.height - 2, name, 10, fill=FAINT)
        x += 24 + 5.8 * len(name)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else (
        f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us")

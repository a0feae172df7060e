"""Drawings as text: the few shapes that the figures need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
HALO = ' paint-order="stroke" stroke="#fff" stroke-width="3" stroke-linejoin="round"'
INK, FAINT, GRID = "#1f2933", "#667380", "#e3e8ed"


class Drawing:
    """A picture of fixed size in its own units; the page scales it."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" '
                          f'height="{height:.1f}" rx="2" fill="{fill}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = GRID,
             width: float = 1, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
                          f'stroke="{stroke}" stroke-width="{width}"{dash}/>')

    def circle(self, x: float, y: float, radius: float, fill: str, hint: str = "") -> None:
        inside = f"<title>{escape(hint)}</title>" if hint else ""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" '
                          f'stroke="#fff" stroke-width="1">{inside}</circle>')

    def text(self, x: float, y: float, text: str, size: float = 12, anchor: str = "start",
             fill: str = INK, bold: bool = False, turned: bool = False,
             halo: bool = False) -> None:
        edge = HALO if halo else ""
        turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" '
                          f'text-anchor="{anchor}"{weight}{edge}{turn}>{escape(text)}</text>')

    def __str__(self) -> str:
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} '
                f'{self.height:g}" role="img" aria-label="{escape(self.title)}" '
                f'font-family="{FONT}">' + "".join(self.parts) + "</svg>")


class LogAxis:
    """Values to places on a logarithmic axis."""

    def __init__(self, values: Sequence[float], start: float, end: float,
                 room: float = 1.4) -> None:
        self.low, self.high = min(values) / room, max(values) * room
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round numbers on the axis, some five of them."""
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1,), (1, 3), (1, 2, 5)):
            found = [step * 10.0 ** decade for decade in decades for step in steps]
            found = [value for value in found if self.low <= value <= self.high]
            if len(found) >= 3:
                break
        return found if len(found) <= 7 else found[::2]


def number(value: float) -> str:
    """A tick's label.

    >>> number(0.01), number(300.0), number(1e-06)
    ('0.01', '300', '1e-06')
    """
    return f"{value:g}"

"""The drawings of docs/how-it-works.md.

    python scripts/diagrams.py docs/images
"""

from __future__ import annotations

import sys
from pathlib import Path

from tilewise.bench.svg import FAINT, INK, Drawing

PAPER, OURS, PALE = "#ffffff", "#d9480f", "#ffe8d9"
STEPS = [("call", "conv2d, a module,", "torch.compile"), ("problem", "one line", "of plain data"),
         ("planner", "wisdom, refusals,", "estimates"),
         ("generator", "LLVM code for", "these shapes"),
         ("kernel", "cached on disk", "and in memory"), ("tasks", "threads of", "torch's OpenMP")]


def call() -> Drawing:
    drawing = Drawing(640, 150, "from a call to machine code")
    drawing.rect(0, 0, 640, 150, PAPER)
    for i, (name, first, second) in enumerate(STEPS):
        x = 6 + 106.0 * i
        drawing.rect(x, 34, 96, 76, PALE if i in (2, 3) else "#f1f4f7")
        drawing.text(x + 48, 58, name, 13, "middle", OURS if i in (2, 3) else INK, True)
        drawing.text(x + 48, 78, first, 9.5, "middle", FAINT)
        drawing.text(x + 48, 92, second, 9.5, "middle", FAINT)
        if i:
            drawing.line(x - 9, 72, x - 1, 72, INK, 1.5)
            drawing.text(x - 4, 76, "›", 13, "middle", INK)
    drawing.line(54, 124, 584, 124, FAINT, dashed=True)
    drawing.text(319, 141, "a second call with these shapes goes straight to the tasks", 10.5,
                 "middle", FAINT)
    return drawing


def tiles() -> Drawing:
    drawing = Drawing(640, 240, "tiles within tiles")
    drawing.rect(0, 0, 640, 240, PAPER)
    columns = [(20, "output image", "8 x 8 blocks, say"), (235, "block: second cache",
               "its input is packed once"), (450, "register tile", "all sums in registers")]
    for x, name, note in columns:
        drawing.text(x + 80, 22, name, 13, "middle", INK, True)
        drawing.text(x + 80, 222, note, 10.5, "middle", FAINT)
    _grid(drawing, 20, 40, 160, 8, 8, (2, 3))
    _grid(drawing, 235, 40, 160, 4, 10, (1, 4))
    _grid(drawing, 450, 40, 160, 14, 2, None)
    for x, y, to in ((100, 90, 235), (315, 100, 450)):
        drawing.line(x, y, to - 4, 40, FAINT, dashed=True)
        drawing.line(x, y, to - 4, 200, FAINT, dashed=True)
    drawing.text(618, 120, "14 pixels", 10, "middle", FAINT, turned=True)
    drawing.text(530, 212 - 4, "2 vectors of channels", 10, "middle", FAINT)
    return drawing


def _grid(drawing: Drawing, x: float, y: float, size: float, rows: int, cols: int,
          marked: tuple[int, int] | None) -> None:
    h, w = size / rows, size / cols
    for row in range(rows):
        for col in range(cols):
            fill = OURS if marked in ((row, col), None) else PALE
            drawing.rect(x + col * w + 1, y + row * h + 1, w - 2, h - 2, fill)


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for drawing in (call, tiles):
        (directory / f"{drawing.__name__}.svg").write_text(str(drawing()) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

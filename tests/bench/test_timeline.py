"""A profile as a picture: widths are times, heights are bytes."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import tilewise
from tilewise.bench.timeline import LEFT, MEMORY, RIGHT, TIMES, timeline
from tilewise.cli import OK, main
from tilewise.model.profile import Line


def line(step: str, by: str, seconds: float, live: int) -> Line:
    return Line(step, "", by, seconds, 0, 0, live)


def bars(text: str, top: float | None = None) -> list[tuple[float, ...]]:
    found = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', text)
    rects = [tuple(map(float, rect)) for rect in found]
    return [rect for rect in rects if rect[1] == top] if top is not None else rects


def test_widths_are_times_and_heights_are_bytes() -> None:
    steps = [line("conv", "cpu_direct", 3.0, 400), line("cat", "tilewise", 1.0, 100),
             line("sort", "torch", 4.0, 200)]
    text = str(timeline(steps))
    ElementTree.fromstring(text)
    times = bars(text, TIMES[0])
    wide = RIGHT - LEFT
    assert [width / wide for _, _, width, _ in times] == pytest.approx([0.375, 0.125, 0.5], 0.01)
    heights = [rect[3] for rect in bars(text) if rect[1] + rect[3] == pytest.approx(MEMORY[1], 0.1)]
    high = MEMORY[1] - MEMORY[0]
    assert [height / high for height in heights] == pytest.approx([1.0, 0.25, 0.5], 0.01)
    for name in ("torch 50 %", "cpu_direct 38 %", "cat 12 %", "8000.00 ms"):
        assert name in text


def test_of_a_model(tmp_path, capsys) -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.MaxPool2d(2))
    found = tilewise.profile(tilewise.optimize(net.eval()), torch.randn(1, 3, 32, 32))
    assert max(step.live for step in found.lines) <= found.arena
    assert found.lines[1].live >= 4 * 16 * 30 * 30  # what the first convolution writes
    ElementTree.fromstring(str(timeline(found.lines)))
    picture = tmp_path / "p.svg"
    assert main(["profile", "lenet_a", "--picture", str(picture)]) == OK
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert "ms one by one" in " ".join(capsys.readouterr().out.split())
    assert main(["profile", "lenet_a", "--json"]) == OK
    assert '"steps"' in capsys.readouterr().out

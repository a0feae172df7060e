"""What the first forward costs after optimize(model): seconds, and memory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "first_forward.py"


def first_forward() -> tuple[float, float, float]:
    """Seconds with a cold and with a warm cache, and memory as a share of the weights."""
    said = subprocess.run([sys.executable, str(SCRIPT), "vgg16", "--batch", "1"], check=True,
                          text=True, stdout=subprocess.PIPE).stdout
    cold, warm = map(float, re.findall(r"cache: ([\d.]+) s", said))
    return cold, warm, max(map(float, re.findall(r"([\d.]+) of the weights' ", said)))


@pytest.mark.timing
@pytest.mark.slow
def test_vgg16_starts_quickly_and_adds_less_than_its_weights() -> None:
    cold, warm, more = first_forward()
    assert cold <= 16  # twice what benchmarks/first_forward.py shows on a quiet machine
    assert warm <= 3
    assert more < 1.2

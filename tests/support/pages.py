"""README.md, docs and the scripts that write them, for tests."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def script(name: str) -> ModuleType:
    """A module of scripts/."""
    place = str(ROOT / "scripts")
    if place not in sys.path:
        sys.path.append(place)
    return importlib.import_module(name)

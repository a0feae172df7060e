"""What differs between operating systems: one module each, all with the same methods."""

from __future__ import annotations

import sys

from .base import Platform
from .linux import Linux
from .macos import MacOS
from .windows import Windows

PLATFORMS: dict[str, type[Platform]] = {"linux": Linux, "darwin": MacOS, "win32": Windows}


def platform_of(system: str) -> Platform:
    """By Python's name of a system; one that is not known has the least of all."""
    return PLATFORMS.get(system, Platform)()


HERE = platform_of(sys.platform)

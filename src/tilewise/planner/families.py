"""Wisdom that comes with the package: what was measured once on a processor of each family."""

from __future__ import annotations

import warnings
from pathlib import Path

from ..core.locks import fork_safe_lock
from ..core.platforms import HERE
from ..core.problem import Problem
from ..core.target import Target
from .classes import VERSION, representative
from .wisdom import Entry, Wisdom, asked

PLACE = Path(__file__).with_name("families")
_lock = fork_safe_lock()


class Family(Wisdom):
    """Read when it is first asked; it says which plan, never how long: clocks and threads differ.

    Its keys have no number of threads, since another number must not give other bits. They have
    what was asked of the result: a plan for all bits of float32 is a slow one for fewer.
    """

    def __init__(self, path: Path | None = None) -> None:
        super().__init__({"classes": VERSION})  # nothing of torch's is measured in it
        self.path = path

    def name_of(self, p: Problem, t: Target, max_error: float | None, bits: int) -> str:
        return f"{representative(p)} on {t.device}:{t.isa}{asked(max_error, bits)}"

    def find(self, p: Problem, t: Target, max_error: float | None = None,
             bits: int = 0) -> Entry | None:
        self.read_once()
        if not self.entries or not t.is_here:
            return None
        return super().find(p, t, max_error, bits)

    def read_once(self) -> None:
        """The package's own file needs no owner: who can write it can write the code beside it."""
        if self.path is None:
            return
        with _lock:  # who plans meanwhile waits: plans would depend on a race
            path = self.path
            if path is not None:
                try:
                    self._read(path)
                finally:
                    self.path = None

    def _read(self, path: Path) -> None:
        try:
            self.read(path.read_text(encoding="utf-8"), path)
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as problem:
            warnings.warn(f"wisdom {path} cannot be read: {problem}", stacklevel=2)

    def forget(self) -> None:
        super().forget()
        self.path = None


def family_path(directory: Path = PLACE) -> Path | None:
    """The file for this machine's processor, which need not exist; None where it has no name."""
    name = HERE.family()
    return directory / f"{name}.json" if name else None

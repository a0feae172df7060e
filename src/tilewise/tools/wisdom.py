"""tilewise.wisdom: plans that outlive the process."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from ..conv.running import ENGINE
from ..planner.wisdom import Wisdom, default_path


def save(path: str | PathLike[str] | None = None) -> Path:
    """Add what was measured to a file.

    Args:
        path: The file; the user's own, `wisdom.json` in the cache directory, if not said.

    Returns:
        The path.

    >>> import tempfile; from tilewise import wisdom
    >>> wisdom.save(tempfile.mkdtemp() + "/wisdom.json").name
    'wisdom.json'
    """
    place = Path(path) if path is not None else default_path()
    ENGINE.planner.wisdom.save(place)
    return place


def load(path: str | PathLike[str] | None = None) -> int:
    """Use the plans of a file. What cannot be used costs a warning.

    Args:
        path: The file; the user's own if not said.

    Returns:
        How many plans it had.

    >>> from tilewise import wisdom
    >>> wisdom.load("no-such-file.json")
    0
    """
    return ENGINE.load_wisdom(Path(path) if path is not None else default_path())


def merge(target: str | PathLike[str], *sources: str | PathLike[str]) -> int:
    """Add the plans of some files to another.

    Args:
        target: The file to add to; it need not exist.
        sources: Files to read.

    Returns:
        How many plans the target has then.

    >>> import tempfile; from tilewise import wisdom
    >>> wisdom.merge(tempfile.mkdtemp() + "/all.json", "no-such-file.json")
    0
    """
    joined = Wisdom(dict(ENGINE.planner.wisdom.versions))
    for source in sources:
        joined.load(Path(source))
    joined.save(Path(target))
    return Wisdom().load(Path(target))


def forget() -> None:
    """Drop all plans from memory; files stay.

    >>> from tilewise import wisdom
    >>> wisdom.forget()
    """
    ENGINE.forget()

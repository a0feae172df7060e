"""The command line. Without the extra `cli` it says what to install."""

from __future__ import annotations

import sys
from collections.abc import Sequence

OK, NO, USAGE, MISSING = 0, 1, 2, 3  # what the exit codes mean: docs/cli.md


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code.

    >>> main(["--version"]) in (OK, MISSING)  # doctest: +ELLIPSIS
    tilewise ...
    True
    """
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(f"the command line needs {error.name}: pip install 'tilewise[cli]'", file=sys.stderr)
        return MISSING
    from .app import run

    return run(sys.argv[1:] if arguments is None else list(arguments))

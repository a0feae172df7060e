"""For the API page: the `>>>` examples of docstrings as code (mkdocs.yml loads it)."""

from __future__ import annotations

import re
from typing import Any

try:
    from griffe import Extension
except ImportError:  # griffe comes with the extra `docs`; `fenced` does without
    Extension = object

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n).+)*", re.MULTILINE)  # up to an empty line


def fenced(text: str) -> str:
    """A docstring with its examples in fences.

    >>> fenced(">>> 1 + 1\\n2")
    '```pycon\\n>>> 1 + 1\\n2\\n```'
    """
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)


class DoctestBlocks(Extension):
    """Griffe calls it for every object that it has read."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)

"""tilewise.bundle: code, plans and prepared weights of a model in one directory, for many workers.

A bundle is code. It is loaded only when it is named, and what it holds is verified first.
"""

from .loading import load
from .saving import save

__all__ = ["load", "save"]

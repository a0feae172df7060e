"""A small trainer: seedable, resumable, data-parallel; a demonstration that the engine trains."""

from .loop import train
from .progress import Lines
from .settings import ENGINES, Settings

__all__ = ["ENGINES", "Lines", "Settings", "train"]

"""tilewise.scale: batch inference over many images, in one process or on Ray. Extra: `scale`."""

from .jobs import Report, infer
from .predictor import Predictor

__all__ = ["Predictor", "Report", "infer"]

"""From a problem to a plan: reject, estimate, and measure where it is asked for."""

from .planner import Candidate, Planner

__all__ = ["Candidate", "Planner"]

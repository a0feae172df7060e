"""Plain data and the contract; imports nothing else of the package."""

from .algorithm import Algorithm
from .errors import InvalidProblem, InvalidSchedule, NoAlgorithm, TilewiseError, UnknownAlgorithm
from .isa import ISA, Isa
from .plan import Plan
from .problem import Epilogue, Problem
from .schedule import Schedule, Space
from .target import Target

__all__ = ["ISA", "Algorithm", "Epilogue", "InvalidProblem", "InvalidSchedule", "Isa",
           "NoAlgorithm", "Plan", "Problem", "Schedule", "Space", "Target", "TilewiseError",
           "UnknownAlgorithm"]

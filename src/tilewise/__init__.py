"""Convolutions for PyTorch, planned, tuned and compiled for the machine at hand."""

from importlib.metadata import PackageNotFoundError, version

from .core import Epilogue, Plan, Problem, Schedule, Target, TilewiseError
from .frontend import nn, wisdom
from .frontend.explain import explain
from .frontend.gpu_audit import gpu_audit
from .frontend.image import filter2d
from .frontend.ops import conv2d
from .frontend.optimize import optimize
from .frontend.settings import algorithms, set_cache_limit, set_memory_limit
from .frontend.stream import stream

try:
    __version__ = version("tilewise")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0+source"

__all__ = ["Epilogue", "Plan", "Problem", "Schedule", "Target", "TilewiseError", "algorithms",
           "conv2d", "explain", "filter2d", "gpu_audit", "nn", "optimize", "set_cache_limit",
           "set_memory_limit", "stream", "wisdom"]

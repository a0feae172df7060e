"""Convolutions for PyTorch, planned, tuned and compiled for the machine at hand."""

from importlib.metadata import PackageNotFoundError, version

from . import bundle
from .conv.lines import conv1d
from .conv.ops import conv2d
from .conv.transposed import conv_transpose1d, conv_transpose2d
from .conv.transposed_volumes import conv_transpose3d
from .conv.volumes import conv3d
from .core import Epilogue, Plan, Problem, Schedule, Target, TilewiseError
from .image.filter2d import filter2d
from .model import nn
from .model.explain import explain
from .model.optimize import optimize
from .model.profile import profile
from .model.stream import stream
from .tools import wisdom
from .tools.gpu_audit import gpu_audit
from .tools.settings import algorithms, set_cache_limit, set_memory_limit, threads

try:
    __version__ = version("tilewise")
except PackageNotFoundError:  # run from a source tree
    __version__ = "0+source"

__all__ = ["Epilogue", "Plan", "Problem", "Schedule", "Target", "TilewiseError", "algorithms",
           "bundle",
           "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
           "conv_transpose3d", "explain",
           "filter2d", "gpu_audit", "nn", "optimize", "profile", "set_cache_limit",
           "set_memory_limit", "stream", "threads", "wisdom"]

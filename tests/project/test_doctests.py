"""The examples of docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import numpy as np
import pytest
import torch

import tilewise.bench
import tilewise.conv
import tilewise.core
import tilewise.image
import tilewise.model
import tilewise.tools
import tilewise.training
from tilewise.conv.running import ENGINE
from tilewise.kernels.cpu.emit.launch import KERNELS
from tilewise.kernels.cpu.memory import POOL
from tilewise.runtime.weights import MADE
from tilewise.tools.settings import set_cache_limit, set_memory_limit

MODULES = sorted(f"{package.__name__}.{module.name}"
                 for package in (tilewise.bench, tilewise.conv, tilewise.core, tilewise.image,
                                 tilewise.model, tilewise.tools,
                                 tilewise.training)
                 for module in pkgutil.iter_modules(package.__path__)) + [
                     "tilewise.cli", "tilewise.models"]
# what users call first, and so what must show how
SHOWN = ("tilewise.core.problem", "tilewise.core.schedule", "tilewise.core.target",
         "tilewise.model.explain", "tilewise.image.filter2d", "tilewise.conv.ops",
         "tilewise.model.optimize", "tilewise.tools.settings", "tilewise.model.stream",
         "tilewise.tools.wisdom", "tilewise.models", "tilewise.training.settings")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    caches = (POOL, MADE, KERNELS, ENGINE.executables)
    limits = [cache.limit for cache in caches]
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch, "np": np})
    for cache, limit in zip(caches, limits):
        cache.limit = limit
    assert result.failed == 0
    assert result.attempted > 0 or name not in SHOWN


def test_the_modules_are_found() -> None:
    assert set(SHOWN) <= set(MODULES)
    assert set_cache_limit.__doc__
    assert set_memory_limit.__doc__

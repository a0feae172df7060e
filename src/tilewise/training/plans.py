"""One choice of plans for a whole run: for all its processes, and after every interruption."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from ..core.progress import Tell, counting, silent
from ..model.optimize import optimize
from ..tools.sharing import noted, to_text


def rehearse(model: nn.Module, shape: tuple[int, ...], train: Collection[int],
             test: Collection[int], tell: Tell = silent) -> str:
    """Run a model, which is spoilt by it, on batches of these sizes; returns the plans as text."""
    fast, tick = optimize(model), counting(tell, "planning", len(train) + len(test))
    with noted() as plans, torch.random.fork_rng(devices=[]):
        for n in train:
            fast.train()(torch.zeros(n, *shape)).sum().backward()
            tick()
        with torch.no_grad():
            for n in test:
                fast.eval()(torch.zeros(n, *shape))
                tick()
    return to_text(plans)


def sizes(count: int, batch: int, world: int) -> set[int]:
    """How many images of a batch a rank can get, when `count` are divided into batches.

    One that gets none takes one which does not count.
    """
    batches = {min(batch, count), count % batch} - {0}
    return {max(1, n) for size in batches for n in (size // world, -(-size // world))}

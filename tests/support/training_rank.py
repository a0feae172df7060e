"""One rank of a data-parallel run, started by torchrun: makes a step and writes what it saw.

    training_rank.py DATA OUTPUT

The first rank's wisdom names other algorithms than anybody would estimate.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

data, output = Path(sys.argv[1]), Path(sys.argv[2])
rank = int(os.environ["RANK"])
os.environ["TILEWISE_CACHE_DIR"] = str(output / f"cache{rank}")

import torch  # noqa: E402

from tilewise.conv.running import ENGINE  # noqa: E402
from tilewise.tools.sharing import noted  # noqa: E402
from tilewise.training import Settings, engines  # noqa: E402
from tilewise.training.images import open_images  # noqa: E402
from tilewise.training.loop import Run  # noqa: E402
from tilewise.training.progress import Silent  # noqa: E402
from tilewise.training.ranks import joined  # noqa: E402

SETTINGS = Settings(str(data), "lenet_b", batch=24, seed=4)


def own_plans(run_on: torch.Tensor) -> list:
    """What this rank would choose alone."""
    from tilewise import optimize, wisdom
    from tilewise.models import MODELS

    with noted() as plans:
        optimize(MODELS[SETTINGS.model](classes=3)).train()(run_on).sum().backward()
    if rank == 0:  # as if it had measured
        for plan in plans:
            p, t = plan.problem, plan.target
            ENGINE.planner.wisdom.record(
                ENGINE.planner.plan(p, t, algorithm="vendor") if p.direction == "forward"
                else plan, ENGINE.admitted(None, p, t), ENGINE.bits(None, p, t))
        wisdom.save()
        ENGINE.executables.clear()
        with noted() as plans:
            optimize(MODELS[SETTINGS.model](classes=3)).train()(run_on).sum().backward()
    return [(str(plan.problem), plan.algorithm, dict(plan.schedule)) for plan in plans]


def main() -> None:
    images = open_images(SETTINGS.data, *engines.image_shape(SETTINGS))
    alone = own_plans(torch.zeros(12, 1, 70, 70))
    with joined() as ranks:
        run = Run(SETTINGS, output, images, ranks, Silent())
        gradients, losses, shares = [], [], []
        with noted() as plans:
            for numbers in run._batches():  # the last of 99 has three images: two and one
                with torch.no_grad():  # every step from the same weights
                    weights = [weight.clone() for weight in run.model.parameters()]
                losses.append(run._learn(numbers))
                gradients.append([weight.grad.clone() for weight in run.model.parameters()])
                shares.append(len(ranks.share(numbers)))
                with torch.no_grad():
                    for weight, old in zip(run.model.parameters(), weights):
                        weight.copy_(old)
    torch.save({"alone": alone, "gradients": gradients, "losses": losses, "shares": shares,
                "plans": [(str(p.problem), p.algorithm, dict(p.schedule)) for p in plans]},
               output / f"rank{rank}.pt")


if __name__ == "__main__":
    main()

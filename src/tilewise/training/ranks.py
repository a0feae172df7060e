"""The processes of a data-parallel run; one process is a run of one rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..core.errors import TilewiseError


class Ranks:
    """Which process this is, of how many, and what they say to each other."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world

    @property
    def first(self) -> bool:
        return self.rank == 0

    def from_first(self, value: Any) -> Any:
        """The first rank's value, in every rank."""
        box = [value]
        if self.world > 1:
            dist.broadcast_object_list(box)
        return box[0]

    def from_all(self, value: Any) -> list[Any]:
        """The values of all ranks, in every rank."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def total(self, value: Tensor) -> Tensor:
        """The sum over all ranks; `value` is written over."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def share(self, numbers: Tensor) -> Tensor:
        """This rank's part of a batch."""
        return numbers.tensor_split(self.world)[self.rank]

    def parallel(self, model: nn.Module) -> nn.Module:
        """The model with gradients that are the mean over all ranks."""
        return nn.parallel.DistributedDataParallel(model) if self.world > 1 else model


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that torchrun has started, or this process alone."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks()
        return
    dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), world)
        dist.barrier()  # nobody leaves while another still speaks
    except RuntimeError as problem:
        if not _is_lost(problem):
            raise
        raise TilewiseError(
            f"rank {dist.get_rank()} lost the others: one of the {world} processes has ended, see "
            "its own message; without one it was killed, perhaps for want of memory. The same "
            "command goes on from the last checkpoint") from problem
    finally:
        dist.destroy_process_group()


def _is_lost(problem: RuntimeError) -> bool:
    """Whether another process does not answer; gloo names its own file."""
    return isinstance(problem, dist.DistError) or "gloo" in str(problem)

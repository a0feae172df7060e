"""tilewise.stream: batches through a model in segments that travel while others compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.errors import TilewiseError

FLYING = 3  # segments on their way: one moves in, one computes, one moves out
ALIGNMENT = 256  # bytes


def stream(model: Callable[[Tensor], Tensor], batches: Iterable[Tensor], *, segment: int = 64,
           device: str | torch.device | None = None) -> Iterator[Tensor]:
    """The model's result for every batch, in order, on the CPU.

    Batches are cut into segments. One moves to the device while another is computed and the
    result of a third moves back; at most three are under way. An error of the model, or of
    whoever makes the batches, is raised after the results of all batches before it.

    Args:
        model: A module or a function.
        batches: Tensors of images.
        segment: Images that move and compute together.
        device: Where the model lives; that of its parameters, if not said.

    Yields:
        One result for each batch.

    >>> model = torch.nn.Conv2d(3, 8, 3)
    >>> [tuple(y.shape) for y in stream(model, [torch.randn(5, 3, 8, 8)] * 2, segment=2)]
    [(5, 8, 6, 6), (5, 8, 6, 6)]
    """
    if segment < 1:
        raise TilewiseError(f"segment is {segment}, needs at least one image")
    return _results(_Line(model, torch.device(device or _home(model))), _cut(batches, segment))


def _home(model: Any) -> torch.device:
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    return next((p.device for p in parameters), torch.device("cpu"))


def _cut(batches: Iterable[Tensor], segment: int) -> Iterator[tuple[Tensor, bool]]:
    """Segments, and whether each is the last of its batch."""
    for batch in batches:
        if not isinstance(batch, Tensor) or batch.dim() < 1:
            raise TilewiseError(f"a batch is {type(batch).__name__}, needs a tensor of images")
        pieces = batch.split(segment)
        for i, piece in enumerate(pieces):
            yield piece, i == len(pieces) - 1


def _results(line: _Line, pieces: Iterator[tuple[Tensor, bool]]) -> Iterator[Tensor]:
    flying: deque[tuple[_Job, bool]] = deque()
    parts: list[Tensor] = []
    broken: Exception | None = None
    while flying or broken is None:
        while broken is None and len(flying) < FLYING:
            try:
                piece, last = next(pieces)
            except StopIteration:
                broken = StopIteration()
            except Exception as error:  # raised when all before it has been handed over
                broken = error
            else:
                flying.append((line.send(piece), last))
        if not flying:
            break
        job, last = flying.popleft()
        parts.append(line.receive(job))
        if last:
            yield torch.cat(parts)
            parts = []
    if broken is not None and not isinstance(broken, StopIteration):
        raise broken


@dataclass
class _Job:
    """A segment under way; what it holds must live until it has arrived."""

    place: int
    held: tuple[Tensor, ...] = ()
    result: Tensor | None = None
    arrived: Any = None
    error: Exception | None = None


class _Line:
    """Three streams of a device and the memory of the segments between them."""

    def __init__(self, model: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self.model, self.device = model, device
        self.module = torch.get_device_module(device)
        on_device = nullcontext() if device.type == "cpu" else self.module.device(device)
        with on_device:
            self.inward, self.work, self.outward = (self.module.Stream() for _ in range(3))
        self.sources, self.results = _Arena(device), _Arena(device)
        self.sent = 0

    def send(self, piece: Tensor) -> _Job:
        job = _Job(self.sent % FLYING)
        self.sent += 1
        try:
            self._start(job, piece)
        except Exception as error:  # raised where the result would have been
            job.error = error
        return job

    def _start(self, job: _Job, piece: Tensor) -> None:
        module = self.module
        source = self.sources.like(job.place, piece).copy_(piece)
        with module.stream(self.inward):
            x = source.to(self.device, non_blocking=True)
            moved = self._mark(self.inward)
        self.work.wait_event(moved)
        with module.stream(self.work), torch.no_grad():
            y = self.model(x)
            done = self._mark(self.work)
        self.outward.wait_event(done)
        with module.stream(self.outward):
            job.result = self.results.like(job.place, y).copy_(y, non_blocking=True)
            job.arrived = self._mark(self.outward)
        job.held = (source, x, y)

    def _mark(self, stream: Any) -> Any:
        event = self.module.Event()
        event.record(stream)
        return event

    def receive(self, job: _Job) -> Tensor:
        """The result of a segment, copied out of the arena."""
        if job.error is not None:
            raise job.error
        job.arrived.synchronize()
        assert job.result is not None
        return job.result.clone()


class _Arena:
    """One aligned block for all segments under way, pinned where a device copies from it."""

    def __init__(self, device: torch.device) -> None:
        self.pinned = device.type != "cpu"
        self.room, self.block = 0, torch.empty(0, dtype=torch.uint8)

    def like(self, place: int, tensor: Tensor) -> Tensor:
        """Memory for a tensor of this shape and layout at one of the places."""
        size = tensor.numel() * tensor.element_size()
        if size > self.room:  # what is under way keeps the old block alive
            self.room = -(-size // ALIGNMENT) * ALIGNMENT
            self.block = torch.empty(FLYING * self.room + ALIGNMENT, dtype=torch.uint8,
                                     pin_memory=self.pinned)
        start = -self.block.data_ptr() % ALIGNMENT + place * self.room
        flat = self.block[start:start + size].view(tensor.dtype)
        if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
            n, c, h, w = tensor.shape
            return flat.view(n, h, w, c).permute(0, 3, 1, 2)
        return flat.view(tensor.shape)

"""The run itself: batches, steps, checkpoints, tests."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core.errors import TilewiseError
from ..core.files import write_atomically
from ..core.progress import counting
from ..tools.sharing import adopt
from . import checkpoint, engines, plans
from .average import Average
from .images import Split, batch, open_images, order
from .progress import AVERAGED, Progress, Silent
from .ranks import Ranks, joined
from .settings import Settings

METRICS = "metrics.json"
SPREAD = 1_000_003  # between seeds of dropout where a run goes on in more or fewer processes


def train(settings: Settings, directory: str | Path, progress: Progress | None = None,
          ) -> dict[str, Any]:
    """Train, or go on from the directory's checkpoint.

    Under torchrun every process calls this, with the same arguments.

    Args:
        settings: The run.
        directory: Where the checkpoint and the metrics go.
        progress: Is told of steps and epochs; `Lines` prints them.

    Returns:
        Losses of all steps ("losses"), and what each epoch gave ("epochs").

    >>> history = train(Settings("fashion-mnist", epochs=1), "run")  # doctest: +SKIP
    >>> history["epochs"][-1]["accuracy"]  # doctest: +SKIP
    0.8573
    """
    shape = engines.image_shape(settings)
    images = open_images(settings.data, *shape)
    with _precision(settings.precision), joined() as ranks:
        if not ranks.first:
            return Run(settings, Path(directory), images, ranks, Silent()).to_the_end()
        with checkpoint.owned(Path(directory)):
            return Run(settings, Path(directory), images, ranks, progress or Silent()).to_the_end()


@contextmanager
def _precision(name: str) -> Iterator[None]:
    """Torch's setting for the run; it belongs to the process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Run:
    """A run at some position: everything that a checkpoint holds."""

    def __init__(self, settings: Settings, directory: Path, images: Split, ranks: Ranks,
                 progress: Progress) -> None:
        self.settings, self.directory, self.images = settings, directory, images
        self.ranks, self.progress = ranks, progress
        self.count = min(len(images.train.labels), settings.limit or len(images.train.labels))
        self.epoch, self.step, self.seconds = 0, 0, 0.0
        self.history: dict[str, list[Any]] = {"losses": [], "epochs": []}
        state = ranks.from_first(checkpoint.load(directory) if ranks.first else None)
        if state is not None:
            with checkpoint.understood(directory):
                checkpoint.check(state)
        self.plans = self._planned(state)
        self.model = engines.build(settings, images.train.classes)
        self.runner = engines.runner(settings, self.model)
        self.parallel = ranks.parallel(self.runner)
        self.optimizer = torch.optim.SGD(self.model.parameters(), settings.rate,
                                         settings.momentum, weight_decay=settings.decay)
        self.average = Average(self.model, settings.average) if settings.average else None
        torch.manual_seed(settings.seed + 1 + ranks.rank)  # of dropout
        if state is not None:
            with checkpoint.understood(directory):
                self._restore(state)
        self.steps = settings.epochs * len(self._batches())

    def to_the_end(self) -> dict[str, Any]:
        """All epochs that are left."""
        s, done = self.settings, len(self.history["losses"])
        self.progress.start(done, self.steps, self._note())
        while self.epoch < s.epochs:
            self._one_epoch()
        if self.ranks.first:
            write_atomically(self.directory / METRICS, self._metrics().encode())
        return self.history

    def _one_epoch(self) -> None:
        todo = self._batches()
        for numbers in todo[self.step:]:
            started = time.perf_counter()
            loss = self._learn(numbers)
            self.seconds += time.perf_counter() - started
            self.step += 1
            self.history["losses"].append(loss)
            if self.step % self.settings.save_every == 0 and self.step < len(todo):
                self._save()
            self.progress.step(self.epoch + 1, self.step, len(todo), loss)
        losses = self.history["losses"][-len(todo):]
        summary = {"loss": sum(losses) / max(1, len(losses)), "accuracy": self._accuracy(),
                   "images": sum(map(len, todo)), "seconds": self.seconds}
        if self.average is not None:
            with self.average.in_place():
                summary[AVERAGED] = self._accuracy()
        self.history["epochs"].append(summary)
        self.epoch, self.step, self.seconds = self.epoch + 1, 0, 0.0
        self._save()
        self.progress.epoch(self.epoch, summary)

    def _batches(self) -> list[Tensor]:
        """Of this epoch, the same for any number of ranks."""
        return order(self.count, self.settings.batch, self.settings.seed, self.epoch)

    def _learn(self, numbers: Tensor) -> float:
        """One step; the loss is the mean over the whole batch, however it is shared."""
        mine = self.ranks.share(numbers)
        # a rank without a share takes part with an image that does not count
        images, labels = batch(self.images.train, mine if len(mine) else numbers[:1])
        self._set_rate()
        self.parallel.train()
        scores = self.parallel(images)
        total = F.cross_entropy(scores, labels, reduction="sum") * bool(len(mine))
        loss = total / len(numbers)
        self.optimizer.zero_grad()
        (loss * self.ranks.world).backward()  # gradients are averaged over the ranks
        self.optimizer.step()
        if self.average is not None:
            self.average.update()
        return float(self.ranks.total(loss.detach()))

    def _set_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate_at(len(self.history["losses"]), self.steps)

    @torch.no_grad()
    def _accuracy(self) -> float:
        """Share of the test images that are recognised."""
        test = self.images.test
        self.runner.eval()
        right = torch.zeros(())
        tick = counting(self.progress.doing, "testing", -(-len(test.labels) // self.settings.batch))
        for numbers in torch.arange(len(test.labels)).split(self.settings.batch):
            mine = self.ranks.share(numbers)
            if len(mine):
                images, labels = batch(test, mine)
                right += (self.runner(images).argmax(1) == labels).sum()
            tick()
        return float(self.ranks.total(right)) / len(test.labels)

    # plans

    def _planned(self, state: dict[str, Any] | None) -> str:
        """The plans of the run: the checkpoint's, else the first rank's; used by all ranks."""
        if self.settings.engine != "tilewise":
            return "[]"
        same = state is not None and state["identity"].get("processes") == self.ranks.world
        text = state["plans"] if state is not None and same else None
        if text is None and self.ranks.first:
            s, world = self.settings, self.ranks.world
            size, channels = engines.image_shape(s)
            text = plans.rehearse(
                engines.build(s, self.images.train.classes), (channels, size, size),
                plans.sizes(self.count, s.batch, world),
                plans.sizes(len(self.images.test.labels), s.batch, world), self.progress.doing)
        text = self.ranks.from_first(text)
        with checkpoint.understood(self.directory) if same else nullcontext():
            adopt(text)
        return str(text)

    # checkpoints

    def _save(self) -> None:
        rng = self.ranks.from_all(torch.get_rng_state())
        if self.ranks.first:
            checkpoint.save(self.directory, {
                "settings": self.settings.to_dict(),
                "identity": {"processes": self.ranks.world, **self._identity()},
                "threads": torch.get_num_threads(), "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(), "epoch": self.epoch, "step": self.step,
                "seconds": self.seconds, "rng": rng, "plans": self.plans,
                "average": None if self.average is None else self.average.state(),
                "history": self.history})

    def _restore(self, state: dict[str, Any]) -> None:
        self._check(state)
        self.model.load_state_dict(state["model"])
        engines.restore(self.optimizer, state["optimizer"])
        self.epoch, self.step, self.seconds = state["epoch"], state["step"], state["seconds"]
        self.history = state["history"]
        if self.average is not None:
            self.average.restore(state["average"])
        if len(state["rng"]) == self.ranks.world:
            torch.set_rng_state(state["rng"][self.ranks.rank])
        else:  # other masks of dropout, not those of the first steps again
            done = len(self.history["losses"])
            torch.manual_seed(self.settings.seed + 1 + self.ranks.rank + SPREAD * (done + 1))

    def _identity(self) -> dict[str, int]:
        """What else must be the same for a run to go on."""
        return {"training images": self.count,
                "test images": len(self.images.test.labels),
                "classes": self.images.train.classes}

    def _check(self, state: dict[str, Any]) -> None:
        wrong = self.settings.differences(state["settings"])
        wrong += [f"{name} were {state['identity'].get(name)}, are {value}"
                  for name, value in self._identity().items()
                  if state["identity"].get(name) != value]
        if wrong:
            raise TilewiseError(f"{self.directory} holds another run: {'; '.join(wrong)}; name "
                                "another directory, or delete this one")
        before, now = state["identity"].get("processes"), self.ranks.world
        for name, was, is_ in (("threads", state["threads"], torch.get_num_threads()),
                               ("processes", before, now)):
            if was != is_ and self.ranks.first:
                warnings.warn(f"the run had {was} {name}, has {is_}: the last bits may differ",
                              stacklevel=2)

    def _note(self) -> str:
        s = self.settings
        where = f", from epoch {self.epoch + 1} step {self.step}" if self.history["losses"] else ""
        return (f"{s.model} with {s.engine}: {self.count} images in batches of {s.batch}, "
                f"{s.epochs} epochs, {self.ranks.world} process"
                f"{'' if self.ranks.world == 1 else 'es'}{where}")

    def _metrics(self) -> str:
        return json.dumps({"settings": self.settings.to_dict(), "processes": self.ranks.world,
                           "threads": torch.get_num_threads(), **self.history}) + "\n"

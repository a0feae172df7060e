"""Work that is ended by SIGKILL: what is on the disk afterwards, and what the next run makes of it.

Half of the kills come at a random time, half before a random change of a file.
"""

from __future__ import annotations

import json
import os
import random
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import tilewise
from tilewise.bundle import files as bundle_files
from tilewise.bundle import saving
from tilewise.core import limits
from tilewise.core.schedule import Schedule
from tilewise.kernels.cpu.emit import jit
from tilewise.models import lenet_b
from tilewise.planner.wisdom import Entry, Wisdom
from tilewise.training import Settings, checkpoint, train
from tilewise.training.progress import Silent

from .bundled import Small, image
from .children import Ended, Moment, Say, forked
from .training_sets import idx_set

SMALL, LARGE = "n1c3h9w8k4r3s3p1_f32_forward", "n1c8h9w8k16r3s3p1_f32_forward"


class Unreadable(AssertionError):
    """A file that a kill left cannot be read."""


class Lost(AssertionError):
    """Something that had been saved is not there."""


class Wrong(AssertionError):
    """A later run has another result."""


@contextmanager
def no_warnings(kind: type[AssertionError]) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            yield
        except AssertionError:
            raise
        except Exception as problem:
            raise kind(repr(problem)) from problem


class Work:
    """Something that writes to a directory, again and again."""

    name = ""
    chain = 1  # kills until it starts with a new directory

    def __init__(self, place: Path) -> None:
        self.root = place
        self.cache = place / "cache"

    def begin(self, place: Path) -> None:
        """What is there before the first run."""

    def run(self, place: Path, number: int, say: Say) -> None:
        """Say a line whenever something has been saved."""
        raise NotImplementedError

    def check(self, place: Path, number: int, said: list[str]) -> None:
        """After a kill: all that was said is there and can be read."""

    def finish(self, place: Path, number: int) -> None:
        """The next run is right; it may take the place of the last of a chain alone."""


class Compile(Work):
    """Kernels into the cache of objects."""

    name = "compile kernels into the cache"

    def run(self, place: Path, number: int, say: Say) -> None:
        os.environ["TILEWISE_CACHE_DIR"] = str(place / "cache")
        for i, (x, weight) in enumerate(self._operands(number)):
            y = tilewise.conv2d(x, weight, padding=1, algorithm="cpu_pixels")
            if not torch.allclose(y, F.conv2d(x, weight, padding=1), atol=1e-4):
                raise Wrong(f"kernel {i}")
            say(f"{i} {jit.compiled}")

    def check(self, place: Path, number: int, said: list[str]) -> None:
        again: list[str] = []
        with no_warnings(Unreadable):
            self.run(place, number, again.append)
        for line in said:  # after so many calls, so many of them must have come from the disk
            calls = int(line.split()[0])
            if again[calls].split()[1] != "0":
                raise Lost(f"kernel {calls} was compiled again")

    def finish(self, place: Path, number: int) -> None:
        told: list[str] = []
        self.run(place, number, told.append)
        if told[-1].split()[1] != "0":
            raise Lost("a kernel is not kept after a kill")

    @staticmethod
    def _operands(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        draw = torch.Generator().manual_seed(number)
        c, k = 1 + number % 3, 2 + number // 3 % 9
        return [(torch.randn(1, c, 7, 9, generator=draw), torch.randn(k, c, r, 3, generator=draw))
                for r in (3, 1)]


class Plans(Work):
    """Wisdom and measured limits, which many processes add to."""

    name = "save wisdom and limits"
    chain = 25
    SAVES = 6

    def run(self, place: Path, number: int, say: Say) -> None:
        os.environ["TILEWISE_CACHE_DIR"] = str(place)
        wisdom = Wisdom({"torch": "1"})
        for i in range(self.SAVES):
            name = f"{number}.{i}"
            wisdom.entries = {name: Entry("vendor", 1, Schedule(), 1.0, wisdom.versions)}
            wisdom.save(place / "wisdom.json")
            say(f"wisdom {name}")
            if not limits.keep("avx2", self.SAVES * number + i, limits.Limits(2e9, 1e10)):
                raise Wrong("limits are not kept")
            say(f"limits {self.SAVES * number + i}")

    def check(self, place: Path, number: int, said: list[str]) -> None:
        os.environ["TILEWISE_CACHE_DIR"] = str(place)
        book = place / "said"
        known = (book.read_text().split("\n") if book.exists() else []) + said
        found = Wisdom()
        with no_warnings(Unreadable):
            found.load(place / "wisdom.json")
            if (place / "limits.json").exists():
                json.loads((place / "limits.json").read_text())
        for line in filter(None, known):
            kind, name = line.split()
            there = name in found.entries if kind == "wisdom" else limits.kept("avx2", int(name))
            if not there:
                raise Lost(line)
        book.write_text("\n".join(known))

    def finish(self, place: Path, number: int) -> None:
        told: list[str] = []
        self.run(place, 10_000 + number, told.append)
        self.check(place, number, told)
        if left := [path.name for path in place.glob("*.tmp")]:
            raise Wrong(f"{left[0]} is left")


class Bundle(Work):
    """A bundle in the place of an older one. Processes for rows are forked, most of the time."""

    name = "save a bundle over another"
    chain = 8

    def begin(self, place: Path) -> None:
        self._save(place, 0, spawn=False)

    def run(self, place: Path, number: int, say: Say) -> None:
        self._save(place, number, spawn=number % 16 == 15)
        say(f"{number}")

    def check(self, place: Path, number: int, said: list[str]) -> None:
        os.environ["TILEWISE_CACHE_DIR"] = str(self.cache)
        if not (place / "bundle" / bundle_files.MANIFEST).exists():
            raise Lost("there is no bundle any more")
        with no_warnings(Unreadable):
            fast = tilewise.bundle.load(place / "bundle", Small)
            with torch.inference_mode():
                found, mark = fast(image()), round(float(fast.scale) * 1000)
        with torch.inference_mode():
            if not torch.allclose(found, model(mark)(image()), atol=1e-4):
                raise Wrong(f"the bundle of {mark}")
        if said and mark != number:
            raise Lost(f"{number} was saved, {mark} is there")
        if not said and mark not in (number, self._last(place)):
            raise Lost(f"{mark} is there, which was replaced")
        (place / "last").write_text(str(mark))

    def finish(self, place: Path, number: int) -> None:
        self._save(place, number + 500, spawn=False)
        self.check(place, number + 500, ["saved"])
        if left := [path.name for path in place.glob(".bundle*")]:
            raise Wrong(f"{left[0]} is left")

    @staticmethod
    def _last(place: Path) -> int:
        return int((place / "last").read_text()) if (place / "last").exists() else 0

    def _save(self, place: Path, number: int, spawn: bool) -> None:
        os.environ["TILEWISE_CACHE_DIR"] = str(self.cache)
        if not spawn:
            contexts = saving.multiprocessing.get_context
            saving.multiprocessing.get_context = lambda how: contexts("fork")
        tilewise.bundle.save(model(number), image(), place / "bundle")


def model(number: int) -> torch.nn.Module:
    """Weights of a number, which they tell."""
    torch.manual_seed(number)
    made = Small().eval()
    made.scale.fill_(number / 1000)
    return made


class Infer(Work):
    """Batch inference in one process."""

    name = "infer images into Parquet files"
    chain = 4
    IMAGES, ROWS = 20, 4

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self._expected: dict[str, Any] = {}

    def begin(self, place: Path) -> None:
        from PIL import Image

        place.mkdir(exist_ok=True)
        source = self.root / "images"
        if not source.exists():
            source.mkdir()
            draw = torch.Generator().manual_seed(0)
            for i in range(self.IMAGES):
                pixels = torch.randint(0, 256, (70, 70), generator=draw, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(source / f"{i:03}.png")
            self._infer(self.root / "alone", lambda *told: None)

    def run(self, place: Path, number: int, say: Say) -> None:
        self._infer(place / "out", lambda what, done, total: say(f"{done}"))

    def check(self, place: Path, number: int, said: list[str]) -> None:
        before = place / "parts"
        known = int(before.read_text()) if before.exists() else 0
        with no_warnings(Unreadable):
            rows = self._read(place / "out")
        wanted = self._read(self.root / "alone")
        if any(wanted[name] != row for name, row in rows.items()):
            raise Wrong("a row has other bits")
        saved = known + (int(said[-1]) if said else 0)
        if len(rows) < saved:
            raise Lost(f"{saved} rows were saved, {len(rows)} are there")
        before.write_text(str(len(rows)))

    def finish(self, place: Path, number: int) -> None:
        self.run(place, number, lambda text: None)
        if self._read(place / "out") != self._read(self.root / "alone"):
            raise Wrong("not every row is there once with the same bits")
        if left := list((place / "out").glob("*.tmp")):
            raise Wrong(f"{left[0].name} is left")

    def _infer(self, output: Path, tell: Any) -> None:
        from tilewise.scale import infer
        from tilewise.scale.images import Form

        os.environ["TILEWISE_CACHE_DIR"] = str(self.cache)
        infer(_lenet, self.root / "images", output, form=Form(1, 70, 70), rows=self.ROWS, batch=4,
              threads=1, ray=False, tell=tell)

    @staticmethod
    def _read(output: Path) -> dict[str, Any]:
        from pyarrow import parquet

        found: dict[str, Any] = {}
        for file in sorted(output.glob("*.parquet")):
            for row in parquet.read_table(file, use_threads=False).to_pylist():
                if row["name"] in found:
                    raise Wrong(f"{row['name']} is there twice")
                found[row["name"]] = row["output"]
        return found


def _lenet() -> torch.nn.Module:
    torch.manual_seed(1)
    return lenet_b().eval()


class Train(Work):
    """The trainer, which goes on from its last checkpoint."""

    name = "train, with a checkpoint after every step"
    chain = 5

    def begin(self, place: Path) -> None:
        place.mkdir(exist_ok=True)
        if not (self.root / "data").exists():
            idx_set(self.root / "data", train=32, test=8)
            self._train(self.root / "alone", Silent())

    def run(self, place: Path, number: int, say: Say) -> None:
        self._train(place / "run", Told(say))

    def check(self, place: Path, number: int, said: list[str]) -> None:
        with no_warnings(Unreadable):
            state = checkpoint.load(place / "run")
        steps = 0 if state is None else len(state["history"]["losses"])
        if steps < (int(said[-1]) if said else 0):
            raise Lost(f"{said[-1]} steps were saved, {steps} are there")

    def finish(self, place: Path, number: int) -> None:
        self._train(place / "run", Silent())
        wanted, found = checkpoint.load(self.root / "alone"), checkpoint.load(place / "run")
        if found["history"]["losses"] != wanted["history"]["losses"]:
            raise Wrong("other losses")
        if not all(map(torch.equal, found["model"].values(), wanted["model"].values())):
            raise Wrong("other weights")
        if left := list((place / "run").glob("*.tmp")):
            raise Wrong(f"{left[0].name} is left")

    def _train(self, output: Path, progress: Any) -> None:
        os.environ["TILEWISE_CACHE_DIR"] = str(self.cache)
        torch.set_num_threads(1)
        train(Settings(str(self.root / "data"), "lenet_b", batch=8, epochs=2, save_every=1),
              output, progress)


class Told(Silent):
    """Says how many steps have been saved."""

    def __init__(self, say: Say) -> None:
        self._say, self._done = say, 0

    def start(self, done: int, steps: int, note: str = "") -> None:
        self._done = done

    def step(self, epoch: int, step: int, steps: int, loss: float) -> None:
        self._done += 1
        if step < steps:  # the last of an epoch is saved with the epoch
            self._say(f"{self._done}")

    def epoch(self, epoch: int, summary: Any) -> None:
        self._say(f"{self._done}")


WORKS: dict[str, type[Work]] = {"compile": Compile, "plans": Plans, "bundle": Bundle,
                                "infer": Infer, "train": Train}


def campaign(name: str, kills: int, place: Path, seed: int = 0) -> dict[str, Any]:
    """So many kills of one kind of work; what was found."""
    work, rng = WORKS[name](place), random.Random(f"{name} {seed}")
    row: dict[str, Any] = {"what": work.name, "kills": 0, "timed": 0, "aimed": 0, "unreadable": 0,
                           "lost": 0, "wrong": 0, "hung": 0, "faults": []}
    start, number = time.monotonic(), 2  # of the run
    seconds, touches = _rehearsed(work, place / "rehearsal", row)
    while row["kills"] < kills and number < 3 * kills + 20:
        moments = [_moment(rng, seconds, touches) for _ in range(work.chain)]
        number = _chain(work, place / f"{name}{number}", number, moments, row, kills)
    return {**row, "seconds": round(time.monotonic() - start, 1)}


def _chain(work: Work, home: Path, number: int, moments: list[Moment], row: dict[str, Any],
           kills: int) -> int:
    """Kills in one directory, and then the run that ends all right; the number of the last."""
    home.mkdir()
    _noted(row, forked(lambda say: work.begin(home)))
    for moment in moments:
        if row["kills"] == kills:
            break
        number += 1
        _one(work, home, number, moment, row)
    last = number
    _noted(row, forked(lambda say: work.finish(home, last)))
    return number + 1


def _rehearsed(work: Work, home: Path, row: dict[str, Any]) -> tuple[float, int]:
    """How long a run takes, and how many files it changes."""
    home.mkdir(parents=True)
    _noted(row, forked(lambda say: work.begin(home)))
    whole = forked(lambda say: work.run(home, 1, say), within=str(work.root))
    _noted(row, whole)
    second = home.with_name("rehearsal2")
    second.mkdir()
    forked(lambda say: work.begin(second))
    again = forked(lambda say: work.run(second, 2, say))
    return again.seconds, whole.said.count("touch")


def _moment(rng: random.Random, seconds: float, touches: int) -> Moment:
    if rng.random() < 0.5:
        return Moment(seconds=rng.uniform(0, 1.05 * seconds), group=rng.random() < 0.5)
    return Moment(touches=rng.randint(1, max(1, touches)))


def _one(work: Work, home: Path, number: int, moment: Moment, row: dict[str, Any]) -> None:
    ended = forked(lambda say: work.run(home, number, say), moment, str(work.root))
    if ended.killed and not ended.hung:
        row["kills"] += 1
        row["timed" if moment.seconds is not None else "aimed"] += 1
    else:
        _noted(row, ended)
    said = [line for line in ended.said if line != "touch"] if ended.killed or ended.well else []
    _noted(row, forked(lambda say: work.check(home, number, said)))


def _noted(row: dict[str, Any], ended: Ended) -> None:
    """A fault by its kind, if there is one."""
    if ended.well:
        return
    kind = "hung" if ended.hung else next(
        (kind for kind in ("unreadable", "lost") if f".{kind.capitalize()}:" in ended.why), "wrong")
    row[kind] += 1
    row["faults"].append(ended.why[-2000:])

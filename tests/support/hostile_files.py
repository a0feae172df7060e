"""Every file that tilewise reads, spoilt by a seed, and read in a process of its own.

It is used, or refused with a message that names it. Nothing of it is executed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import time
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import tilewise
from tilewise.bundle import files as bundle_files
from tilewise.bundle import manifest as bundle_manifest
from tilewise.cli import main
from tilewise.conv.running import ENGINE
from tilewise.core import limits
from tilewise.core.errors import TilewiseError
from tilewise.core.target import Target
from tilewise.planner.wisdom import Wisdom
from tilewise.training import Settings, checkpoint, idx, train

from . import hostile
from .bundled import Small, image, small
from .children import Ended, Say, forked
from .killed import Infer
from .training_sets import idx_set

CANARY = Path(hostile.EVIL.replace("../", "")[3:]).name
PATIENCE = 30.0  # seconds for a file; most take less than one
ROOM = 6 << 30  # bytes that reading one may take
LONGEST = 4000  # characters of a message
PROBLEM = tilewise.Problem.parse("n2c16h14w14k32r3s3p1_f32_forward+bias+relu")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


class Kind:
    """A kind of file: a valid one, how it is spoilt, and who reads it."""

    name = ""
    file = ""  # that is spoilt

    def __init__(self, root: Path) -> None:
        self.root = root / type(self).__name__.lower()

    def prepare(self) -> None:
        """Make the valid file in `root`, in a process of its own."""

    def spoil(self, rng: random.Random, path: Path) -> str:
        """Change a copy; returns how."""
        return spoil_json(rng, path)

    def read(self, place: Path, rng: random.Random) -> None:
        raise NotImplementedError


def spoil_json(rng: random.Random, path: Path) -> str:
    kind, content = rng.random(), path.read_bytes()
    if kind < 0.7:
        hostile.write(path, hostile.json_bytes(rng, json.loads(content)))
        return "as a tree"
    return spoil_bytes(rng, path)


def spoil_bytes(rng: random.Random, path: Path) -> str:
    if rng.random() < 0.7:
        hostile.write(path, hostile.spoilt(rng, path.read_bytes()))
        return "as bytes"
    return hostile.replaced(rng, path)


def on_command_line(*words: object) -> None:
    """A command ends with a code of its own, and what it says names no line of Python."""
    said, complaint = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complaint):
        code = main([str(word) for word in words])
    assert code in (0, 1, 2, 3), code
    assert "Traceback" not in said.getvalue() + complaint.getvalue(), complaint.getvalue()
    if code and complaint.getvalue():
        raise TilewiseError(complaint.getvalue())


class WisdomFile(Kind):
    name, file = "wisdom", "wisdom.json"

    def prepare(self) -> None:
        wisdom = Wisdom(dict(ENGINE.planner.wisdom.versions))
        for name in ("cpu_direct", "cpu_winograd", "vendor"):
            wisdom.record(ENGINE.planner.plan(PROBLEM.with_(n=len(name)), Target.host(threads=2),
                                              algorithm=name))
        wisdom.save(self.root / self.file)

    def read(self, place: Path, rng: random.Random) -> None:
        path = place / self.file
        if rng.random() < 0.3:
            command = rng.choice((("show",), ("show", "--json"), ("check",)))
            on_command_line("wisdom", *command, path)
            return
        wisdom = Wisdom(dict(ENGINE.planner.wisdom.versions))
        wisdom.load(path)
        planner = type(ENGINE.planner)(ENGINE.planner.algorithms, wisdom=wisdom)
        for n in (10, 12, 6):
            plan = planner.plan(PROBLEM.with_(n=n), Target.host(threads=2))
            assert plan.source == "estimate" or plan.schedule in planner.algorithm(
                plan.algorithm).space(plan.inner, plan.target)
        if not path.is_dir():
            wisdom.save(place / "saved.json")
            assert Wisdom().load(place / "saved.json") == len(wisdom.entries)


class LimitsFile(Kind):
    name, file = "limits of the machine", "limits.json"

    def prepare(self) -> None:
        os.environ["TILEWISE_CACHE_DIR"] = str(self.root)
        limits.keep("avx2", 2, limits.Limits(2.5e9, 1e10))
        limits.keep("avx2", 1, limits.Limits(2.5e9, 2e10))

    def read(self, place: Path, rng: random.Random) -> None:
        os.environ["TILEWISE_CACHE_DIR"] = str(place)
        found = limits.kept("avx2", 2)
        assert found is None or 0 < found.hertz < 1e11
        limits.keep("avx2", 3, limits.Limits(2.5e9, 1e10))
        limits.kept("avx2", 3)


class BundleFile(Kind):
    """One file of a bundle; `sealed`: by somebody who knows how to put the digests right."""

    sealed = False

    def prepare(self) -> None:
        from tilewise.bundle import saving

        os.environ["TILEWISE_CACHE_DIR"] = str(self.root.parent / "cache")
        contexts = saving.multiprocessing.get_context
        saving.multiprocessing.get_context = lambda how: contexts("fork")
        tilewise.bundle.save(small(), image(), self.root)
        self.root.chmod(0o700)

    def spoil(self, rng: random.Random, path: Path) -> str:
        if self.file != bundle_files.MANIFEST:
            how = spoil_json(rng, path) if path.suffix == ".json" else spoil_bytes(rng, path)
        elif not self.sealed:
            how = spoil_json(rng, path)
        else:
            whole, how = json.loads(path.read_text()), "as a tree"
            body = hostile.text_of(hostile.mutated(rng, whole["body"]))
            hostile.write(path, hostile.text_of({**whole, "body": hostile.Raw(body)}).encode())
        if self.sealed and path.is_file() and not path.is_symlink():
            self._seal(path)
        return f"{how}, sealed" if self.sealed else how

    @staticmethod
    def _seal(path: Path) -> None:
        """Digests that say what is there now."""
        place = path.parent / bundle_files.MANIFEST
        with contextlib.suppress(ValueError, RecursionError):  # nobody could put it right
            whole = json.loads(place.read_text())
            body = whole["body"]
            if path != place:
                stated = bundle_files.stated(path)
                body["files"][path.name] = {"bytes": stated.bytes, "digests": list(stated.digests)}
            with contextlib.suppress(TypeError, KeyError, AttributeError):
                body["state"] = bundle_manifest.state_digest(body["parameters"])
            whole["sha256"] = bundle_manifest.sealed(body)
            hostile.write(place, json.dumps(whole).encode())

    def read(self, place: Path, rng: random.Random) -> None:
        os.environ["TILEWISE_CACHE_DIR"] = str(self.root.parent / "cache")
        torch.set_num_threads(1)
        made = rng.random() < 0.5
        fast = tilewise.bundle.load(place, Small if made else small())
        if not self.sealed:  # a sealed one is code that somebody vouches for
            with torch.inference_mode():
                assert torch.allclose(fast(image()), small()(image()), atol=1e-4)


class Manifest(BundleFile):
    name, file = "manifest of a bundle", bundle_files.MANIFEST


class SealedManifest(Manifest):
    name, sealed = "manifest of a bundle, sealed again", True


class BundlePlans(BundleFile):
    name, file = "plans of a bundle", bundle_files.ROW["plans"].format(Target.host().isa)


class SealedPlans(BundlePlans):
    name, sealed = "plans of a bundle, sealed again", True


class Objects(BundleFile):
    name, file = "code of a bundle", bundle_files.ROW["objects"].format(Target.host().isa)


class Prepared(BundleFile):
    name = "prepared weights of a bundle"
    file = bundle_files.ROW["prepared"].format(Target.host().isa)


class Parameters(BundleFile):
    name, file = "weights of a bundle", bundle_files.PARAMETERS

    def read(self, place: Path, rng: random.Random) -> None:
        super().read(place, random.Random(4))  # by a function, which takes them from there


class Checkpoint(Kind):
    name, file = "checkpoint", f"run/{checkpoint.NAME}"

    def prepare(self) -> None:
        self._train(self.root, self.root)

    def spoil(self, rng: random.Random, path: Path) -> str:
        kind = rng.random()
        if kind < 0.55:
            state = torch.load(path, weights_only=True)
            how = self._state(rng, state)
            content = io.BytesIO()
            try:
                torch.save(state if how else hostile.mutated(rng, state), content)
            except (RecursionError, ValueError):  # what pickle cannot write
                torch.save({"format": checkpoint.FORMAT}, content)
            hostile.write(path, content.getvalue())
            return "as a tree"
        if kind < 0.7:
            hostile.write(path, self._evil(rng, path))
            return "as code"
        return spoil_bytes(rng, path)

    @staticmethod
    def _state(rng: random.Random, state: dict[str, Any]) -> bool:
        """Without its checksum it is taken for an older one, so that its parts are looked at."""
        if rng.random() < 0.8:
            state.pop(checkpoint.CHECKSUM)
        tensors = list(state["model"])
        if rng.random() < 0.7:
            return False
        name = rng.choice(tensors)
        weight = state["model"][name]
        state["model"][name] = rng.choice((
            weight.double(), weight.flatten(), weight[:0], weight.to(torch.complex64),
            weight.to_sparse(), torch.empty_like(weight, device="meta"),
            weight.expand(3, *weight.shape), weight * float("nan"), None, "weight", [1.0]))
        return True

    @staticmethod
    def _evil(rng: random.Random, path: Path) -> bytes:
        """Pickled code: alone, or in the place of a checkpoint's own."""
        code = pickle.dumps(Evil(str(path.parents[1] / CANARY)))
        if rng.random() < 0.3:
            return code
        whole = io.BytesIO()
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(whole, "w") as new:
            for member in old.namelist():
                new.writestr(member, code if member.endswith("data.pkl") else old.read(member))
            if rng.random() < 0.3:
                new.writestr(hostile.EVIL, b"x")
        return whole.getvalue()

    def read(self, place: Path, rng: random.Random) -> None:
        self._train(place, self.root)

    def _train(self, place: Path, root: Path) -> None:
        os.environ["TILEWISE_CACHE_DIR"] = str(self.root.parent / "cache")
        torch.set_num_threads(1)
        data = root / "data"
        if not data.exists():
            idx_set(data, train=16, test=8)
        train(Settings(str(data), "lenet_b", batch=8, epochs=1, save_every=1), place / "run")


class Evil:
    """What runs when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


class ResultFile(Kind):
    name, file = "results of benchmarks", "result.json"

    def prepare(self) -> None:
        shutil.copy(RESULTS / "ladder.json", self.root / self.file)
        shutil.copy(RESULTS / "vgg_layers.json", self.root / "suite.json")

    def spoil(self, rng: random.Random, path: Path) -> str:
        if rng.random() < 0.5:
            shutil.copy(path.parent / "suite.json", path)
        return super().spoil(rng, path)

    def read(self, place: Path, rng: random.Random) -> None:
        path = place / self.file
        if rng.random() < 0.6:
            on_command_line("report", path, "-o", place / "page.html")
        else:
            on_command_line("bench", "compare", path, place / "suite.json")


class DeepFile(Kind):
    name, file = "results of selftest --deep", "deep.json"

    def prepare(self) -> None:
        shutil.copy(RESULTS / "deep.json", self.root / self.file)

    def read(self, place: Path, rng: random.Random) -> None:
        on_command_line("selftest", "--deep", "--seeds", "0:0", "-o", place / self.file)


class JobFile(Kind):
    name, file = "job of batch inference", "out/job.json"

    def prepare(self) -> None:
        self._work(self.root).begin(self.root)
        self._work(self.root).run(self.root, 0, lambda text: None)

    def read(self, place: Path, rng: random.Random) -> None:
        self._work(self.root).run(place, 0, lambda text: None)

    def _work(self, root: Path) -> Infer:
        work = Infer(root)
        work.cache = self.root.parent / "cache"
        work.IMAGES = work.ROWS = 2
        return work


class CachedCode(Kind):
    name = "compiled code in the cache"

    def prepare(self) -> None:
        self.read(self.root, random.Random(0))

    @property
    def file(self) -> str:  # type: ignore[override]
        return next(path.name for path in sorted(self.root.glob("*.o")))

    def spoil(self, rng: random.Random, path: Path) -> str:
        return spoil_bytes(rng, path)

    def read(self, place: Path, rng: random.Random) -> None:
        os.environ["TILEWISE_CACHE_DIR"] = str(place)
        x, weight = torch.ones(1, 2, 5, 6), torch.ones(3, 2, 3, 3)
        y = tilewise.conv2d(x, weight, algorithm="cpu_pixels")
        assert torch.equal(y, F.conv2d(x, weight))


class Idx(Kind):
    name, file = "images as idx files", "train-images-idx3-ubyte.gz"

    def prepare(self) -> None:
        idx_set(self.root, train=5, test=5)

    def spoil(self, rng: random.Random, path: Path) -> str:
        if rng.random() < 0.5:
            plain = path.with_suffix("")
            path.unlink()
            content = idx_set(path.parent / "more", train=5, test=5, suffix="") / plain.name
            hostile.write(plain, hostile.spoilt(rng, content.read_bytes()))
            return "as bytes"
        return spoil_bytes(rng, path)

    def read(self, place: Path, rng: random.Random) -> None:
        idx.IdxImages(place, "train", 28, 1).read([0, 1])


KINDS: tuple[type[Kind], ...] = (
    WisdomFile, LimitsFile, Manifest, SealedManifest, BundlePlans, SealedPlans, Objects, Prepared,
    Parameters, Checkpoint, ResultFile, DeepFile, JobFile, CachedCode, Idx)


def prepared(kind: type[Kind], root: Path) -> Kind:
    """With its valid file, which can be read."""
    made = kind(root)
    made.root.mkdir(mode=0o700)
    for work in (lambda say: made.prepare(), lambda say: made.read(made.root, random.Random(1))):
        ended = forked(work)
        assert ended.well, f"{kind.name}: {ended.why}"
    return made


def one(kind: Kind, seed: int, place: Path) -> tuple[str, str]:
    """A file of a seed: what became of it, `used` or `refused`, or what is wrong; and how."""
    rng = random.Random(f"{kind.name} {seed}")
    shutil.copytree(kind.root, place, symlinks=True)
    place.chmod(0o700)
    how = kind.spoil(rng, place / kind.file)
    ended = forked(lambda say: _read(kind, place, random.Random(seed), say), patience=PATIENCE)
    verdict = _verdict(ended)
    if any(path.exists() for path in (place / CANARY, Path("/tmp") / CANARY)):
        verdict = "EXECUTED"
    shutil.rmtree(place, ignore_errors=True)
    return verdict, how


def _read(kind: Kind, place: Path, rng: random.Random, say: Say) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            kind.read(place, rng)
            say(f"used{' with a warning' if told else ''}")
        except TilewiseError as refusal:
            text = str(refusal)
            assert len(text) < LONGEST, f"a message of {len(text)} characters: {text[:200]}"
            assert place.name in text or Path(kind.file).name in text, f"what is it about? {text}"
            say("refused")
    for warning in told:
        text = str(warning.message)
        assert len(text) < LONGEST, f"a warning of {len(text)} characters: {text[:200]}"


def _verdict(ended: Ended) -> str:
    if ended.hung:
        return f"HUNG: {ended.why}"
    if not ended.well:
        return f"FAILED: {ended.why[-1500:]}"
    return ended.said[-1]


def campaign(kind: type[Kind], files: int, root: Path, first: int = 0) -> dict[str, Any]:
    """So many files of a kind; counts by what became of them."""
    start = time.monotonic()
    row: dict[str, Any] = {"what": kind.name, "files": files, "used": 0, "refused": 0, "wrong": 0,
                           "hung": 0, "executed": 0, "faults": []}
    made = prepared(kind, root)
    for seed in range(first, first + files):
        verdict, how = one(made, seed, root / "case")
        name = {"used": "used", "refu": "refused", "HUNG": "hung", "EXEC": "executed"}.get(
            verdict[:4], "wrong")
        row[name] += 1
        if name in ("wrong", "hung", "executed"):
            row["faults"].append(f"{kind.__name__} {seed}, {how}: {verdict}")
    return {**row, "seconds": round(time.monotonic() - start, 1)}

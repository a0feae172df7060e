"""Batch inference: parts of a source through a model, each into one Parquet file.

A part has the same rows in every run, and its file appears whole or not at all. So a job that was
killed goes on with the files that are missing, and every row is there once.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from ..bundle.files import MANIFEST, bytes_of, hashes
from ..bundle.forms import named_tensors
from ..bundle.loading import without_values
from ..bundle.tensors import name_of
from ..core.cores import cores
from ..core.errors import NotInstalled, TilewiseError, cut
from ..core.files import read_json, remove_leftovers, write_atomically
from ..core.progress import Tell, silent
from .images import Form, decoded
from .predictor import Predictor
from .source import Part, arrow, items, parts


class Job(NamedTuple):
    """All that a worker is told."""

    make: Callable[[], nn.Module]
    source: str
    output: str
    form: Form
    column: str
    batch: int
    bundle: str | None
    digest: str | None
    threads: int | None


class Report(NamedTuple):
    """What a run did; `failed` lists images that could not be decoded, with the reasons."""

    rows: int  # of this run
    kept: int  # of earlier ones
    failed: list[tuple[str, str]]
    seconds: float

    @property
    def throughput(self) -> float:
        """Images a second."""
        return self.rows / self.seconds if self.seconds else 0.0


class Worker:
    """A model that turns parts into files; an actor of Ray's, or this process."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._predict = Predictor(job.make, job.bundle, job.digest, job.batch, job.threads)
        self._pool = ThreadPoolExecutor(min(8, max(1, job.threads or cores())))

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """For map_batches: parts by their numbers; how many rows each had and which failed."""
        known = parts(Path(self._job.source), int(rows["rows"][0]))
        told = [self.run(known[int(number)]) for number in rows["number"]]
        return {"number": rows["number"], "count": np.array([count for count, _ in told]),
                "failed": np.array([_joined(failed) for _, failed in told], object)}

    def run(self, part: Part) -> tuple[int, list[tuple[str, str]]]:
        given = items(Path(self._job.source), part, self._job.column)
        found = list(self._pool.map(lambda item: _decoded(item[1], self._job.form), given))
        good = [image for image, _ in found if image is not None]
        results = iter(self._predict.results(np.stack(good)) if good else ())
        rows = [{"name": name, "output": None if image is None else next(results).reshape(-1),
                 "error": why} for (name, _), (image, why) in zip(given, found)]
        _write(Path(self._job.output), part.number, rows)
        failed = [(name, why) for (name, _), (_, why) in zip(given, found) if why is not None]
        return len(rows), failed


def infer(make: Callable[[], nn.Module], source: str | PathLike[str],
          output: str | PathLike[str], *, form: Form | None = None, column: str = "image",
          batch: int = 8, rows: int = 1024, bundle: str | PathLike[str] | None = None,
          digest: str | None = None, workers: int = 1, threads: int | None = None,
          ray: bool | None = None, tell: Tell = silent) -> Report:
    """Run a model over all images of a folder or of Parquet files; the results are Parquet files.

    A run that was stopped goes on where it was, if it is called again with the same arguments.
    Another model, other weights or other images are refused.

    Args:
        make: A function that makes the model. Weights must be the same in every call of it.
        source: A folder of images or Parquet files, at any depth, or one file.
        output: A directory. `part-00000.parquet` and following have the columns `name`, `output`
            and `error`.
        form: Channels, height and width that the model takes; 3x224x224, if not said.
        column: The column of Parquet files that has encoded images.
        batch: Images in a call of the model.
        rows: Images in a file of the output.
        bundle: As in `Predictor`.
        digest: As in `tilewise.bundle.load`.
        workers: Actors of Ray's.
        threads: Threads of each worker; all cores are shared, if not said.
        ray: Whether to use Ray; where it is installed and there are several workers, if not said.
        tell: A function `(what, done, total)` that is told how far it is.

    Returns:
        What was done.
    """
    from ..tools.settings import threads as suggested

    arrow()
    place, start = Path(output), time.perf_counter()
    job = Job(make, str(source), str(place), form or Form(), column, batch,
              None if bundle is None else str(bundle), digest, threads or suggested(workers))
    known = parts(Path(source), rows)
    _check_identity(place, _identity(job, known, rows))
    waiting = [part for part in known if not _file(place, part.number).exists()]
    use_ray = ray if ray is not None else workers > 1 and find_spec("ray") is not None
    told = (_by_ray(job, waiting, rows, workers) if use_ray else _here(job, waiting)
            ) if waiting else iter(())
    done, failed = 0, list[tuple[str, str]]()
    total = sum(part.size for part in waiting)
    for count, wrong in told:
        done += count
        failed += wrong
        tell(f"images, {done / (time.perf_counter() - start):.0f} a second", done, total)
    remove_leftovers(place, *(_file(place, part.number).name for part in known))
    return Report(done, sum(part.size for part in known) - total, sorted(failed),
                  time.perf_counter() - start)


def _here(job: Job, waiting: list[Part]) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    worker = Worker(job)
    for part in waiting:
        yield worker.run(part)


def _by_ray(job: Job, waiting: list[Part], rows: int,
            workers: int) -> Iterable[tuple[int, list[tuple[str, str]]]]:
    """Ray Data hands out parts; what a killed actor had is given to another."""
    try:
        import ray.data
    except ImportError as error:
        raise NotInstalled("several workers need Ray: pip install 'tilewise[scale]'") from error
    numbers = [{"number": part.number, "rows": rows} for part in waiting]
    data = ray.data.from_items(numbers, override_num_blocks=len(numbers)).map_batches(
        Worker, batch_size=1, num_cpus=job.threads, fn_constructor_args=[job],
        compute=ray.data.ActorPoolStrategy(size=workers))  # actors restart, tasks are retried
    for row in data.iter_rows():
        yield int(row["count"]), _apart(row["failed"])


def _decoded(content: Any, form: Form) -> tuple[Any, str | None]:
    """An image, or why there is none: one bad file is no reason to stop."""
    try:
        return decoded(content, form), None
    except NotInstalled:
        raise
    except Exception as problem:  # whatever a decoder makes of bytes
        return None, f"{type(problem).__name__}: {problem}"[:500]


def _file(place: Path, number: int) -> Path:
    return place / f"part-{number:05}.parquet"


def _write(place: Path, number: int, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa

    schema = pa.schema([("name", pa.string()), ("output", pa.list_(pa.float32())),
                        ("error", pa.string())])
    content = io.BytesIO()
    arrow().write_table(pa.Table.from_pylist(rows, schema), content)
    write_atomically(_file(place, number), content.getbuffer(), durable=True)


def _identity(job: Job, known: list[Part], rows: int) -> dict[str, str]:
    """What results depend on: a job can only go on with the same."""
    bundle = (Path(job.bundle) / MANIFEST).read_bytes() if job.bundle else b""
    model = without_values(job.make) if job.bundle else job.make()
    tensors = {} if job.bundle else named_tensors(model)
    plain = [tensor.detach().cpu().contiguous() for tensor in tensors.values()]
    weights = list(zip(tensors, map(name_of, plain), hashes([bytes_of(one) for one in plain])))
    found = {"images": known, "batch": job.batch, "rows": rows, "column": job.column,
             "form": job.form, "bundle": bundle, "model": str(model), "weights": weights}
    return {name: hashlib.sha256(repr(value).encode()).hexdigest()
            for name, value in found.items()}


def _check_identity(place: Path, own: dict[str, str]) -> None:
    path = place / "job.json"
    if path.exists():
        begun = _begun(path)
        other = [name for name, digest in own.items() if begun.get(name) != digest]
        if other:
            raise TilewiseError(f"{place} has the results of another job (other "
                                f"{', '.join(other)}): name another directory")
        return
    remove_leftovers(place, path.name)
    if place.exists() and any(place.iterdir()):
        raise TilewiseError(f"{place} is not empty: name another directory")
    write_atomically(path, json.dumps(own, indent=1).encode())


def _begun(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError) as problem:
        raise TilewiseError(f"{path} cannot be read ({cut(str(problem))}): name another directory"
                            ) from problem
    if not isinstance(found, dict):
        raise TilewiseError(f"{path} is not that of a job: name another directory")
    return found


def _joined(failed: list[tuple[str, str]]) -> str:
    return "\n".join(f"{name}\t{why}".replace("\n", " ") for name, why in failed)


def _apart(text: str) -> list[tuple[str, str]]:
    return [(name, why) for line in text.splitlines() for name, _, why in [line.partition("\t")]]

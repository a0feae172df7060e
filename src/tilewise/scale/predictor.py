"""A model as a class for Ray Data's map_batches: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import nn

from ..bundle.loading import load
from ..core.errors import TilewiseError
from ..model.optimize import optimize
from ..tools.settings import threads as suggested


class Predictor:
    """Runs batches of images; for `dataset.map_batches(Predictor, fn_constructor_kwargs=...)`.

    A row has the same bits however rows are cut into batches: a model always gets `batch` images,
    the last of them repeated where there are fewer.

    Args:
        make: A function that makes the model, in any mode.
        bundle: A directory that `tilewise.bundle.save` wrote; then the weights are the bundle's.
        digest: As in `tilewise.bundle.load`.
        batch: Images in a call.
        threads: Threads of torch; if not said, the CPUs that Ray gives the actor, or those of
            `tilewise.threads()`.
        column: The images of a batch, (N, C, H, W) as float32.
        result: The name of the column that is added.

    >>> from tilewise.models import lenet_b
    >>> before = torch.get_num_threads()
    >>> predict = Predictor(lenet_b, batch=2, threads=before)
    >>> predict({"image": np.zeros((3, 1, 70, 70), np.float32)})["output"].shape
    (3, 10)
    """

    def __init__(self, make: Callable[[], nn.Module], bundle: str | PathLike[str] | None = None,
                 digest: str | None = None, batch: int = 8, threads: int | None = None,
                 column: str = "image", result: str = "output") -> None:
        if batch < 1:
            raise TilewiseError(f"batch is {batch}, needs at least 1")
        torch.set_num_threads(threads or _given_by_ray() or suggested())
        self._batch, self._column, self._result = batch, column, result
        self._model = (optimize(make().eval()) if bundle is None
                       else load(bundle, make, digest=digest))

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """The rows without their images, and with the results."""
        if self._column not in rows:
            raise TilewiseError(f"a batch has the columns {', '.join(rows)}, needs "
                                f"{self._column!r}")
        images = _whole(rows[self._column])
        rest = {name: values for name, values in rows.items() if name != self._column}
        return {**rest, self._result: self.results(images)}

    @torch.inference_mode()
    def results(self, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """One result for each image."""
        found = []
        for start in range(0, len(images), self._batch):
            part = images[start:start + self._batch]
            lacking = self._batch - len(part)
            if lacking or not part.flags.writeable:  # torch warns of memory that is Ray's
                part = np.concatenate([part, np.repeat(part[-1:], lacking, 0)])
            x = torch.from_numpy(part)
            if x.dim() == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            found.append(self._model(x)[:self._batch - lacking].contiguous().numpy())
        return np.concatenate(found)


def _whole(images: Any) -> np.ndarray[Any, Any]:
    """One array of what may be a column of arrays."""
    if not isinstance(images, np.ndarray) or images.dtype.hasobject:
        images = np.stack(list(images))
    return np.ascontiguousarray(images, np.float32)


def _given_by_ray() -> int | None:
    """The CPUs of this actor; None outside of Ray."""
    import sys

    if "ray" not in sys.modules:
        return None
    import ray

    if not ray.is_initialized():
        return None
    with suppress(Exception):  # not in an actor
        return int(ray.get_runtime_context().get_assigned_resources().get("CPU", 0)) or None
    return None

"""A model behind HTTP: Ray Serve, requests that come at the same time in one batch.

    pip install "ray[serve]" tilewise
    serve run --app-dir examples serve_ray:app

`POST /` takes the pixels of one image, 3x224x224 float32 in this order, and answers with JSON.
TILEWISE_BUNDLE names a bundle: then all replicas share its weights, and nothing is compiled.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from ray import serve
from starlette.requests import Request

SHAPE, BATCH = (3, 224, 224), 4


def make() -> Any:
    import torch

    from tilewise.models import resnet18

    torch.manual_seed(0)  # your weights here
    return resnet18().eval()


@serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 1})
class Model:
    def __init__(self) -> None:
        from tilewise.scale import Predictor

        # as many threads as Ray gives CPUs; a row does not depend on its neighbours in a batch
        self._predict = Predictor(make, os.environ.get("TILEWISE_BUNDLE"), batch=BATCH)
        self._predict.results(np.zeros((1, *SHAPE), np.float32))

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=0.005)
    async def predict(self, images: list[Any]) -> list[Any]:
        return list(self._predict.results(np.stack(images)))

    async def __call__(self, request: Request) -> Any:
        body = await request.body()
        if len(body) != 4 * int(np.prod(SHAPE)):
            return {"error": f"body has {len(body)} bytes, needs {4 * int(np.prod(SHAPE))}"}
        found = await self.predict(np.frombuffer(body, np.float32).reshape(SHAPE))
        return {"output": found.tolist()}


app = Model.bind()

"""A model behind HTTP: FastAPI under uvicorn, or under gunicorn with several workers.

    pip install fastapi uvicorn tilewise
    uvicorn --app-dir examples serve_fastapi:app                   # one process
    gunicorn --chdir examples -w 4 -k uvicorn_worker.UvicornWorker serve_fastapi:app

`POST /` takes the pixels of one image, 3x224x224 float32 in this order, and answers with JSON.
TILEWISE_BUNDLE names a bundle: then all workers share its weights, and nothing is compiled.
WORKERS says how many processes share the machine.
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool

import tilewise
from tilewise.models import resnet18 as make

SHAPE = (1, 3, 224, 224)
state: dict[str, Any] = {}


@asynccontextmanager
async def lifespan(app: FastAPI) -> Any:
    """In each worker, after a fork: threads of OpenMP do not survive one."""
    torch.set_num_threads(tilewise.threads(workers=int(os.environ.get("WORKERS", "1"))))
    bundle = os.environ.get("TILEWISE_BUNDLE")
    if bundle:
        state["model"] = tilewise.bundle.load(bundle, make)
    else:
        torch.manual_seed(0)  # your weights here
        state["model"] = tilewise.optimize(make().eval())
    predict(torch.zeros(SHAPE))  # no user waits for the first call
    yield
    state.clear()


app = FastAPI(lifespan=lifespan)


@torch.inference_mode()
def predict(x: torch.Tensor) -> list[float]:
    found: list[float] = state["model"](x)[0].tolist()
    return found


@app.post("/")
async def infer(request: Request) -> dict[str, Any]:
    body = await request.body()
    if len(body) != 4 * int(np.prod(SHAPE)):
        raise HTTPException(422, f"body has {len(body)} bytes, needs {4 * int(np.prod(SHAPE))}")
    x = torch.frombuffer(bytearray(body), dtype=torch.float32).view(SHAPE)
    return {"output": await run_in_threadpool(predict, x), "threads": torch.get_num_threads()}

"""Servers and loaders that people have, started and loaded for real on the loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bundled import small
from support.pages import ROOT
from torch.utils.data import DataLoader, Dataset

import tilewise
from tilewise.models import resnet18

EXAMPLES = ROOT / "examples"
WSGI = """
import os, sys, numpy as np, torch, tilewise
sys.path.insert(0, os.environ["SUPPORT"])
from support.bundled import small
fast = tilewise.optimize(small().eval())
with torch.inference_mode():  # before gunicorn forks
    for _ in range(3):
        fast(torch.zeros(2, 3, 40, 40))

def app(environment, start):
    body = environment["wsgi.input"].read(int(environment["CONTENT_LENGTH"]))
    x = torch.frombuffer(bytearray(body), dtype=torch.float32).view(1, 3, 40, 40)
    with torch.inference_mode():
        found = fast(x)[0].numpy().tobytes()
    start("200 OK", [("Content-Length", str(len(found))), ("X-Process", str(os.getpid()))])
    return [found]
"""
RAY = """
import sys, ray
from ray import serve
import serve_ray
ray.init(num_cpus=2, include_dashboard=False, _temp_dir=sys.argv[2], log_to_driver=False,
         object_store_memory=100 << 20)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(serve_ray.app)
sys.stdin.readline()
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def serving(command: list[str], port: int, *, patience: float = 120, **more: str) -> Iterator[str]:
    """A server of its own session, which ends with the test; yields its address."""
    paths = [str(EXAMPLES), str(ROOT / "src"), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "RAY_AUTH_MODE": "disabled",
                   **more}
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, env=environment, start_new_session=True, stdout=log,
                                  stderr=log, stdin=subprocess.PIPE)
        try:
            end = time.monotonic() + patience
            while not _answers(port):
                if server.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    pytest.fail(f"{command} does not serve:\n{log.read()[-4000:]}")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/"
        finally:
            for path in Path("/proc").glob("[0-9]*"):
                try:
                    if os.getsid(int(path.name)) == server.pid:
                        os.kill(int(path.name), signal.SIGKILL)
                except OSError:
                    continue
            server.communicate()


def _answers(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def post(address: str, image: np.ndarray) -> Any:
    request = urllib.request.Request(address, image.tobytes())
    with urllib.request.urlopen(request, timeout=60) as got:
        return got.read(), dict(got.headers)


def images(count: int, *shape: int) -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [random.standard_normal(shape, np.float32) for _ in range(count)]


def on_one_thread(model: torch.nn.Module, given: list[np.ndarray], batch: int = 1) -> list[Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return [tilewise.optimize(model)(torch.from_numpy(image)[None].repeat(
                batch, 1, 1, 1).contiguous())[0] for image in given]
    finally:
        torch.set_num_threads(before)


def expected(given: list[np.ndarray]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return on_one_thread(resnet18().eval(), given)


def test_fastapi_under_uvicorn() -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    port, given = free_port(), images(8, 3, 224, 224)
    command = [sys.executable, "-m", "uvicorn", "serve_fastapi:app", "--port", str(port)]
    with serving(command, port, WORKERS="1000") as address, ThreadPoolExecutor(4) as users:
        found = [json.loads(body) for body, _ in users.map(lambda x: post(address, x), given)]
        with pytest.raises(urllib.error.HTTPError, match="422"):
            post(address, given[0][:2])
    assert [one["threads"] for one in found] == [1] * 8
    for one, right in zip(found, expected(given), strict=True):
        # plans follow what a process met before, and this one has met other tests
        torch.testing.assert_close(torch.tensor(one["output"]), right, rtol=1e-4, atol=1e-4)


def test_gunicorn_that_forks_after_use(tmp_path: Path) -> None:
    pytest.importorskip("gunicorn")
    (tmp_path / "served.py").write_text(WSGI)
    port, given = free_port(), images(12, 3, 40, 40)
    command = [sys.executable, "-m", "gunicorn", "--preload", "--chdir", str(tmp_path), "-w", "2",
               "-b", f"127.0.0.1:{port}", "served:app"]
    with serving(command, port, SUPPORT=str(ROOT / "tests")) as address, \
            ThreadPoolExecutor(4) as users:
        found = list(users.map(lambda x: post(address, x), given))
    for (body, _), right in zip(found, on_one_thread(small().eval(), given), strict=True):
        torch.testing.assert_close(torch.frombuffer(bytearray(body), dtype=torch.float32), right)


def test_ray_serve() -> None:
    pytest.importorskip("ray.serve")
    port, given = free_port(), images(6, 3, 224, 224)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:  # sockets: a short path
        command = [sys.executable, "-c", RAY, str(port), place]
        with serving(command, port) as address, ThreadPoolExecutor(3) as users:
            end = time.monotonic() + 120
            while time.monotonic() < end:  # the proxy listens before the model is there
                try:
                    post(address, given[0])
                    break
                except urllib.error.HTTPError:
                    time.sleep(0.5)
            found = [json.loads(body) for body, _ in users.map(lambda x: post(address, x), given)]
            assert "needs 602112" in json.loads(post(address, given[0][:2])[0])["error"]
    for one, right in zip(found, expected(given), strict=True):
        torch.testing.assert_close(torch.tensor(one["output"]), right, rtol=1e-4, atol=1e-4)


class Embedded(Dataset):
    """Images that a model has seen in the process that loads them."""

    def __init__(self) -> None:
        self.model = tilewise.optimize(small().eval())

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> torch.Tensor:
        torch.set_num_threads(1)
        with torch.inference_mode():
            return self.model(torch.full((1, 3, 40, 40), i / 7))[0].clone()


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader(start: str) -> None:
    data, before = Embedded(), torch.get_num_threads()
    try:
        right = torch.stack([data[i] for i in range(12)])
        torch.set_num_threads(before)
        with torch.inference_mode():
            data.model(torch.zeros(2, 3, 40, 40))  # on all threads, then forked
        loader = DataLoader(data, batch_size=3, num_workers=2, multiprocessing_context=start,
                            timeout=100)
        found = torch.cat(list(loader))
        # a process of its own knows nothing of what this one has measured, and may plan otherwise
        assert torch.equal(found, right) if start == "fork" else torch.allclose(
            found, right, rtol=1e-4, atol=1e-6)
    finally:
        torch.set_num_threads(before)

"""Batch inference on a real Ray: one actor is killed, and every row is there once, same bits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from support.pages import ROOT

SCRIPT = """
import os, random, sys
import numpy as np
import ray, torch
from ray_killed import FORM, model, strike
from tilewise.scale import Predictor, infer
from tilewise.scale.images import Form


class Told(Predictor):
    def __call__(self, rows):
        threads = np.full(len(rows["id"]), torch.get_num_threads())
        return {**super().__call__(rows), "threads": threads}


def strike_once(what, done, total):
    if not struck:
        struck.append(strike("actor", os.getpid(), random.Random(0)))


if __name__ == "__main__":
    struck, (source, output, temporary) = [], sys.argv[1:]
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=temporary, log_to_driver=False,
             object_store_memory=100 << 20)
    report = infer(model, source, output, form=Form(*FORM), rows=3, batch=4, workers=2, threads=1,
                   ray=True, tell=strike_once)
    print("rows", report.rows, "struck", *struck)
    images = np.random.default_rng(1).standard_normal((6, *FORM), np.float32)
    blocks = [{"image": image, "id": i} for i, image in enumerate(images)]
    data = ray.data.from_items(blocks, override_num_blocks=3).map_batches(
        Told, batch_size=2, num_cpus=1, fn_constructor_args=[model],
        fn_constructor_kwargs={"batch": 4}, compute=ray.data.ActorPoolStrategy(size=1))
    found = sorted(data.take_all(), key=lambda row: row["id"])
    assert [row["threads"] for row in found] == [1] * 6, found
    torch.set_num_threads(1)
    mine = Predictor(model, batch=4, threads=1).results(images)
    assert np.array_equal(np.stack([row["output"] for row in found]), mine)
    print("predicted")
"""


def test_an_actor_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.data")
    pytest.importorskip("PIL.Image")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from ray_killed import FORM, draw, kill, model, processes, read

    from tilewise.scale import infer
    from tilewise.scale.images import Form

    draw(tmp_path / "in", 30)
    before = torch.get_num_threads()
    infer(model, tmp_path / "in", tmp_path / "alone", form=Form(*FORM), rows=3, batch=4, threads=1)
    torch.set_num_threads(before)
    (tmp_path / "driving.py").write_text(SCRIPT)
    paths = [str(tmp_path), str(ROOT / "benchmarks"), str(ROOT / "src"), *filter(None, sys.path)]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled",
                   "PYTHONPATH": os.pathsep.join(paths)}
    temporary = tempfile.mkdtemp()  # sockets need a short path
    driver = subprocess.Popen([sys.executable, str(tmp_path / "driving.py"),
                               str(tmp_path / "in"), str(tmp_path / "out"), temporary],
                              env=environment, start_new_session=True, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        said, complained = driver.communicate(timeout=240)
    finally:
        kill(driver.pid, *processes(driver.pid))
        shutil.rmtree(temporary, ignore_errors=True)
    own = [line for line in said.splitlines() if line.startswith(("rows", "predicted"))]
    assert own == ["rows 30 struck True", "predicted"], said + complained[-4000:]
    assert read(tmp_path / "out") == read(tmp_path / "alone")
    assert len(read(tmp_path / "out")) == 30

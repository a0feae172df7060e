"""Batch inference in one process: rows, failures, restarts; Ray has a script of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.bundled import small

from tilewise.core.errors import TilewiseError
from tilewise.scale import Predictor, infer
from tilewise.scale.images import Form

FORM = Form(3, 40, 40)


@pytest.fixture(autouse=True)
def same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_rows_do_not_depend_on_batches() -> None:
    images = np.random.default_rng(1).normal(size=(11, 3, 40, 40)).astype(np.float32)
    predict = Predictor(small, batch=4, threads=1)
    whole = predict({"image": images, "id": np.arange(11)})
    assert sorted(whole) == ["id", "output"]
    with torch.inference_mode():
        torch.testing.assert_close(torch.from_numpy(whole["output"]),
                                   small()(torch.from_numpy(images)))
    for cut in ((3, 8), (1, 6), (4, 9)):
        parts = np.split(images, cut)
        found = np.concatenate([predict.results(part) for part in parts])
        assert np.array_equal(found, whole["output"])
    with pytest.raises(TilewiseError, match="needs 'image'"):
        predict({"other": images})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten pictures, and three files that are none."""
    pytest.importorskip("pyarrow")
    image = pytest.importorskip("PIL.Image")
    place, random = tmp_path / "images", np.random.default_rng(2)
    (place / "deep").mkdir(parents=True)
    for i in range(10):
        values = random.integers(0, 256, (50 + i, 60, 3), np.uint8)
        image.fromarray(values).save(place / ("deep" if i % 2 else "") / f"{i}.png")
    (place / "cut.png").write_bytes((place / "0.png").read_bytes()[:300])
    (place / "empty.jpg").write_bytes(b"")
    (place / "text.gif").write_bytes(b"not a picture")
    return place


def read(place: Path) -> list[dict]:
    from pyarrow import parquet

    return [row for file in sorted(place.glob("*.parquet"))
            for row in parquet.read_table(file).to_pylist()]


def test_a_folder(folder: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    report = infer(small, folder, tmp_path / "out", form=FORM, batch=4, rows=5, threads=1,
                   tell=lambda *args: told.append(args))
    rows = read(tmp_path / "out")
    assert [row["name"] for row in rows] == sorted(row["name"] for row in rows)
    assert (report.rows, report.kept, len(rows), told[-1][1:]) == (13, 0, 13, (13, 13))
    assert [name for name, _ in report.failed] == ["cut.png", "empty.jpg", "text.gif"]
    assert all((row["output"] is None) == bool(row["error"]) for row in rows)
    assert report.throughput > 0


def test_a_job_goes_on_where_it_was(folder: Path, tmp_path: Path) -> None:
    options = {"form": FORM, "batch": 4, "rows": 3, "threads": 1}
    infer(small, folder, tmp_path / "whole", **options)
    expected = read(tmp_path / "whole")

    class Killed(BaseException):
        pass

    def kill(what: str, done: int, total: int) -> None:
        if done >= 6:
            raise Killed

    for _ in range(2):
        with pytest.raises(Killed):
            infer(small, folder, tmp_path / "out", **options, tell=kill)
    (tmp_path / "out" / "part-00001.parquet").unlink()
    report = infer(small, folder, tmp_path / "out", **options)
    assert read(tmp_path / "out") == expected
    assert report.rows + report.kept == 13
    assert infer(small, folder, tmp_path / "out", **options).rows == 0
    with pytest.raises(TilewiseError, match=r"another job \(other batch\)"):
        infer(small, folder, tmp_path / "out", **{**options, "batch": 5})
    (folder / "new.png").write_bytes((folder / "0.png").read_bytes())
    with pytest.raises(TilewiseError, match=r"\(other images\)"):
        infer(small, folder, tmp_path / "out", **options)
    with pytest.raises(TilewiseError, match="not empty"):
        infer(small, folder, folder, **options)


def test_another_model_does_not_go_on(folder: Path, tmp_path: Path) -> None:
    options = {"form": FORM, "batch": 4, "rows": 100, "threads": 1}
    infer(small, folder, tmp_path / "out", **options)

    def retrained() -> torch.nn.Module:
        model = small()
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1e-6
        return model

    def other() -> torch.nn.Module:
        return torch.nn.Sequential(small(), torch.nn.ReLU())

    with pytest.raises(TilewiseError, match=r"\(other weights\)"):
        infer(retrained, folder, tmp_path / "out", **options)
    with pytest.raises(TilewiseError, match=r"\(other model, weights\)"):
        infer(other, folder, tmp_path / "out", **options)
    assert infer(small, folder, tmp_path / "out", **options).rows == 0


def test_parquet_in(folder: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))
    content = [(folder / name).read_bytes() for name in names]
    table = pa.table({"photo": [*content, None], "id": [*range(len(names)), 99]})
    (tmp_path / "in").mkdir()
    parquet.write_table(table, tmp_path / "in" / "a.parquet", row_group_size=4)
    options = {"form": FORM, "batch": 4, "threads": 1}
    infer(small, folder, tmp_path / "one", rows=100, **options)
    report = infer(small, tmp_path / "in", tmp_path / "two", rows=5, column="photo", **options)
    outputs = [row["output"] for row in read(tmp_path / "two")]
    assert outputs == [*(row["output"] for row in read(tmp_path / "one")), None]
    assert report.failed[-1] == ("a.parquet:9", report.failed[-1][1]) or len(report.failed) == 4
    with pytest.raises(TilewiseError, match="needs 'image': --column"):
        infer(small, tmp_path / "in", tmp_path / "three", **options)

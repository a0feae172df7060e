"""The trainer: what it reads, that it learns, and that the same run gives the same weights."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pytest
import torch
from support.training_sets import folder_set, idx_set, stripes, write_idx
from torch import nn

import tilewise
from tilewise import TilewiseError
from tilewise.cli import MISSING, OK, USAGE, main
from tilewise.cli.train import Bar
from tilewise.conv.running import ENGINE
from tilewise.core.files import write_atomically
from tilewise.models import MODELS
from tilewise.tools.sharing import adopt, noted, to_text
from tilewise.training import Settings, checkpoint, engines, plans, train
from tilewise.training.average import Average
from tilewise.training.images import open_images, order
from tilewise.training.loop import Run
from tilewise.training.progress import Silent
from tilewise.training.ranks import Ranks


def tiny(classes: int) -> nn.Module:
    """Has what a checkpoint must not lose: dropout, batch norm, momentum."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3),
        nn.Flatten(), nn.Linear(8 * 5 * 5, classes))


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", tiny)
    yield str(idx_set(tmp_path / "data"))
    tilewise.wisdom.forget()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed: its directory."""
    place = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "tiny", tiny)
        train(settings(str(idx_set(place / "data"))), place / "run")
    tilewise.wisdom.forget()
    return place / "run"


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run that ended after its fifth step: its directory."""
    place = tmp_path_factory.mktemp("interrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "tiny", tiny)
        with pytest.raises(KeyboardInterrupt):
            train(settings(str(idx_set(place / "data"))), place / "run", StopAt(5))
    tilewise.wisdom.forget()
    return place / "run"


def settings(data: str, **changes: object) -> Settings:
    return Settings(**{"data": data, "model": "tiny", "size": 12, "batch": 16, "epochs": 2,
                       "save_every": 2, "rate": 0.05, **changes})


def weights(directory) -> dict[str, torch.Tensor]:
    state = checkpoint.load(directory)
    momentum = state["optimizer"]["state"]
    return {**state["model"], **{f"momentum {n}": m["momentum_buffer"]
                                 for n, m in momentum.items()}}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class StopAt(Silent):
    """Interrupts a run after so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def step(self, epoch, step, steps, loss):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


# what is read


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read(tmp_path, suffix):
    images = open_images(str(idx_set(tmp_path, suffix=suffix)), 28, 1)
    pixels, labels = stripes(96, 1)
    assert images.train.classes == 3
    assert images.train.labels.tolist() == labels.tolist()
    x = images.train.read([5, 0])
    assert x.shape == (2, 1, 28, 28)
    np.testing.assert_allclose(x[0, 0].numpy(), pixels[5] / 127.5 - 1, atol=1e-6)


def test_images_have_the_shape_that_the_model_takes(tmp_path):
    place = str(idx_set(tmp_path))
    x = open_images(place, 86, 3).test.read([0, 1])
    assert x.shape == (2, 3, 86, 86)
    assert torch.equal(x[:, 0], x[:, 2])
    assert x.is_contiguous()
    assert engines.image_shape(Settings(place, "lenet_a")) == (86, 1)
    assert engines.image_shape(Settings(place, "vgg11")) == (224, 3)
    with pytest.raises(TilewiseError, match="size is 28, needs 86 for lenet_a"):
        engines.image_shape(Settings(place, "lenet_a", size=28))


def test_wrong_idx_files_are_named(tmp_path):
    with pytest.raises(TilewiseError, match="needs a directory"):
        open_images(str(tmp_path / "nowhere"), 28, 1)
    place = idx_set(tmp_path)
    write_idx(place / "t10k-labels-idx1-ubyte.gz", np.zeros(7, np.uint8))
    with pytest.raises(TilewiseError, match="30 images of t10k have 7 labels"):
        open_images(str(place), 28, 1)
    (place / "t10k-labels-idx1-ubyte.gz").write_bytes(b"torn")
    with pytest.raises(TilewiseError, match=r"t10k-labels-idx1-ubyte.gz cannot be read"):
        open_images(str(place), 28, 1)
    (place / "train-images-idx3-ubyte").write_bytes(b"\0\0\x0d\1\0\0\0\1....")
    with pytest.raises(TilewiseError, match="not an idx file of unsigned bytes"):
        open_images(str(place), 28, 1)
    (place / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\1\0\0\0\x09....")
    with pytest.raises(TilewiseError, match="train-images-idx3-ubyte cannot be read"):
        open_images(str(place), 28, 1)


def test_folders_of_images_are_read(tmp_path):
    images = open_images(str(folder_set(tmp_path)), 28, 3)
    assert images.train.classes == 3
    assert len(images.train.labels) + len(images.test.labels) == 40
    assert set(images.test.labels.tolist()) <= {0, 1, 2}
    assert len(images.test.labels) >= 3
    assert not set(images.train._paths) & set(images.test._paths)
    path, x = images.train._paths[3], images.train.read([3])
    pixels = stripes(40, 3)[0][int(path.stem)]
    np.testing.assert_allclose(x[0, 1].numpy(), pixels / 127.5 - 1, atol=1e-6)
    assert path.parent.name == f"stripes{images.train.labels[3]}"
    assert open_images(str(tmp_path), 20, 1).train.read([0, 1]).shape == (2, 1, 20, 20)


def test_folders_named_train_and_test_are_taken_as_such(tmp_path):
    folder_set(tmp_path / "train")
    folder_set(tmp_path / "test", 12)
    images = open_images(str(tmp_path), 8, 1)
    assert (len(images.train.labels), len(images.test.labels)) == (40, 12)


def test_what_cannot_be_decoded_is_named(tmp_path, monkeypatch):
    folder_set(tmp_path)
    (tmp_path / "stripes0" / "0000.png").write_bytes(b"not an image")
    images = open_images(str(tmp_path), 8, 1)
    with pytest.raises(TilewiseError, match=r"0000.png cannot be read as an image"):
        images.train.read(range(5))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(TilewiseError, match=r"needs Pillow: pip install 'tilewise\[images\]'"):
        open_images(str(tmp_path), 8, 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TilewiseError, match="has no images to train with"):
        open_images(str(tmp_path / "empty"), 8, 1)


def test_an_epoch_has_every_image_once_in_an_order_of_its_own():
    first, second = order(50, 8, seed=3, epoch=0), order(50, 8, seed=3, epoch=1)
    assert sorted(torch.cat(first).tolist()) == list(range(50))
    assert [len(numbers) for numbers in first] == [8] * 6 + [2]
    assert torch.cat(first).tolist() == torch.cat(order(50, 8, seed=3, epoch=0)).tolist()
    assert torch.cat(first).tolist() != torch.cat(second).tolist()
    assert torch.cat(first).tolist() != torch.cat(order(50, 8, seed=4, epoch=0)).tolist()


@pytest.mark.parametrize("change, message", [
    ({"model": "lenet_c"}, "model is 'lenet_c', needs one of lenet_a"),
    ({"engine": "abacus"}, "engine is 'abacus', needs one of tilewise, torch"),
    ({"batch": 0}, "batch is 0, needs at least 1"),
])
def test_wrong_settings_are_refused(change, message):
    with pytest.raises(TilewiseError, match=message):
        Settings("somewhere", **change)


# that it learns, and with which weights


@pytest.mark.parametrize("engine", ["torch", "torch-channels-last", "tilewise"])
def test_it_learns(data, tmp_path, engine):
    history = train(settings(data, engine=engine, epochs=12), tmp_path / engine)
    assert history["epochs"][-1]["accuracy"] > 0.8
    assert history["epochs"][-1]["loss"] < 0.6 * history["epochs"][0]["loss"]
    assert len(history["losses"]) == 12 * 6
    metrics = json.loads((tmp_path / engine / "metrics.json").read_text())
    assert metrics["losses"] == history["losses"]
    assert metrics["settings"]["engine"] == engine


def test_engines_start_alike_and_stay_close(data, tmp_path):
    # a net without dropout, whose mask follows the order of values in memory
    runs = [train(settings(data, model="lenet_b", size=None, engine=engine, epochs=1),
                  tmp_path / engine)["losses"]
            for engine in ("torch", "torch-channels-last", "tilewise")]
    for losses in runs[1:]:
        np.testing.assert_allclose(losses, runs[0], rtol=1e-4)


@pytest.mark.parametrize("engine", ["torch", "tilewise"])
def test_the_same_seed_gives_the_same_weights(data, tmp_path, engine):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        torch.manual_seed(ord(name))  # whatever happened before has no influence
        train(settings(data, engine=engine, seed=seed), tmp_path / name)
    assert same_bits(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same_bits(weights(tmp_path / "a"), weights(tmp_path / "c"))


def test_a_folder_of_images_trains(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", tiny)
    history = train(settings(str(folder_set(tmp_path / "data", 90)), epochs=10), tmp_path / "run")
    # of eight images, and with torch's own dropout: some epochs are better than others
    assert max(epoch["accuracy"] for epoch in history["epochs"]) > 0.6
    assert min(history["losses"][-5:]) < history["losses"][0]


def test_the_limit_is_obeyed(data, tmp_path):
    history = train(settings(data, limit=33, epochs=1), tmp_path)
    assert history["epochs"][0]["images"] == 33
    assert len(history["losses"]) == 3


# checkpoints


@pytest.mark.parametrize("stop", [1, 2, 3, 5, 6, 7, 11, 12])
def test_an_interrupted_run_ends_with_the_same_weights(data, tmp_path, whole, stop):
    history = checkpoint.load(whole)["history"]
    with pytest.raises(KeyboardInterrupt):
        train(settings(data), tmp_path / "parts", StopAt(stop))
    torch.manual_seed(99)
    parts = train(settings(data), tmp_path / "parts")
    assert parts["losses"] == history["losses"]
    assert [e["accuracy"] for e in parts["epochs"]] == [e["accuracy"] for e in history["epochs"]]
    assert same_bits(weights(whole), weights(tmp_path / "parts"))


def _without_momentum(state):
    state["optimizer"]["state"] = {}


def _with_other_rng(state):
    state["rng"] = [torch.Generator().manual_seed(1).get_state()]


def _one_step_back(state):
    state["step"] -= 1


def _without_running_mean(state):
    state["model"]["1.running_mean"].zero_()


def _one_weight_off(state):
    state["model"]["0.weight"][0, 0, 0, 0] += 1e-3


@pytest.mark.parametrize("fault", [_without_momentum, _with_other_rng, _one_step_back,
                                   _without_running_mean, _one_weight_off])
def test_what_a_checkpoint_lacks_is_noticed(data, tmp_path, whole, interrupted, fault):
    state = checkpoint.load(interrupted)
    assert (state["epoch"], state["step"]) == (0, 4)
    fault(state)
    (tmp_path / "parts").mkdir()
    checkpoint.save(tmp_path / "parts", state)
    train(settings(data), tmp_path / "parts")
    assert not same_bits(weights(whole), weights(tmp_path / "parts"))


def test_the_rate_falls_along_half_a_cosine(data, tmp_path, monkeypatch):
    seen = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, *args: (
        seen.append(self.param_groups[0]["lr"]), step(self, *args))[1])
    run = settings(data, schedule="cosine", rate=0.2)
    train(run, tmp_path / "run")
    assert seen == [run.rate_at(i, len(seen)) for i in range(len(seen))]
    assert seen[0] == 0.2
    assert seen == sorted(seen, reverse=True)
    assert run.rate_at(len(seen) // 2, len(seen)) == pytest.approx(0.1, abs=0.1 / len(seen) + 0.01)
    assert run.rate_at(len(seen), len(seen)) == pytest.approx(0)
    assert settings(data, rate=0.2).rate_at(3, 4) == 0.2
    with pytest.raises(TilewiseError, match="epochs was"):  # the wave would be another
        train(settings(data, schedule="cosine", rate=0.2, epochs=run.epochs + 1), tmp_path / "run")


def test_averaged_weights(data, tmp_path):
    """As computed from the weights of every step; the model itself learns as without them."""
    plain, averaged = settings(data), settings(data, average=0.5)
    train(plain, tmp_path / "plain")
    history = train(averaged, tmp_path / "averaged")
    states = [checkpoint.load(tmp_path / name) for name in ("plain", "averaged")]
    assert all(torch.equal(states[1]["model"][name], value)
               for name, value in states[0]["model"].items())
    assert all("accuracy of the average" in epoch for epoch in history["epochs"])
    model = nn.Linear(3, 2)
    average = Average(model, 0.5)
    expected, own = model.weight.detach().clone(), []
    for k in range(1, 20):
        with torch.no_grad():
            model.weight.normal_()
        average.update()
        kept = min(0.5, k / (k + 9))
        expected = kept * expected + (1 - kept) * model.weight.detach()
        own.append(model.weight.detach().clone())
    assert torch.allclose(average.values["weight"], expected, atol=1e-6)
    with average.in_place():
        assert torch.equal(model.weight, average.values["weight"])
    assert torch.equal(model.weight, own[-1])


def test_averages_go_on_with_the_same_bits(data, tmp_path, monkeypatch):
    whole = settings(data, average=0.9)
    train(whole, tmp_path / "whole")
    train(settings(data, average=0.9, epochs=1), tmp_path / "parts")
    train(whole, tmp_path / "parts")
    one, two = (checkpoint.load(tmp_path / name)["average"] for name in ("whole", "parts"))
    assert one["steps"] == two["steps"] > 0
    assert all(torch.equal(two["values"][name], value) for name, value in one["values"].items())


def test_the_precision_is_that_of_the_run(data, tmp_path, monkeypatch):
    seen = []
    learn = Run._learn
    monkeypatch.setattr(Run, "_learn", lambda self, numbers: (
        seen.append(torch.get_float32_matmul_precision()), learn(self, numbers))[1])
    before = torch.get_float32_matmul_precision()
    train(settings(data, precision="high", epochs=1), tmp_path / "run")
    assert set(seen) == {"high"}
    assert torch.get_float32_matmul_precision() == before


def test_a_checkpoint_from_before_there_were_schedules_goes_on(data, tmp_path):
    train(settings(data, epochs=1), tmp_path / "run")
    state = checkpoint.load(tmp_path / "run")
    for name in ("schedule", "average", "precision"):
        state["settings"].pop(name)
    state.pop("average")
    checkpoint.save(tmp_path / "run", state)
    assert len(train(settings(data, epochs=2), tmp_path / "run")["epochs"]) == 2


def test_a_finished_run_can_get_more_epochs(data, tmp_path):
    train(settings(data, epochs=3), tmp_path / "whole")
    train(settings(data, epochs=1), tmp_path / "parts")
    train(settings(data, epochs=3, save_every=5), tmp_path / "parts")
    assert same_bits(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_a_checkpoint_of_another_run_is_refused(data, tmp_path):
    train(settings(data, epochs=1), tmp_path / "run")
    with pytest.raises(TilewiseError, match="another run: seed was 0, is 1; name another"):
        train(settings(data, seed=1), tmp_path / "run")
    with pytest.raises(TilewiseError, match="training images were 96, are 64"):
        train(settings(str(idx_set(tmp_path / "less", train=64))), tmp_path / "run")


def test_a_directory_belongs_to_one_run_at_a_time(data, tmp_path):
    with checkpoint.owned(tmp_path), pytest.raises(TilewiseError, match="in use by another run"):
        train(settings(data), tmp_path)


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, {"step": 1})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk is full")))
    with pytest.raises(OSError, match="disk is full"):
        checkpoint.save(tmp_path, {"step": 2})
    assert checkpoint.load(tmp_path)["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.NAME]


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, real=real, name=name: (events.append(name), real(*a)))
    checkpoint.save(tmp_path, {"step": 1})
    assert events == ["fsync", "replace", "fsync"]
    events.clear()
    write_atomically(tmp_path / "cache", b"of no value")
    assert events == ["replace"]


def test_what_a_killed_writer_left_is_removed(data, tmp_path):
    (tmp_path / "checkpoint.pt.123.0.tmp").write_bytes(b"half")
    (tmp_path / "checkpoint.pt").write_bytes(b"torn")
    with pytest.raises(TilewiseError, match="is not a checkpoint"):
        train(settings(data), tmp_path)
    assert not list(tmp_path.glob("*.tmp"))


def flip_a_byte_of(value, path):
    """In the file, somewhere inside the bytes of a tensor."""
    content = bytearray(path.read_bytes())
    place = content.find(value.numpy().tobytes())
    assert place > 0
    content[place + 5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("what", ["weight", "momentum"])
def test_a_flipped_byte_is_noticed(tmp_path, what):
    state = {"model": {"weight": torch.randn(7, 5)},
             "optimizer": [{"momentum": torch.randn(9)}, (1, 0.1, None, torch.tensor(3))]}
    checkpoint.save(tmp_path, state)
    assert same_bits(checkpoint.load(tmp_path)["model"], state["model"])
    value = {**state["model"], **state["optimizer"][0]}[what]
    flip_a_byte_of(value, tmp_path / checkpoint.NAME)
    with pytest.raises(TilewiseError, match=r"is damaged.*remove it to begin the run anew"):
        checkpoint.load(tmp_path)


def test_a_checkpoint_without_a_checksum_is_read(tmp_path):
    torch.save({"format": checkpoint.FORMAT, "step": 3}, tmp_path / checkpoint.NAME)
    assert checkpoint.load(tmp_path)["step"] == 3


def test_a_checkpoint_cannot_execute_code(tmp_path):
    torch.save({"format": checkpoint.FORMAT, "x": Settings("x")}, tmp_path / checkpoint.NAME)
    with pytest.raises(TilewiseError, match="is not a checkpoint"):
        checkpoint.load(tmp_path)


# plans


@pytest.mark.usefixtures("by_our_kernels")
def test_decisions_come_before_what_is_known(data):
    x, w = torch.randn(4, 8, 12, 12), torch.randn(8, 8, 3, 3)
    with noted() as own:
        tilewise.conv2d(x, w)
    asked = ENGINE.planner.plan(own[0].problem, own[0].target, algorithm="vendor")
    assert own[0].algorithm != "vendor"
    assert adopt(to_text([asked])) == 1
    with noted() as after:
        tilewise.conv2d(x, w)
    assert [plan.algorithm for plan in after] == ["vendor"]
    assert not ENGINE.planner.wisdom.entries  # nothing of it would be saved
    tilewise.wisdom.forget()
    with noted() as again:
        tilewise.conv2d(x, w)
    assert again == own


def test_a_decision_that_cannot_run_here_is_refused(data):
    with noted() as own:
        tilewise.conv2d(torch.randn(4, 8, 12, 12), torch.randn(8, 8, 3, 3))
    items = json.loads(to_text(own))
    with pytest.raises(TilewiseError, match="needs version 99: use the same tilewise"):
        adopt(json.dumps([{**items[0], "version": 99}]))
    with pytest.raises(TilewiseError, match="is not in the space"):
        adopt(json.dumps([{**items[0], "schedule": {"tile": 999}}]))
    with pytest.raises(TilewiseError, match="cpu_depthwise"):
        adopt(json.dumps([*items, {**items[0], "algorithm": "cpu_depthwise"}]))
    assert not ENGINE.planner.decided.entries


@pytest.mark.parametrize("name", ["lenet_a", "lenet_b"])
def test_a_rehearsal_finds_all_plans_of_a_run(tmp_path, name):
    s = Settings(str(idx_set(tmp_path / "data")), name, batch=28, epochs=1)
    shape = engines.image_shape(s)
    run = Run(s, tmp_path, open_images(s.data, *shape), Ranks(), Silent())
    decided = dict(ENGINE.planner.decided.entries)
    assert len(decided) >= 2
    with noted() as seen:
        run.to_the_end()
    assert seen
    assert all(plan.source == "wisdom" for plan in seen)  # not one was planned on the way
    tilewise.wisdom.forget()


def test_sizes_of_shares():
    assert plans.sizes(100, 32, 1) == {32, 4}
    assert plans.sizes(96, 32, 2) == {16}
    assert plans.sizes(97, 32, 2) == {16, 1}
    assert plans.sizes(20, 32, 3) == {7, 6}


def test_a_run_goes_on_with_the_plans_it_began_with(data, tmp_path, whole):
    with pytest.raises(KeyboardInterrupt):
        train(settings(data), tmp_path / "parts", StopAt(5))
    items = json.loads(checkpoint.load(tmp_path / "parts")["plans"])
    assert items
    tilewise.wisdom.forget()
    # another user of the machine has measured meanwhile, and found something else
    for item in items:
        problem = tilewise.Problem.parse(item["problem"])
        target = tilewise.Target.host(threads=torch.get_num_threads())
        plan = ENGINE.planner.plan(problem, target, algorithm="reference")
        ENGINE.planner.wisdom.record(plan, ENGINE.admitted(None, problem, target),
                                     ENGINE.bits(None, problem, target))
    with noted() as seen:
        train(settings(data), tmp_path / "parts")
    assert seen
    assert "reference" not in {plan.algorithm for plan in seen}
    assert same_bits(weights(whole), weights(tmp_path / "parts"))


# the command


def test_the_command_trains_and_complains(data, tmp_path, capsys, monkeypatch):
    run = ["train", data, "-o", str(tmp_path / "run"), "--model", "tiny", "--size", "12"]
    assert main([*run, "--epochs", "1", "--lines-every", "1"]) == OK
    out = capsys.readouterr().out
    assert "tiny with tilewise: 96 images in batches of 64, 1 epochs, 1 process" in out
    assert "epoch 1 step 2 of 2: loss" in out
    assert "epoch 1: loss" in out
    assert main([*run, "--epochs", "1", "--json"]) == OK
    assert len(json.loads(capsys.readouterr().out)["losses"]) == 2
    assert main([*run, "--seed", "1"]) == USAGE
    assert "seed was 0, is 1" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "PIL", None)
    folder = tmp_path / "folder" / "class"
    folder.mkdir(parents=True)
    for number in range(10):
        (folder / f"{number}.png").touch()
    assert main(["train", str(folder.parent), "-o", str(tmp_path / "other")]) == MISSING


def test_the_bar_tells_what_the_lines_tell(data, tmp_path, capsys):
    with Bar() as bar:
        train(settings(data), tmp_path, bar)
        task = bar._bar.tasks[0]
        assert (task.completed, task.total) == (12, 12)
        assert task.description.startswith("epoch 2, loss ")
    assert "epoch 2: loss" in capsys.readouterr().out

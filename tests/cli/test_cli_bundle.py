"""tilewise bundle, as a command; what bundles do is tested in tests/bundle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.bundled import Small, image, small

import tilewise
from tilewise.cli import OK, USAGE, main
from tilewise.conv.running import ENGINE
from tilewise.kernels.cpu.emit import jit
from tilewise.runtime import weights


def test_a_bundle_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads, place = torch.get_num_threads(), tmp_path / "out"
    model = small()
    with torch.no_grad():
        model.head.bias.fill_(3.0)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    try:
        assert main(["bundle", "support.bundled:small", "--example", "2x3x40x40", "--weights",
                     str(tmp_path / "weights.pt"), "-o", str(place), "--json"]) == OK
        told = json.loads(capsys.readouterr().out)
        fast = tilewise.bundle.load(place, Small, digest=told["digest"])
        with torch.inference_mode():
            torch.testing.assert_close(fast(image()), model(image()))
    finally:
        torch.set_num_threads(threads)
        jit.BROUGHT.clear()
        weights.BROUGHT.clear()
        ENGINE.planner.decided.forget()
        ENGINE.executables.clear()


def test_an_example_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", "lenet_b", "--example", "3xa", "-o", str(tmp_path / "out")]) == USAGE
    assert "needs sizes such as 8x3x224x224" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

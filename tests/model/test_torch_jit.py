"""Optimised models in torch.jit and torch.export."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tilewise
from tilewise.model import captured

X, OTHER = torch.randn(2, 3, 16, 16), torch.randn(3, 3, 21, 19)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4)).eval()


@pytest.mark.parametrize("options", [{}, {"keep_original": False}], ids=["kept", "released"])
def test_tracing(model, options):
    """Sizes stay open, as they do in a trace of the original."""
    fast = tilewise.optimize(model, X, **options)
    fast(X)
    traced = torch.jit.trace(fast, X)
    for x in (X, OTHER):
        assert_close(traced(x), model(x), rtol=1e-4, atol=1e-5)
        assert_close(traced(x), torch.jit.trace(model, X)(x), rtol=1e-4, atol=1e-5)


def test_a_trace_of_a_kept_model_is_saved_without_tilewise(model, tmp_path):
    traced = torch.jit.trace(tilewise.optimize(model, X), X)
    assert "tilewise" not in str(traced.inlined_graph)
    torch.jit.save(traced, tmp_path / "traced.pt")
    assert_close(torch.jit.load(tmp_path / "traced.pt")(OTHER), model(OTHER))


@pytest.mark.parametrize("options", [{}, {"keep_original": False}], ids=["kept", "released"])
def test_scripting_says_what_to_script(model, options):
    fast = tilewise.optimize(model, X, **options)
    with pytest.raises(tilewise.TilewiseError, match=r"torch\.jit\.script\(original\)"):
        torch.jit.script(fast)
    with pytest.raises(tilewise.TilewiseError, match=r"torch\.jit\.script\(original\)"):
        torch.jit.script(nn.Sequential(fast, nn.ReLU()))
    torch.jit.script(model)  # which is as it was


def test_forward_can_still_be_asked_for_attributes(model):
    """Libraries look for them and expect an AttributeError."""
    forward = tilewise.optimize(model).forward
    assert getattr(forward, "__globals__", None) is None
    assert not hasattr(forward, "__closure__")


def test_scripted_models_are_refused(model):
    for scripted in (torch.jit.script(model), torch.jit.trace(model, X)):
        with pytest.raises(tilewise.TilewiseError, match=r"ScriptModule.*optimize the model that"):
            tilewise.optimize(scripted, X)


@pytest.mark.parametrize("options", [{}, {"keep_original": False}], ids=["kept", "released"])
def test_export(model, options):
    """Without gradients, a chain is one operator of ours."""
    with torch.no_grad():
        exported = torch.export.export(tilewise.optimize(model, X, **options), (X,))
    assert_close(exported.module()(X), model(X), rtol=1e-4, atol=1e-5)
    kinds = [str(node.target) for node in exported.graph.nodes]
    assert sum(kind.startswith("tilewise.conv2d") for kind in kinds) == 2
    assert not any("relu" in kind or "batch_norm" in kind for kind in kinds)


def test_export_with_an_open_batch(model):
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(tilewise.optimize(model, X), (X,),
                                   dynamic_shapes=({0: batch},))
    assert_close(exported.module()(X[:1]), model(X[:1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("can", [True, False])
def test_layers_are_left_alone_where_export_cannot_look_through_them(monkeypatch, can):
    """torch 2.6 takes the parameters of such a layer for inputs."""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.layers = nn.Conv2d(3, 4, 3), nn.ModuleList([nn.Conv2d(4, 4, 3)])
            self.block = nn.Sequential(nn.Conv2d(4, 4, 3))

        def forward(self, x):
            return self.block(self.layers[0](self.layer(x)))

    monkeypatch.setattr(captured, "EXPORTS_LAYERS", can)
    net = tilewise.optimize(Net().eval())
    armed = {name for name, part in net.named_modules() if "forward" in part.__dict__}
    assert armed == {"", "block"} | ({"layer", "layers.0"} if can else set())
    assert "forward" in tilewise.optimize(nn.Conv2d(3, 4, 3)).__dict__

"""torch.compile(model, backend="tilewise")."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tilewise  # noqa: F401  the backend is found by its entry point or by this import
from tilewise.model import dynamo, layout
from tilewise.models import lenet_a, resnet18
from tilewise.runtime.weights import MADE

LAYOUT = (layout.enter, dynamo.planes)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def plain(monkeypatch):
    """Without Inductor: what a machine without a C++ compiler does."""
    monkeypatch.setattr(dynamo, "has_compiler", lambda: False)


def error(y, reference):
    return float((y.double() - reference.double()).norm() / reference.double().norm())


def test_it_is_registered():
    assert "tilewise" in torch._dynamo.list_backends()


@pytest.mark.parametrize("factory, shape", [(lenet_a, (2, 1, 86, 86)),
                                            (resnet18, (2, 3, 64, 64))])
def test_same_results(factory, shape, plain):
    torch.manual_seed(0)
    model, x = factory().eval(), torch.randn(shape)
    with torch.no_grad():
        assert error(torch.compile(model, backend="tilewise")(x), model(x)) < 1e-5


def test_with_inductor():
    if not dynamo.has_compiler():
        pytest.skip("no C++ compiler on this machine")
    model, x = lenet_a().eval(), torch.randn(2, 1, 86, 86)
    with torch.no_grad():
        assert error(torch.compile(model, backend="tilewise")(x), model(x)) < 1e-5


def test_patterns_become_one_call(plain):
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
                          nn.MaxPool2d(2)).eval()
    graphs = []

    def capture(graph, inputs):
        assert dynamo.rewrite(graph) == 1
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    with torch.no_grad():
        torch.compile(model, backend=capture)(torch.randn(1, 8, 8, 8))
    assert [target for target in graphs[0] if target not in LAYOUT] == [dynamo.convolve]


class Padded(nn.Module):
    """As networks that came from TensorFlow are written."""

    def __init__(self, pad, **options):
        super().__init__()
        self.conv, self.pad, self.options = nn.Conv2d(8, 8, 3, stride=2), pad, options

    def forward(self, x):
        return F.relu6(self.conv(F.pad(x, self.pad, **self.options)))


@pytest.mark.parametrize("pad, options, calls", [
    ((0, 1, 2, 3), {}, 1), ((1, 1), {}, 2), ((0, 1, -1, 1), {}, 2),
    ((1, 1, 1, 1), {"mode": "reflect"}, 2), ((1, 1, 1, 1), {"value": 2.0}, 2)])
def test_a_zero_padding_before_joins_the_convolution(pad, options, calls, plain):
    model, x, targets = Padded(pad, **options).eval(), 9 * torch.randn(2, 8, 13, 13), []

    def capture(graph, inputs):
        dynamo.rewrite(graph)
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    with torch.no_grad():
        y, expected = torch.compile(model, backend=capture)(x), model(x)
    assert error(y, expected) < 1e-5
    assert expected.max() == 6
    assert len([target for target in targets if target not in LAYOUT]) == calls


def test_batches_do_not_recompile_for_ever(plain, monkeypatch):
    model, compiled = lenet_a().eval(), []
    real = dynamo.rewrite
    monkeypatch.setattr(dynamo, "rewrite", lambda graph: compiled.append(1) or real(graph))
    run = torch.compile(model, backend="tilewise")
    with torch.no_grad():
        for batch in (2, 3, 4, 5, 6, 7, 8):
            x = torch.randn(batch, 1, 86, 86)
            assert error(run(x), model(x)) < 1e-5
    assert len(compiled) <= 2


def test_weights_are_prepared_once_and_again_when_they_change(plain):
    model, x = resnet18().eval(), torch.randn(1, 3, 64, 64)
    run = torch.compile(model, backend="tilewise")
    with torch.no_grad():
        run(x)
        kept = len(MADE)
        run(x)
        assert len(MADE) == kept
        model.bn1.running_mean.add_(0.5)
        model.layer1[0].conv1.weight.mul_(2)
        assert error(run(x), model(x)) < 1e-5


def test_gradients(plain):
    model, x = resnet18().train(), torch.randn(2, 3, 64, 64)
    twin = copy.deepcopy(model)
    torch.compile(model, backend="tilewise")(x).sum().backward()
    twin(x).sum().backward()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert error(p.grad, q.grad) < 5e-2 or q.grad.norm() < 1e-3, name

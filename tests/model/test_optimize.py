"""optimize(model): the same results, the same state, in whatever way a model is used."""

import copy
import functools
import gc
import io
import re
import threading

import pytest
import torch
import torch._inductor.config
from support.harness import LONG
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

import tilewise
from tilewise.model import dynamo, variants
from tilewise.model.capture import Capture
from tilewise.model.captured import all_captured, blocks
from tilewise.model.tuning import observe
from tilewise.models import MODELS, lenet_a, lenet_b, resnet18, resnet50, vgg, vgg11, vgg11_bn
from tilewise.planner.measure import Timing
from tilewise.runtime.weights import MADE


def settled(model):
    """A model whose batch norms have statistics of their own."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
    return model.eval()


def light(factory):
    """The heads of VGGs have 123 of 133 million weights and no convolution: here, few."""
    if LONG or not factory.__name__.startswith("vgg"):
        return factory()
    with torch.device("meta"):
        model = factory()
        model.classifier = nn.Sequential(
            nn.Linear(512 * 49, 64), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(64, 64),
            nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(64, 1000))
    return drawn(model)


def drawn(model):
    """A VGG that was made without memory; narrow heads would be silent with its first weights."""
    model = model.to_empty(device="cpu").apply(vgg._initialise)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.Linear):
            module.reset_parameters()
    return model


def image(model, n=2):
    size = getattr(model, "size", 64)
    return torch.randn(n, 1 if hasattr(model, "size") else 3, size, size)


def error(y, reference):
    return float((y.double() - reference).norm() / reference.norm())


@pytest.fixture(scope="module", params=[lenet_a, lenet_b, vgg11, vgg11_bn, resnet18, resnet50],
                ids=lambda factory: factory.__name__)
def model(request):
    torch.manual_seed(0)
    return settled(light(request.param))


def test_same_results_as_float64(model):
    x = image(model)
    with torch.no_grad():
        reference = copy.deepcopy(model).double()(x.double())
        y = tilewise.optimize(model)(x)
    assert error(y, reference) < 5e-6
    assert y.stride() == reference.stride()


def test_every_convolution_is_taken_and_its_tail_fused(model):
    fast = tilewise.optimize(model)
    with torch.no_grad():
        fast(image(model))
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    assert len(blocks(fast)) == convolutions
    (captured,) = [found for found in all_captured(fast) if found.captures]
    ((capture,),) = captured.captures.values()
    assert not any(isinstance(step, nn.BatchNorm2d) for step in capture.steps.values())
    kept = sum(isinstance(step, nn.ReLU) for step in capture.steps.values())
    assert kept <= len(getattr(model, "classifier", ()))


def test_state_is_the_models_own(model):
    fast = tilewise.optimize(model)
    mine, theirs = fast.state_dict(), model.state_dict()
    assert list(mine) == list(theirs)
    assert all(mine[name].data_ptr() == theirs[name].data_ptr() for name in mine)
    assert [name for name, _ in fast.named_parameters()] == [
        name for name, _ in model.named_parameters()]


def test_copied_and_saved(model):
    x, fast = image(model), tilewise.optimize(model)
    with torch.no_grad():
        y = fast(x)
        twin = copy.deepcopy(fast)
        file = io.BytesIO()
        torch.save(fast, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for other in (twin, loaded):
            assert error(other(x), y.double()) < 3e-6
        for parameter in twin.parameters():
            parameter.zero_()
        assert torch.equal(fast(x), y), "a copy shares nothing"
        assert not torch.equal(twin(x), y), "a copy has its own weights"


def test_changed_weights_are_used(model):
    own = copy.deepcopy(model)
    x, fast = image(own), tilewise.optimize(own)
    with torch.no_grad():
        fast(x)
        for parameter in own.parameters():
            parameter.mul_(1.1)
        for module in own.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.add_(0.1)
        assert error(fast(x), copy.deepcopy(own).double()(x.double())) < 5e-6
        fast.load_state_dict(model.state_dict())
        assert error(fast(x), copy.deepcopy(model).double()(x.double())) < 5e-6


def test_weights_changed_behind_autograds_back_are_used():
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1)).eval()
    x, fast = torch.randn(1, 16, 8, 8), tilewise.optimize(model)
    with torch.no_grad():
        fast(x)
        model[0].weight.data.mul_(2)  # tells no version counter
        assert error(fast(x), model(x).double()) < 1e-5


def test_training_mode_trains(model):
    torch.manual_seed(0)  # with some images torch's own ResNet-50 errs by 5 %
    own = copy.deepcopy(model)
    fast, x = tilewise.optimize(own), image(own, 4)
    exact = copy.deepcopy(own).double()
    for net in (own, fast, exact):
        net.train()
        for module in net.modules():  # dropout draws differently
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    statistics = copy.deepcopy(own.state_dict())
    expected = own(x)
    expected.square().mean().backward()
    torchs = {name: p.grad.clone() for name, p in own.named_parameters()}
    exact(x.double()).square().mean().backward()
    changed = copy.deepcopy(own.state_dict())
    own.zero_grad()
    own.load_state_dict(statistics)
    y = fast(x)
    y.square().mean().backward()
    assert error(y, expected.double()) < 1e-3
    got = dict(fast.named_parameters())
    grads = {name: p.grad for name, p in exact.named_parameters() if p.grad.norm() > 1e-4}
    # deep nets amplify every rounding, so torch's own error is the measure; and a value near zero
    # may pass ReLU, or of two nearly equal the other may win a window, in one of them only
    most = max(2e-2, 4 * max(error(torchs[name], grad) for name, grad in grads.items()))
    assert most < 0.2  # a mistake errs by 1
    for name, grad in grads.items():
        assert error(got[name].grad, grad) < most, name
    for name, value in fast.state_dict().items():
        torch.testing.assert_close(value, changed[name], rtol=1e-3, atol=1e-4)


def test_gradients_in_eval_mode_are_right():
    model = settled(resnet18())
    fast, x = tilewise.optimize(model), torch.randn(1, 3, 64, 64)
    fast(x).sum().backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(x).sum().backward()
    for name, p in model.named_parameters():
        assert error(got[name], p.grad.double()) < 1e-3, name


def test_eight_threads_serve_one_model():
    model = settled(resnet18())
    fast, images = tilewise.optimize(model), [torch.randn(1, 3, 64, 64) for _ in range(8)]
    with torch.no_grad():
        expected = [model(x) for x in images]
    found = [None] * 8

    def serve(i):
        with torch.no_grad():
            found[i] = fast(images[i])

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for y, reference in zip(found, expected, strict=True):
        assert error(y, reference.double()) < 1e-5


class Branching(nn.Module):
    """Cannot be traced: its path depends on the data."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.unused = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        y = self.conv(x)
        return y.relu() if x.sum() > 0 else y


def test_a_model_that_cannot_be_traced_is_done_module_by_module():
    model = Branching().eval()
    fast = tilewise.optimize(model)
    assert type(fast) is Branching
    for x in (torch.ones(1, 3, 9, 9), -torch.ones(1, 3, 9, 9)):
        assert error(fast(x), model(x).double()) < 1e-5
    assert [block._parts[0] for block in blocks(fast)] == [fast.conv]
    assert not blocks(model), "the original stays as it was"


class Stage(nn.Module):
    """Can be traced."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.scale = nn.Parameter(torch.rand(8, 1, 1))

    def forward(self, x):
        return x + self.scale * self.act(self.norm(self.conv(x)))


class Staged(nn.Module):
    """Cannot be traced as a whole; its result is a dictionary with an image in it."""

    def __init__(self, view=False):
        super().__init__()
        self.stem, self.stages = nn.Conv2d(3, 8, 3, padding=1), nn.ModuleList([Stage(), Stage()])
        self.view = view

    def forward(self, x):
        if x.shape[2] < 4:
            raise ValueError("needs 4 rows")
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return {"image": x, "flat": x.view(len(x), -1) if self.view else x.flatten(1)}


@pytest.mark.parametrize("given", [False, True], ids=["", "with_example"])
@pytest.mark.parametrize("view", [False, True], ids=["", "view"])
def test_parts_of_a_model_are_traced_where_the_whole_cannot_be(given, view):
    model, x = settled(Staged(view)), torch.randn(2, 3, 12, 12)
    fast = tilewise.optimize(model, x if given else None)
    assert type(fast) is Staged
    fast(x)
    assert [block._parts[1] for block in blocks(fast)] == [
        None, *(stage.norm for stage in fast.stages)]
    assert list(fast.state_dict()) == list(model.state_dict())
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    twins = [fast, copy.deepcopy(fast), torch.load(file, weights_only=False)]
    with torch.no_grad():
        expected = model(x)
        for twin in twins:
            y = twin(x)
            assert error(y["image"], expected["image"].double()) < 1e-5
            assert error(y["flat"], expected["flat"].double()) < 1e-5
            assert y["image"].is_contiguous()
        for parameter in twins[1].parameters():
            parameter.zero_()
        assert not twins[1](x)["image"].any(), "a copy has its own weights"
        assert error(fast(x)["image"], expected["image"].double()) < 1e-5
    fast.train()
    assert all(block._parts[1].training for block in blocks(fast) if block._parts[1])


@pytest.mark.parametrize("winner", range(4))
def test_the_fastest_way_to_run_a_model_is_returned(winner, monkeypatch):
    def timed(runs, **_):
        for run in runs:
            run()
        assert len(runs) == (4 if dynamo.has_compiler() else 2)
        return [Timing(1.0 if i == winner else 2.0, 1.0, 0.0) for i in range(len(runs))]

    if winner > 1 and not dynamo.has_compiler():
        pytest.skip("no C++ compiler on this machine")
    monkeypatch.setattr(variants, "interleaved", timed)
    model, x = settled(Staged()), torch.randn(2, 3, 12, 12)
    with torch._inductor.config.patch(freezing=True):
        fast = tilewise.optimize(model, x, effort="measure")
    tilewise.wisdom.forget()
    assert bool(blocks(fast)) == (winner == 0)
    assert (fast._compiled_call_impl is not None) == (winner > 1)
    assert list(fast.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        expected = model(x)
        for twin in (fast, copy.deepcopy(fast)):
            assert error(twin(x)["image"], expected["image"].double()) < 1e-5
            assert twin(x)["image"].is_contiguous()
        for parameter in model.parameters():
            parameter.mul_(1.5)
        changed = model(x)["image"]
        assert error(fast(x)["image"], changed.double()) < 1e-5, "it follows the weights"


def test_what_races_keeps_the_bound(monkeypatch):
    seen = []
    monkeypatch.setattr(variants, "_compiled", lambda model, backend: seen.append(backend))
    monkeypatch.setattr(variants, "has_compiler", lambda: True)
    monkeypatch.setattr(variants, "_runs", lambda model, arguments: model is not None)
    model, x = settled(Staged()), torch.randn(2, 3, 12, 12)
    for max_error in (None, 1e-6):
        tilewise.optimize(model, x, effort="measure", max_error=max_error)
    tilewise.wisdom.forget()
    assert seen == ["inductor", dynamo.tilewise, "inductor"]


def test_wisdom_only_reads_no_clock(monkeypatch):
    monkeypatch.setattr("tilewise.model.optimize.fastest", None)
    tilewise.optimize(settled(Staged()), torch.randn(2, 3, 12, 12), effort="wisdom_only")


@pytest.mark.parametrize("act", [nn.ReLU6(), nn.Hardtanh(0.0, 6.0), nn.Hardtanh(0.0, 5.0)], ids=str)
def test_relu6(act):
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3), act).eval(), 9 * torch.randn(2, 8, 9, 9)
    fast = tilewise.optimize(model)
    assert error(fast(x), model(x).double()) < 1e-5
    (block,) = blocks(fast)
    assert block.activation == ("relu6" if act.max_val == 6 else "clamp:0.0:5.0")


class FunctionalDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        return F.dropout(self.conv(x), 0.5, self.training)


def test_a_training_flag_is_not_frozen_into_the_graph():
    fast = tilewise.optimize(FunctionalDropout().eval())
    x = torch.randn(1, 3, 9, 9)
    assert torch.equal(fast(x), fast(x))
    fast.train()
    assert (fast(x) == 0).float().mean() > 0.2


class Shared(nn.Module):
    """One convolution called twice, a sum that broadcasts, and a view."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.gate = nn.Conv2d(8, 8, 1)
        self.offset = nn.Parameter(torch.randn(1))

    def forward(self, x):
        x = self.conv(self.conv(x).relu())
        x = (self.conv(x) + self.gate(x.mean((2, 3), keepdim=True))).relu() + self.offset
        return x.reshape(x.shape[0], -1).exp(), x


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_odd_graphs(layout):
    model, x = Shared().eval(), torch.randn(2, 8, 10, 10).contiguous(memory_format=layout)
    fast = tilewise.optimize(model)
    with torch.no_grad():
        _, reference = model(x.contiguous())
        flat, y = fast(x)
    assert error(y, reference.double()) < 1e-5
    assert error(flat, reference.reshape(2, -1).exp().double()) < 1e-5
    assert y.is_contiguous(memory_format=layout)


def test_hooks_and_other_paddings_stay():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
                          nn.Conv2d(4, 4, 3)).eval()
    calls = []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    fast, x = tilewise.optimize(model), torch.randn(1, 3, 8, 8)
    assert error(fast(x), model(x).double()) < 1e-5
    assert len(calls) == 2


@pytest.mark.parametrize("factory", [lenet_a, vgg11_bn, resnet18], ids=lambda f: f.__name__)
def test_the_original_is_released(factory):
    torch.manual_seed(0)
    model = settled(light(factory))
    x, before = image(model), copy.deepcopy(model.state_dict())
    held = sum(t.numel() for t in model.state_dict().values())
    fast = tilewise.optimize(model, keep_original=False)
    with torch.no_grad():
        y, expected = fast(x), copy.deepcopy(model).double()(x.double())
    assert error(y, expected) < 5e-6
    assert error(copy.deepcopy(fast)(x), expected) < 5e-6
    assert all(p.requires_grad for p in model.parameters()), "the original stays as it was"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fast.modules())
    assert sum(t.numel() for t in fast.state_dict().values()) <= held
    convolutions = {m.weight.data_ptr(): m for m in model.modules() if isinstance(m, nn.Conv2d)}
    normed = sum(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    shared = sum(t.data_ptr() in convolutions for t in fast.state_dict().values())
    assert shared == len(convolutions) - normed, "what was folded is not held twice"


def test_release_is_refused_where_it_is_not_safe():
    with pytest.raises(tilewise.TilewiseError, match="can be traced"):
        tilewise.optimize(Branching().eval(), keep_original=False)
    with pytest.raises(tilewise.TilewiseError, match="eval mode"):
        tilewise.optimize(lenet_a(), keep_original=False)


def test_prepared_weights_are_smaller_than_the_models():
    MADE.clear()
    with torch.device("meta"):
        model = MODELS["vgg16"]().eval()
    model = drawn(model)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    fast = tilewise.optimize(model)
    with torch.no_grad():
        fast(torch.randn(1, 3, 224, 224))
    assert 0 < MADE.total < 1.2 * weights


def test_measuring_needs_an_example():
    with pytest.raises(tilewise.TilewiseError, match="needs an example"):
        tilewise.optimize(lenet_a(), effort="measure")


def test_measured_plans_are_used(monkeypatch):
    model = lenet_a().eval()
    # whoever wins the race of whole models here
    monkeypatch.setattr("tilewise.model.optimize.fastest", lambda original, ours, *_: ours)
    x = image(model)
    tilewise.wisdom.forget()
    fast = tilewise.optimize(model, x, effort="measure")
    told = tilewise.explain(fast, x)
    assert [name for name, _ in told.layers] == ["features.0", "features.3"]
    times = [(row[3], row[4]) for row in told.rows[1:]]
    assert not any(ours.startswith("~") for ours, _ in times)  # only what was measured is plain
    assert any(theirs.startswith("~") for _, theirs in times) == ("is an estimate" in str(told))
    assert error(fast(x), model(x).double()) < 1e-5
    tilewise.wisdom.forget()


def test_measuring_tells_what_it_returns():
    said = []
    tilewise.optimize(lenet_a().eval(), image(lenet_a()), effort="measure",
                      tell=lambda what, done, total: said.append((what, done, total)))
    what, *far = said[-1]
    assert far == [1, 1]
    assert re.match(r"returned: (tilewise|torch.*) \(tilewise \d+\.\d\d ms, torch \d", what)
    tilewise.wisdom.forget()


@pytest.mark.usefixtures("by_our_kernels")
def test_max_error_reaches_every_layer():
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1)).eval()
    x = torch.randn(4, 64, 28, 28)
    (free,) = observe(tilewise.optimize(model), x)
    (bound,) = observe(tilewise.optimize(model, max_error=free.plan.error / 2), x)
    assert free.plan.algorithm == "cpu_winograd"
    assert bound.plan.algorithm != "cpu_winograd"


def test_prepared_weights_die_with_the_model():
    MADE.clear()
    fast = tilewise.optimize(nn.Sequential(nn.Conv2d(32, 32, 3, padding=1)).eval())
    with torch.no_grad():
        fast(torch.randn(1, 32, 8, 8))
    assert len(MADE) == 1
    del fast
    gc.collect()  # a traced module is a cycle
    assert len(MADE) == 0


def test_a_model_without_tilewise_cannot_be_explained():
    with pytest.raises(tilewise.TilewiseError, match="optimize"):
        tilewise.explain(lenet_a(), torch.randn(1, 1, 86, 86))


def test_models_have_torchvisions_keys():
    assert len(MODELS) == 13
    with torch.device("meta"):  # their names and sizes are asked for alone
        resnet, larger, large = (MODELS[name]() for name in ("resnet18", "resnet50", "vgg16"))
    keys = list(larger.state_dict())
    assert {"conv1.weight", "layer1.0.downsample.0.weight", "layer4.2.bn3.running_var",
            "fc.bias"} <= set(keys)
    assert list(large.state_dict())[-1] == "classifier.6.bias"
    assert sum(p.numel() for p in large.parameters()) == 138_357_544
    assert sum(p.numel() for p in larger.parameters()) == 25_557_032
    assert sum(p.numel() for p in resnet.parameters()) == 11_689_512


class Pair(nn.Module):
    """Cannot be traced, and gives two results."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        return (self.conv(x), x) if x.sum() > 0 else (x, x)


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair = Pair()

    def forward(self, x):
        y = self.pair(x)
        return y[0] if isinstance(y, tuple | list) else y


def test_the_class_of_what_was_not_traced_is_not_guessed():
    model, x = First().eval(), torch.ones(1, 3, 9, 9)
    assert error(tilewise.optimize(model)(x), model(x).double()) < 1e-5


class Cut(nn.Module):
    """Into as many pieces as there are, which is fewer than it asks for."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)

    def forward(self, x):
        return torch.cat([piece * i for i, piece in enumerate(self.conv(x).chunk(4, 1))], 1)


def test_fewer_pieces_than_asked_for():
    model, x = Cut().eval(), torch.randn(1, 3, 9, 9)
    assert len(model.conv(x).chunk(4, 1)) == 3
    assert error(tilewise.optimize(model)(x), model(x).double()) < 1e-5


class Garbage:
    """In a cycle, so that only the collector frees it, with a finalizer that no graph has."""

    freed = 0

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        Garbage.freed += 1


def test_garbage_of_others_is_not_the_models():
    """A collection in the middle of tracing runs finalizers, which write to whatever they like."""
    model, x = resnet18().eval(), torch.randn(1, 3, 64, 64)
    before, Garbage.freed = gc.get_threshold(), 0
    try:
        for later in range(100, 3000, 200):  # allocations until the collector comes
            gc.set_threshold(100_000)
            for _ in range(200):
                Garbage()
            gc.set_threshold(gc.get_count()[0] + later)
            capture = Capture(model, *tree_flatten(((x,), {})), None)
            assert capture.opaque == []
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert Garbage.freed == 15 * 200


class Coder(nn.Module):
    """As autoencoders are: what people call is not the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.decoder = nn.Sequential(nn.Conv2d(8, 3, 3, padding=1), nn.Sigmoid())

    def decode(self, z):
        return {"sample": self.decoder(z)}

    def forward(self, x):
        return self.decode(self.encoder(x))


def test_other_methods_than_forward_are_fast_too():
    model, z = Coder().eval(), torch.randn(1, 8, 12, 12)
    with torch.no_grad():
        fast = tilewise.optimize(model)
        assert torch.allclose(fast.decode(z)["sample"], model.decode(z)["sample"], atol=1e-5)
        (block,) = blocks(fast)
        assert block.activation == "sigmoid"
        x = torch.randn(1, 3, 12, 12)
        assert torch.allclose(fast(x)["sample"], model(x)["sample"], atol=1e-5)


@functools.lru_cache
def is_old(version):
    return version < "1"


class Asks(nn.Module):
    """A function that remembers its answers is asked, as packages ask for versions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x):
        return self.last(self.conv(x)) if is_old("2") else self.last(self.conv(x).relu())


def test_functions_that_remember_are_functions():
    model, x = Asks().eval(), torch.randn(1, 3, 12, 12)
    with torch.no_grad():
        fast = tilewise.optimize(model, x)
        assert torch.allclose(fast(x), model(x), atol=1e-5)
    assert [block.activation for block in blocks(fast)] == ["relu", None]

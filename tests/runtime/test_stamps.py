"""Words of memory that change with objects: every change is told, no look is."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewise
from tilewise.model.captured import all_captured
from tilewise.model.guards import Guards
from tilewise.runtime import stamps
from tilewise.runtime.stamps import Stamps, of_dict, of_kind, of_tensors

# not asked of the code itself: a trial that fails where it must not has to fail here
pytestmark = pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python counts no changes")


def stamped(*tensors: Tensor) -> Stamps:
    addresses = of_tensors(tensors)
    assert addresses is not None
    return Stamps(addresses)


@torch.no_grad()
def test_python_s_and_torch_s_layouts_are_found() -> None:
    """Whatever lies in the memory around."""
    assert stamps.dicts_count()
    junk: list[Tensor] = []
    for i in range(100):
        junk = [*junk[i % 7:], *(torch.randn(i) for _ in range(i % 11))]
        stamps.tensor_layout.cache_clear()
        assert stamps.tensor_layout() is not None


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda x: x.mul_(2), "one value": lambda x: x.view(-1).__setitem__(3, 1.0),
    "a view": lambda x: x.detach()[1:].add_(1), "zeroed": lambda x: x.zero_(),
    "data": lambda x: setattr(x, "data", torch.zeros_like(x)),
    "data of other strides": lambda x: setattr(x, "data", x.data.transpose(0, 1)),
    "data of another shape": lambda x: setattr(x, "data", x.data.view(-1, 2)),
    "data further on": lambda x: setattr(x, "data", x.data[1:]),
    "transposed": lambda x: x.transpose_(0, 1), "squeezed": lambda x: x.unsqueeze_(0),
    "resized": lambda x: x.resize_(64, 64), "set": lambda x: x.set_(torch.zeros(3)),
    "swapped": lambda x: torch.utils.swap_tensors(x, torch.zeros(3)),
    "strided": lambda x: x.as_strided_((2, 2), (1, 2)), "half": lambda x: setattr(x, "data",
                                                                                  x.data.half())}


@pytest.mark.parametrize("size", [(4, 4), (4, 4, 2), (4, 4, 1, 3), (4, 4, 1, 1, 2)])
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_change_of_a_tensor_is_told(change: str, size: tuple[int, ...]) -> None:
    others = [torch.randn(3) for _ in range(5)]
    x = torch.randn(size)
    storage = x.untyped_storage()  # stays where it is, also where the tensor leaves it
    here = stamped(*others[:2], x, *others[2:])
    x.sum(), x.t_ if x.dim() < 3 else x.mT, x.data_ptr(), x.clone(), list(x)
    assert here.same()
    CHANGES[change](x)
    assert not here.same()
    assert storage.nbytes() > 0


def test_what_was_made_in_inference_mode_has_a_place_and_a_form() -> None:
    with torch.inference_mode():
        x = torch.randn(4, 4)
        here = stamped(x)
        x.add_(1)  # told by fingerprints
        assert here.same()
        x.t_()
    assert not here.same()


def test_more_sizes_than_a_tensor_holds_itself() -> None:
    assert of_tensors([torch.zeros(1, 1, 1, 1, 1, 1)]) is None


@pytest.mark.parametrize("word, wrong", [("self", 1), ("offset", 0), ("memory", 0), ("version", 0)])
@torch.no_grad()
def test_a_wrong_layout_is_noticed(word: str, wrong: int) -> None:
    layout = stamps.tensor_layout()
    assert layout is not None
    tensors = [torch.zeros(4000)[11:221].view(2, 3, 5, 7) for _ in range(2)]
    assert stamps._tells_tensors(tensors[0], layout)
    assert not stamps._tells_tensors(tensors[1], layout._replace(**{word: wrong}))


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_change_of_a_dictionary_is_told(kind: type) -> None:
    space = kind(a=1, b=[])
    for change in (lambda: space.update(a=2), lambda: space.pop("a"),
                   lambda: space.setdefault("d", 1), lambda: space.clear()):
        here = Stamps([of_dict(space)])
        assert "b" in space or not space
        assert here.same()
        change()
        assert not here.same()


def test_another_class_is_told() -> None:
    module: Any = nn.ReLU()
    here = Stamps([of_kind(module)])
    assert here.same()
    module.__class__ = nn.Sigmoid
    assert not here.same()


def guarded(module: nn.Module) -> Guards:
    guards = Guards()
    guards.is_a(module)
    guards.lists(module._modules)
    guards.unhooked([module])
    guards.knows(module.__dict__, "number", module.__dict__["number"])
    guards.knows(module.__dict__, "several", module.__dict__["several"])
    return guards


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number, self.several, self.part = 3, [1, 2], nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x


BREAKS: dict[str, Callable[[Any], Any]] = {
    "number": lambda m: setattr(m, "number", 4), "list": lambda m: m.several.append(3),
    "other list": lambda m: setattr(m, "several", [1]),
    "class": lambda m: setattr(m, "__class__", nn.ReLU),
    "hook": lambda m: m.register_forward_hook(lambda *_: None),
    "part": lambda m: setattr(m, "part", nn.ReLU()), "more parts": lambda m: m.add_module("x", m),
    "forward": lambda m: setattr(m, "forward", abs)}


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("name", BREAKS)
def test_guards_see_what_counts(name: str, counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewise.model.guards.dicts_count", lambda: counts)
    module = Holder()
    guards = guarded(module)
    assert all(guards.hold() for _ in range(3))
    module.unread = 5  # which does not count
    assert guards.hold()
    module.number, module.several = 3, [1, 2]
    assert all(guards.hold() for _ in range(3))
    BREAKS[name](module)
    assert not guards.hold()
    assert not guards.hold()


def test_guards_that_stay_are_not_gone_through_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    look = Guards._calm_hold
    monkeypatch.setattr(Guards, "_calm_hold", lambda *args: looks.append(1) or look(*args))
    module = Holder()
    guards = guarded(module)
    assert all(guards.hold() for _ in range(9))
    assert len(looks) == 1
    module.unread = 5
    assert all(guards.hold() for _ in range(9))
    assert len(looks) == 2
    module.number = 7
    assert not any(guards.hold() for _ in range(9))  # which is remembered as well
    assert len(looks) == 3


def test_what_changes_in_every_call_gets_no_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr("tilewise.model.guards.Stamps",
                        lambda *args: made.append(1) or Stamps(*args))
    module = Holder()
    guards = guarded(module)
    for i in range(30):
        module.unread = i
        assert guards.hold()
    assert len(made) == stamps.ATTEMPTS
    module.number = 7
    assert not guards.hold()


def test_the_order_of_an_ordered_dictionary_has_no_stamp() -> None:
    module: Any = nn.Sequential(nn.ReLU(), nn.Tanh())
    module._modules = OrderedDict(module._modules)
    guards = Guards()
    guards.lists(module._modules)
    assert all(guards.hold() for _ in range(3))
    module._modules.move_to_end("0")
    assert not guards.hold()


def test_machines_without_native_code_have_no_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamps, "KNOWN", False)
    assert not stamps.dicts_count.__wrapped__()
    assert stamps.tensor_layout.__wrapped__() is None


@pytest.mark.parametrize("other", [torch.eye(4).to_sparse(), torch.eye(4).to_mkldnn(),
                                   torch.zeros(4, device="meta")], ids=["sparse", "mkldnn", "meta"])
def test_tensors_without_memory_have_no_stamps(other: Tensor) -> None:
    assert of_tensors([torch.zeros(3), other]) is None


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.factor = nn.Conv2d(4, 4, 3), nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.conv(x)) * self.factor


@torch.no_grad()
def test_changes_that_come_seldom_are_looked_at_and_stamped_again() -> None:
    model, x = Scaled().eval(), torch.randn(1, 4, 9, 9)
    fast = tilewise.optimize(model)
    for _ in range(2 * stamps.ATTEMPTS):
        model.factor.add_(1)
        for _ in range(4):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    (bound,) = (bound for captured in all_captured(fast) for found in captured.captures.values()
                for capture in found for bound in capture.programs.bound)
    assert bound._stamps is not None


class Headed(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.conv(x)).mean((2, 3)) @ self.factor


@torch.no_grad()
def test_a_tensor_that_loses_its_memory() -> None:
    model, x = Headed().eval(), torch.randn(1, 4, 9, 9)
    model.factor = nn.Parameter(torch.randn(4, 4))
    fast = tilewise.optimize(model)
    for _ in range(4):
        expected = fast(x)
    sparse = nn.Parameter(model.factor.detach().to_sparse_csr())
    torch.utils.swap_tensors(model.factor, sparse)
    for _ in range(4):
        torch.testing.assert_close(fast(x), expected, rtol=1e-4, atol=1e-4)

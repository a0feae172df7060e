"""optimize and torch.compile change nothing that can be seen, whatever a model does."""

import itertools

import pytest
import torch
from support.corpus import CASES
from support.corpus.case import Case, Chain, Features, Net, calls, image
from support.corpus.record import differences, record
from support.corpus.runner import VARIANTS, Mode, Variant, check, reference
from support.harness import LONG
from torch import nn

# of the cases of a kind, one of so many is run in a variant; all of them are in the first
EVERY = {variant.name: 1 if LONG else 3 for variant in VARIANTS} | {"plain": 1}
SLOW = 1 if LONG else 2  # and of those that are slow, again one of so many


ALIKE = {}
for each, kind in itertools.product(VARIANTS, {case.kind for case in CASES}):
    ALIKE[each.name, kind] = [case for case in CASES if case.kind == kind and each.admits(case)]


def is_run(case, variant):
    """Cases of a kind take turns: what one variant leaves out, the next one runs."""
    alike = ALIKE[variant.name, case.kind]
    every = min(len(alike), EVERY[variant.name] * (SLOW if variant.is_slow(case) else 1))
    return case in alike and (alike.index(case) + VARIANTS.index(variant)) % every == 0


PAIRS = [pytest.param(case, variant, id=f"{case}-{variant.name}",
                      marks=[pytest.mark.slow] if variant.is_slow(case) else [])
         for case in CASES for variant in VARIANTS if is_run(case, variant)]


@pytest.mark.parametrize("case, variant", PAIRS)
def test_same(case, variant):
    found = check(case, variant)
    if found:
        pytest.fail("\n".join(found), pytrace=False)


def test_enough_cases():
    assert len(CASES) >= 220
    assert len({str(case) for case in CASES}) == len(CASES)


def test_every_kind_of_case_runs_in_every_variant():
    def kinds(admits):
        return {(case.kind, variant.name) for case in CASES for variant in VARIANTS
                if admits(case, variant)}

    assert kinds(is_run) == kinds(lambda case, variant: variant.admits(case))


# the yardstick itself: altered models must be reported


def sample(make=Chain, script=calls, **flags):
    flags = {"grad": False, "edits": False, "released": True, "compiled": True, **flags}
    return Case("self", "sample", lambda: make().eval(), script, image, **flags)


def altered(change, mode=VARIANTS[0].mode):
    def make(model, case):
        change(model)
        return model
    return Variant("altered", make, mode)


def scaled_weight(model):
    model.c.weight.data *= 1.001


def hidden_state(model):
    model.register_buffer("more", torch.zeros(1))


class Wrong(Chain):
    """Right about its result, and wrong about one thing beside it."""

    wrong = None

    def forward(self, x):
        y = super().forward(x)
        if self.wrong:
            WRONG[self.wrong](self, x)
        return y


WRONG = {"input": lambda self, x: x.mul_(1.5), "random": lambda self, x: torch.rand(1),
         "buffer": lambda self, x: self.bn.running_mean.add_(1),
         "counter": lambda self, x: self.bn.num_batches_tracked.add_(1),
         "raises": lambda self, x: self.missing}


def goes_wrong(what):
    return lambda model: setattr(model, "wrong", what)


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_side_effect_is_reported(what):
    assert check(sample(Wrong), altered(lambda model: None)) == []
    assert check(sample(Wrong), altered(goes_wrong(what)))


@pytest.mark.parametrize("change", [scaled_weight, hidden_state, nn.Module.train])
def test_an_altered_model_is_reported(change):
    assert check(sample(Features), altered(change))


class Detached(Net):
    cut = False

    def forward(self, x):
        y = self.relu(self.c(x))
        return self.d(y.detach() if self.cut else y)


def test_a_lost_gradient_is_reported():
    mode = Mode(grad=True)
    assert check(sample(Detached), altered(lambda model: None, mode)) == []
    assert check(sample(Detached), altered(lambda model: setattr(model, "cut", True), mode))


def test_a_forgotten_exception_is_reported():
    def script(model):
        return model(torch.zeros(3))
    assert check(sample(script=script), altered(lambda model: setattr(model, "forward", abs)))


def test_an_unsteady_case_is_refused():
    state = []
    unsteady = sample(script=lambda model: state.append(1) or len(state))
    with pytest.raises(AssertionError, match="does not repeat"):
        reference(unsteady, Mode())


@pytest.mark.parametrize("wanted, got", [
    (torch.ones(3), torch.ones(3) + 1e-3), (torch.ones(3), torch.ones(3, 1)),
    (torch.ones(2, 2), torch.ones(2, 2).t().contiguous().double()),
    (torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2).t()),
    (torch.tensor([1, 2]), torch.tensor([1, 3])), (torch.tensor(float("nan")), torch.tensor(0.0)),
    (nn.Parameter(torch.ones(1)), torch.ones(1)), ((1, 2), [1, 2]), ({"a": 1}, {"b": 1}),
    ([1], [1, 2]), ("x", "y"), (True, 1), (None, 0), (1.0, 1.01), (ValueError(), KeyError()),
    (ValueError(), 1), (1, ValueError())])
def test_records_that_differ(wanted, got):
    assert list(differences(record(wanted), record(got)))
    assert not list(differences(record(wanted), record(wanted)))


def test_the_layout_of_a_result_counts():
    x = torch.randn(2, 8, 4, 4)
    last = x.contiguous(memory_format=torch.channels_last)
    assert list(differences(record(x), record(last)))
    assert list(differences(record(last), record(x)))

"""Chains of elementwise operations: torch's values at every size, no byte beside them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from support import faults

from tilewise.bench.guarded import UNTOUCHED, Mismatch, launch_guarded
from tilewise.core import InvalidProblem, Target
from tilewise.core.activations import ACTIVATIONS, parsed
from tilewise.core.isa import ISA
from tilewise.core.schedule import Schedule
from tilewise.kernels.activations import applied
from tilewise.kernels.cpu.between import pointwise
from tilewise.kernels.cpu.between.pointwise import ARITHMETIC, Chain, make
from tilewise.kernels.cpu.emit import jit, launch
from tilewise.kernels.cpu.emit.launch import launch_of
from tilewise.kernels.cpu.emit.requests import Request

HOST = Target.host(threads=2)
ROWS = [name for name, row in ISA.items() if row.lanes <= HOST.lanes
        and HOST.row.machines == row.machines and not row.matrix]
WIDEST = ROWS[0]
WORDS = ("x", "weight", "bias", "residual")
UNITS = 6 * 2.0**-23  # of the result or the input, what is larger
ALL = Chain(("image", "each", "channel", "pixel"),
            (("mul", 0, 1), ("add", 4, 2), ("sub", 5, 3), ("relu", 6), ("add", 7, -2.0)))
STEPS = (*ARITHMETIC, *ACTIVATIONS, "leaky_relu:0.2", "clamp:-2.0:3.0", "elu:0.5",
         "clamp:0.0:inf")
EXACT: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg,
    "maximum": torch.maximum, "minimum": torch.minimum, "sqrt": torch.sqrt,
    "fma": lambda a, b, c: a * b + c, "prelu": lambda x, s: torch.where(x > 0, x, x * s)}


def chain_of(step: str) -> Chain:
    """One step on as many images."""
    count = ARITHMETIC[step][0] if step in ARITHMETIC else 1 + bool(parsed(step)[0].operand)
    return Chain(("image",) * count, ((step, *range(count)),))


def computed(chain: Chain, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """In torch's operators, at the operands' precision; they broadcast as (N, H * W, C)."""
    values = list(operands)
    for name, *args in chain.steps:
        given = [torch.tensor(arg, dtype=values[0].dtype) if isinstance(arg, float) else values[arg]
                 for arg in args]
        values.append((EXACT.get(name) or applied(name))(*given))
    return values[-1] if chain.steps else values[0]


def spread(x: torch.Tensor, pitch: int) -> torch.Tensor:
    """Rows of a matrix in memory, so many floats apart; nothing lies behind the last."""
    rows, columns = x.shape
    held = torch.full((rows, max(pitch, columns)), float("nan"))
    held[:, :columns] = x
    return held.flatten()[:(rows - 1) * held.shape[1] + columns]


class Case(NamedTuple):
    """Images, rows of each, columns; floats between rows of each operand and of the result."""

    extent: tuple[int, int, int]
    gaps: tuple[int, ...] = (0,) * 5


def shape_of(kind: str, case: Case) -> tuple[int, int, int]:
    n, rows, c = case.extent
    return {"image": (n, rows, c), "channel": (1, 1, c), "each": (n, 1, c),
            "pixel": (n, rows, 1), "norm": (1, 1, c)}[kind]


def run(chain: Chain, row: str, case: Case, operands: Sequence[torch.Tensor],
        threads: int = 2, sides: Sequence[str] = ("start", "end")) -> torch.Tensor:
    """The result as (N, H * W, C), once checked that the memory around it is as it was."""
    n, rows, c = case.extent
    pitches = [(0 if kind in ("channel", "norm") else x.shape[2] + gap)
               for kind, x, gap in zip(chain.kinds, operands, case.gaps)]
    pitch = c + case.gaps[4]
    batch, words = pointwise.sizes(chain, n, rows, c, pitches, pitch)
    kernel = launch_of(Request(make, chain, Schedule(), ISA[row], (), True), words)
    given: Any = {word: spread(x.flatten(0, 1), own)
                  for word, x, own in zip(WORDS, operands, pitches)}
    found = []
    for side in sides:
        y = launch_guarded(kernel, given, {"y": (n * rows - 1) * pitch + c}, batch, threads,
                           side)["y"]
        whole = torch.nn.functional.pad(y.view(torch.int32), (0, pitch - c), value=UNTOUCHED)
        whole = whole.view(n * rows, pitch)
        if not bool((whole[:, c:] == UNTOUCHED).all()):
            raise Mismatch(f"{chain.code} on {row}: wrote between rows, {case}")
        found.append(whole[:, :c].contiguous().view(torch.float32).view(n, rows, c))
    for other in found[1:]:
        if not torch.equal(found[0].view(torch.int32), other.view(torch.int32)):
            raise Mismatch(f"{chain.code} on {row}: bits depend on the place, {case}")
    return found[0]


def integers(chain: Chain, case: Case) -> list[torch.Tensor]:
    """Small whole numbers, of which all arithmetic is exact."""
    torch.manual_seed(sum(case.extent))
    return [torch.randint(-9, 10, shape_of(kind, case)).float() for kind in chain.kinds]


def check_exact(chain: Chain, row: str, case: Case) -> None:
    operands = integers(chain, case)
    wanted = computed(chain, operands).expand(case.extent)
    if not torch.equal(run(chain, row, case, operands), wanted):
        raise Mismatch(f"{chain.code} on {row}: not torch's result, {case}")


class Mutation(NamedTuple):
    apply: faults.Patch


def check(mutation: Mutation) -> None:
    with faults.patched(mutation.apply):
        for columns in (1, 5, 16, 39, 70):
            check_exact(ALL, WIDEST, Case((3, 7, columns), (3, 2, 0, 1, 4)))
        check_exact(chain_of("add"), WIDEST, Case((1, 1, 40_001)))
        check_not_finite("minimum", WIDEST)


def with_words(**changes: Callable[[int], int]) -> faults.Patch:
    """Some of the words that `sizes` gives are others."""
    def change(found: tuple[int, list[int]]) -> tuple[int, list[int]]:
        for name, new in changes.items():
            place = pointwise.SIZES.index(name)
            found[1][place] = new(found[1][place])
        return found
    return faults.changed(pointwise, "sizes", change)


def vectors(count: Callable[[Any], Any], skip: bool = False) -> faults.Patch:
    original = pointwise._vectors

    def changed(f: Any, chain: Any, starts: Any, y: Any, places: Any, rest: Any = None) -> None:
        if rest is None or not skip:
            original(f, chain, starts, y, places, None if rest is None else count(rest))
    return faults.replaced(pointwise, "_vectors", changed)


MUTATIONS = {
    "the rest of a row is stored whole": Mutation(vectors(lambda rest: None)),
    "the rest of a row is one longer": Mutation(vectors(lambda rest: rest + 1)),
    "the rest of a row is left out": Mutation(vectors(lambda rest: rest, skip=True)),
    "all images have the first one's vector": Mutation(with_words(pitch1=lambda pitch: 0)),
    "all pixels have the first one's value": Mutation(with_words(pitch3=lambda pitch: 0)),
    "the last row is as long as the others": Mutation(with_words(end=lambda end: 2 * end)),
    "rows lie side by side": Mutation(with_words(pitch=lambda pitch: pitch - 1)),
    "small numbers lose a task": Mutation(
        faults.replaced(pointwise, "ceil_div", lambda a, b: a // b or 1)),
    "the smaller forgets what is not a number": Mutation(
        lambda patch: patch.setitem(ARITHMETIC, "minimum", (2, lambda f, a, b: a.minimum(b)))),
}


# values


@pytest.mark.parametrize("row", ROWS)
def test_every_number_of_channels(row: str) -> None:
    """All kinds of operands, with and without gaps between pixels."""
    for columns, gaps in itertools.product(range(1, 71), ((0,) * 5, (3, 2, 0, 1, 4))):
        check_exact(ALL, row, Case((2 + columns % 2, 3, columns), gaps))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("step", STEPS)
def test_every_step(row: str, step: str) -> None:
    """The nearest float where a step rounds once or never, else within its stated error."""
    chain, case = chain_of(step), Case((1, 3, 1031))
    torch.manual_seed(0)
    operands = [4 * torch.randn(shape_of(kind, case)) for kind in chain.kinds]
    if step == "sqrt":
        operands[0].abs_()
    found = run(chain, row, case, operands)
    exact = computed(chain, [x.double() for x in operands])
    if step != "fma" and (step in ARITHMETIC or not parsed(step)[0].error):
        assert torch.equal(found, exact.float())
        return
    scale = torch.stack([exact.abs(), *(x.abs().double() for x in operands)]).amax(0)
    if step == "fma":  # without the instruction, the product is rounded too
        scale = (operands[0] * operands[1]).abs() + operands[2].abs()
    assert bool(((found - exact).abs() <= UNITS * scale).all())


def check_not_finite(step: str, row: str) -> None:
    """NaN and infinities come out where torch's have them in float64."""
    chain = chain_of(step)
    numbers = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0]
    numbers += [1e30, -1e30] if len(chain.kinds) == 1 else []  # their products are infinite
    every = torch.tensor(list(itertools.product(numbers, repeat=len(chain.kinds))))
    operands = [own.contiguous().view(1, 1, -1) for own in every.T]
    found = run(chain, row, Case((1, 1, len(every))), operands)
    wanted = computed(chain, [x.double() for x in operands]).float()
    if not torch.equal(found.isnan(), wanted.isnan()):
        raise Mismatch(f"{step} on {row}: NaN is elsewhere than torch's")
    if not torch.allclose(found, wanted, rtol=1e-6, atol=1e-7, equal_nan=True):
        raise Mismatch(f"{step} on {row}: not torch's result")


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("step", STEPS)
def test_what_is_not_finite(row: str, step: str) -> None:
    check_not_finite(step, row)


@pytest.mark.parametrize("row", ROWS)
def test_without_steps_bits_stay_as_they_are(row: str) -> None:
    """Denormals, infinities and all kinds of NaN."""
    torch.manual_seed(0)
    for case in (Case((2, 5, 19), (1, 0, 0, 0, 2)), Case((1, 1, 20_011))):
        bits = torch.randint(-2**31, 2**31 - 1, case.extent, dtype=torch.int32)
        found = run(Chain(("image",)), row, case, [bits.view(torch.float32)])
        assert torch.equal(found.view(torch.int32), bits)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("floats", [1, 15, 4096, 16_383, 16_384, 16_385, 100_003])
def test_memory_without_gaps_is_one_row(row: str, floats: int) -> None:
    for extent in ((1, 1, floats), (1, floats, 1)):
        check_exact(chain_of("add"), row, Case(extent))
    check_exact(Chain(("image", "image"), (("fma", 0, 2.0, 1), ("relu", 2), ("neg", 3))), row,
                Case((1, 1, floats)))


@pytest.mark.parametrize("kinds", list(itertools.product(pointwise.OPERANDS, repeat=2)))
def test_every_pair_of_kinds(kinds: tuple[str, str]) -> None:
    """Also without an image among them, and with vectors of whole numbers of lanes."""
    for c, n in itertools.product((1, 32, 33), (1, 4)):
        check_exact(Chain(kinds, (("sub", 0, 1), ("mul", 2, 3.0), ("maximum", 0, 3))),
                    WIDEST, Case((n, 5, c), (2, 1, 0, 0, 3)))


@pytest.mark.parametrize("chain", [ALL, Chain(("image",), (("silu", 0),))])
def test_tasks_and_threads_change_no_bit(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in (Case((3, 50, 37), (0, 0, 0, 0, 5)), Case((1, 40, 64))):
        torch.manual_seed(0)
        operands = [torch.randn(shape_of(kind, case)) for kind in chain.kinds]
        monkeypatch.setattr(pointwise, "WORTH", 1 << 14)
        wanted = run(chain, WIDEST, case, operands, threads=1)
        for worth, threads in itertools.product((1, 100, 1 << 10), (1, 2, 3)):
            monkeypatch.setattr(pointwise, "WORTH", worth)
            assert torch.equal(run(chain, WIDEST, case, operands, threads), wanted)


# code


def test_one_code_serves_every_size(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    launch.KERNELS.clear()
    before = jit.compiled
    for kind, c in itertools.product(("channel", "each"), (1, 16, 70)):
        check_exact(Chain(("image", kind), (("mul", 0, 1),)), WIDEST, Case((2, 3, c)))
    assert jit.compiled == before + 1


def text(chain: Chain) -> str:
    return str(Request(make, chain, Schedule(), ISA[WIDEST], (), True).module().ir)


def test_chains_are_equal_where_their_code_is() -> None:
    image = ("image", "channel")
    chains = [Chain(image, (("mul", 0, other),)) for other in (1, 1.0, 0, 0.0, -0.0)]
    chains += [Chain(("image", "image"), chains[0].steps), Chain(("image", "pixel")),
               Chain(image, (("leaky_relu:0.2", 0),)), Chain(image, (("leaky_relu", 0),)),
               Chain(image), Chain(image, (("clamp:0.0:6.0", 0),)), Chain(image, (("relu6", 0),))]
    assert len(set(chains)) == len({chain.code for chain in chains}) == len(chains)
    for chain in chains:
        each = Chain(tuple(kind.replace("channel", "each") for kind in chain.kinds), chain.steps)
        assert each == chain
        assert text(each) == text(chain)
    assert Chain(image, (("leaky_relu:0.01", 0),)) == Chain(image, (("leaky_relu", 0),))


@pytest.mark.parametrize("kinds, steps", [
    ((), ()), (("image",) * 5, ()), (("plane",), ()), (("image",), (("add", 0),)),
    (("image",), (("add", 0, 1),)), (("image",), (("relu", 0, 0),)), (("image",), (("prelu", 0),)),
    (("image",), (("add", 0, True),)), (("image",), (("add", 0, -1),)),
    (("image",), (("mul", 0, 1e39),)), (("image",), (("softplus", 0),)),
    (("image",), (("add", 0, "1"),)), (("image",), (("relu", 1), ("relu", 0)))])
def test_wrong_chains_are_refused(kinds: Any, steps: Any) -> None:
    with pytest.raises(InvalidProblem):
        Chain(kinds, steps)


# faults


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_pointwise")


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])

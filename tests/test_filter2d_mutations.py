"""Deliberate faults in the code of filters: the harness must notice every one of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import filter_harness as harness
import numpy as np
import pytest
from filter_harness import Case, guarded, random_kernel, random_pixels
from harness import Mismatch, in_process

from tilewise.core import lowrank
from tilewise.core.borders import sources
from tilewise.frontend.image_arrays import ENGINE
from tilewise.kernels.cpu import elements, filter_common, filter_separable, launch
from tilewise.kernels.cpu.elements import ELEMENTS, Element
from tilewise.runtime import filters

LANES = os.cpu_count() or 1


class Mutation(NamedTuple):
    """A fault, and a filter that runs into it."""

    apply: Callable[[pytest.MonkeyPatch], None]
    kind: str = "float32"
    shape: tuple[int, ...] = (21, 37)
    kernel: tuple[int, int] = (3, 3)
    border: str = "mirror"
    rank: int = 0
    reverse: bool = False
    algorithm: str = "filter_direct"


def replaced(owner: Any, name: str, value: Any) -> Callable[..., None]:
    return lambda patch: patch.setattr(owner, name, value)


def changed(owner: Any, name: str, change: Callable[[Any], Any]) -> Callable[..., None]:
    """The patch that passes a cached property's value, or a function's result, through `change`."""
    original = vars(owner)[name]
    if hasattr(original, "func"):  # a cached property
        patched: Any = property(lambda self: change(original.func(self)))
    else:
        def patched(*args: Any, **options: Any) -> Any:
            return change(original(*args, **options))
    return replaced(owner, name, patched)


def element(name: str, **changes: Any) -> Callable[..., None]:
    return lambda patch: patch.setitem(ELEMENTS, name, replace(ELEMENTS[name], **changes))


def without_count(name: str, place: int) -> Callable[..., None]:
    """Loads or stores that forget how many lanes they are for."""
    original = getattr(Element, name)

    def unmasked(*args: Any, **options: Any) -> Any:
        return original(*args[:place], **options)

    return replaced(Element, name, unmasked)


def one_row_down(patch: pytest.MonkeyPatch) -> None:
    """Every column of the kernel starts a row too low."""
    original = filter_common.FilterModule._column

    def lower(self: Any, f: Any, x: Any, *rest: Any) -> Any:
        return original(self, f, x.bytes(self.g.pitch), *rest)

    patch.setattr(filter_common.FilterModule, "_column", lower)


def shifted(size: int, before: int, after: int, border: str) -> Any:
    """A border that is off by one."""
    return np.roll(sources(size, before, after, border), 1)


def no_rows(kernel: Any, rank: int) -> tuple[Any, Any]:
    columns, rows = lowrank.factors(kernel, rank)
    return columns, 0 * rows


SEPARABLE: Any = {"kernel": (11, 13), "rank": 2, "algorithm": "filter_separable"}
MUTATIONS = {
    "truncated": Mutation(replaced(elements, "ROUNDERS", dict.fromkeys(elements.ROUNDERS, 0.0)),
                          "uint8"),
    "no upper bound": Mutation(element("u8", high=511), "uint8"),
    "no lower bound": Mutation(element("u16", low=-65535), "uint16"),
    "sign forgotten": Mutation(element("i16", low=0), "int16"),
    "whole stores": Mutation(without_count("store", 3)),
    "whole loads": Mutation(without_count("load", 4)),
    "short row": Mutation(changed(filter_common.FilterSizes, "span", lambda span: span - 1)),
    "one row down": Mutation(one_row_down),
    "border off by one": Mutation(replaced(filters, "sources", shifted)),
    "wrong constant": Mutation(replaced(filters, "_bits", lambda value: 0), border="constant"),
    "too wide strips": Mutation(changed(filters, "_strip", lambda strip: 2 * strip),
                                shape=(9, 5000)),
    "nothing across": Mutation(replaced(filter_separable, "factors", no_rows), **SEPARABLE),
    "terms in one place": Mutation(replaced(filter_separable.Geometry, "plane", 0), **SEPARABLE),
    "no room for terms": Mutation(replaced(filter_separable.Geometry, "worker_bytes",
                                           filter_common.FilterSizes.worker_bytes), **SEPARABLE),
    "rank too low": Mutation(replaced(filters, "rank_of", lambda kernel, work: 1), **SEPARABLE),
    "columns one way": Mutation(replaced(filter_common, "X_COLUMN", filter_common.X_CHANNEL),
                                reverse=True),
}


def check(mutation: Mutation) -> None:
    data = np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as cache, harness.released():
        patch.setenv("TILEWISE_CACHE_DIR", cache)  # objects do not know who patched them
        launch.KERNELS.clear()
        ENGINE.ready.clear()
        ENGINE.calls.clear()
        ENGINE._ranks.clear()
        mutation.apply(patch)
        image = guarded(mutation.shape, mutation.kind, "end")
        image[:] = random_pixels(mutation.shape, mutation.kind, data)
        kernel = 3 * random_kernel(data, *mutation.kernel, False, mutation.rank)
        harness.check(Case(image[:, ::-1] if mutation.reverse else image, kernel, mutation.border,
                           3.0, None, False, mutation.kind, "case"), mutation.algorithm)


def say_what_happens(mutation: Mutation, say: Callable[[str], object]) -> None:
    """`passed` for the filter as it is, then what the mutation did to it."""
    check(mutation._replace(apply=lambda patch: None))
    say("passed\n")
    try:
        check(mutation)
        say("passed\n")
    except Mismatch as mismatch:
        say(f"{mismatch}\n")


def in_fork(mutation: Mutation) -> list[str]:
    """The lines said by a copy of this process; if it was killed, the signal is the last."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            say_what_happens(mutation, lambda text: os.write(write, text.encode()))
        except Exception as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        lines = said.read().splitlines()
    status = os.waitpid(child, 0)[1]
    return lines + ([signal.Signals(os.WTERMSIG(status)).name] if os.WIFSIGNALED(status) else [])


def run_mutations(lane: int) -> dict[str, list[str]]:
    """Every so many-th mutation."""
    return {name: in_fork(MUTATIONS[name]) for name in list(MUTATIONS)[lane::LANES]}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    with ThreadPoolExecutor(LANES) as pool:
        lanes = pool.map(lambda lane: in_process("test_filter2d_mutations:run_mutations", lane),
                         range(LANES))
        return {name: said for lane in lanes for name, said in lane.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    without, mutated = outcomes[name]
    assert without == "passed"
    assert mutated in ("SIGSEGV", "SIGBUS") or mutated.startswith("case")

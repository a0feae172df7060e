"""Deliberate faults in the code of filters: the harness must notice every one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import faults
from support.faults import changed, replaced
from support.mutations import whole_vectors

from tilewise.bench import filter_cases as harness
from tilewise.bench.filter_cases import Case, guarded, random_kernel, random_pixels
from tilewise.core import lowrank
from tilewise.core.borders import sources
from tilewise.image.arrays import ENGINE
from tilewise.kernels.cpu.emit import elements
from tilewise.kernels.cpu.emit.elements import ELEMENTS
from tilewise.kernels.cpu.image import common as filter_common
from tilewise.kernels.cpu.image import separable as filter_separable
from tilewise.runtime import filters


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


def element(name: str, **changes: Any) -> Callable[..., None]:
    return lambda patch: patch.setitem(ELEMENTS, name, replace(ELEMENTS[name], **changes))


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
    "whole stores": Mutation(whole_vectors("store")),
    "whole loads": Mutation(whole_vectors("load")),
    "short row": Mutation(changed(filter_common.FilterSizes, "span", lambda span: span - 1)),
    "one row down": Mutation(one_row_down),
    "border off by one": Mutation(replaced(filters, "sources", shifted)),
    "wrong constant": Mutation(replaced(filters, "bits_of", lambda value: 0), border="constant"),
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
    with faults.patched(mutation.apply), harness.released():
        ENGINE.ready.clear()
        ENGINE.calls.clear()
        ENGINE._ranks.clear()
        image = guarded(mutation.shape, mutation.kind, "end")
        image[:] = random_pixels(mutation.shape, mutation.kind, data)
        kernel = 3 * random_kernel(data, *mutation.kernel, False, mutation.rank)
        value = 3.0 if mutation.border == "constant" else None
        harness.check(Case(image[:, ::-1] if mutation.reverse else image, kernel, mutation.border,
                           value, None, False, mutation.kind, "case"), mutation.algorithm)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    return faults.outcomes("test_filter2d_mutations")


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_noticed(outcomes: dict[str, list[str]], name: str) -> None:
    faults.assert_noticed(outcomes[name])

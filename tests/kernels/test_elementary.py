"""exp, tanh and what is made of them: a few units of the last place, at every exponent."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
from scipy import special

from tilewise.core.isa import ISA, Isa
from tilewise.core.target import Target
from tilewise.kernels.cpu.between import elementary
from tilewise.kernels.cpu.emit import Module, jit
from tilewise.kernels.cpu.emit.threads import BATCH, Frame, X, Y

HOST = Target.host(threads=1)
ROWS = [name for name, row in ISA.items() if 1 < row.lanes <= HOST.lanes
        and HOST.row.machines == row.machines and not row.matrix]
TINY = 2.4e-38  # twice the smallest normal number: what is smaller may be zero
OF_RESULT = {"exp": 2.0, "expm1": 4.0, "sigmoid": 3.0, "tanh": 2.0}
OF_INPUT = {"silu": 2.0, "gelu": 4.0, "gelu_tanh": 2.5, "mish": 2.5}
EXACT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp": np.exp, "expm1": np.expm1, "sigmoid": special.expit, "tanh": np.tanh,
    "silu": lambda x: x * special.expit(x), "gelu": lambda x: x * special.ndtr(x),
    "gelu_tanh": lambda x: x * special.expit(
        2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)),
    "mish": lambda x: x * np.tanh(np.logaddexp(0, x))}


def numbers() -> np.ndarray:
    """Floats of all exponents and signs, and many near zero."""
    bits = np.arange(0, 2 ** 32, 19_997, dtype=np.uint64).astype(np.uint32)
    found = bits.view(np.float32)
    found = found[np.isfinite(found) & (np.abs(found) > 1.2e-38)]
    near = np.linspace(-100, 100, 200_001, dtype=np.float32)
    whole = np.concatenate([found, near, np.float32([0, -0.0])])
    return np.ascontiguousarray(np.resize(whole, -(-len(whole) // 16) * 16))


def run(name: str, row: str, x: np.ndarray) -> np.ndarray:
    def make(isa: Isa) -> Module:
        module, function = Module(isa), getattr(elementary, name)
        with module.function("entry", exported=True, frame="pointer") as f:
            x, y = f.frame.load_pointer(X), f.frame.load_pointer(Y)
            with f.loop(f.frame.load_index(BATCH), step=isa.lanes) as at:
                (y + at.i).store(function(f, (x + at.i).load()))
        return module

    code = jit.load(make, f"test of {name}", ISA[row], "entry")
    y = np.empty_like(x)
    frame = Frame(x.ctypes.data, 0, 0, 0, y.ctypes.data, 0, len(x))
    code.function("entry", ctypes.c_void_p)(ctypes.addressof(frame))
    return y


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", EXACT)
def test_units_of_the_last_place(name: str, row: str) -> None:
    x = numbers()
    y = run(name, row, x).astype(np.float64)
    with np.errstate(all="ignore"):
        exact = EXACT[name](x.astype(np.float64))
        single = exact.astype(np.float32)
    finite = np.isfinite(single)
    assert np.array_equal(y[~finite], single[~finite])
    counted = finite & ((np.abs(exact) > TINY) | (np.abs(x) > 2 * TINY))
    unit = np.spacing(np.abs(single if name in OF_RESULT else x)).astype(np.float64)
    errors = np.abs(y - exact) / np.maximum(unit, np.spacing(np.float32(TINY)))
    errors[~counted | ((name in OF_RESULT) & (np.abs(exact) <= TINY))] = 0.0
    assert errors.max() <= {**OF_RESULT, **OF_INPUT}[name], x[errors.argmax()]
    small = finite & (np.abs(exact) <= TINY)
    assert np.all(np.abs(y[small]) <= 2 * TINY)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", EXACT)
def test_nan_stays(name: str, row: str) -> None:
    x = np.full(16, np.nan, np.float32)
    x[::2] = 1.0
    y = run(name, row, x)
    assert np.isnan(y[1::2]).all()
    assert np.isfinite(y[::2]).all()
